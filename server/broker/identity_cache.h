// The identities of model folders, read once and revalidated by stat alone: a second Register or an Export by spec
// opens no file unless one has changed.
//
//   auto identity = cache.Get("/srv/models/llama");          // resolved, inside a root
//   if (!identity.ok()) return identity.status();            // whatever is wrong with the folder; never cached
//
// Get blocks on files: call it from a worker. Thread-safe; two callers of one folder read it once.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/base/mutex.h"
#include "common/identity/fingerprint.h"

namespace weightbroker {

class IdentityCache {
 public:
  // Reads new identities through `reader`, which refuses what may not be read (see RootedFileSystem); revalidates
  // through `stats`. Both must outlive the cache. Keeps at most `max_folders`, dropping the one not used for longest.
  IdentityCache(FileSystem& reader, FileSystem& stats, size_t max_folders = 64)
      : reader_(reader), stats_(stats), max_folders_(max_folders) {}

  absl::StatusOr<std::shared_ptr<const CheckpointIdentity>> Get(const std::string& folder);

  // Takes over an identity that Get of another process gave, with its folder_stat. It is revalidated like any other.
  void Seed(std::shared_ptr<const CheckpointIdentity> identity);

 private:
  struct Entry {
    Mutex mutex;  // held while the folder is read
    // Its folder_stat changes when a file comes or goes, which no file's own stat tells.
    std::shared_ptr<const CheckpointIdentity> identity ABSL_GUARDED_BY(mutex);
    int64_t last_use = 0;  // guarded by the cache's mutex
  };

  bool IsCurrent(const Entry& entry, const FileStat& folder_stat) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  std::shared_ptr<Entry> FindOrAdd(const std::string& folder);

  FileSystem& reader_;
  FileSystem& stats_;
  const size_t max_folders_;

  Mutex mutex_;
  std::map<std::string, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  int64_t use_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weightbroker
