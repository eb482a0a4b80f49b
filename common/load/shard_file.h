// One file of a checkpoint while it is being loaded: read past the page cache where the file system allows it and the
// cache does not hold the bytes anyway, and known to be the file that was fingerprinted.
//
//   ASSIGN_OR_RETURN(const auto file, ShardFile::Open(file_system, folder, file_identity));
//   auto bytes = file->Read(begin, end, buffer);        // CHECKPOINT_CHANGED if it is no longer that file
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/base/mutex.h"
#include "common/identity/checkpoint_identity.h"

namespace weightbroker {

class ShardFile {
 public:
  // Opens the file and compares it with `identity`: CHECKPOINT_CHANGED if it is another one.
  static absl::StatusOr<std::unique_ptr<ShardFile>> Open(FileSystem& file_system, const std::string& folder,
                                                         const FileIdentity& identity);

  // Reads [begin_bytes, end_bytes). The result lies in `buffer`, which must start at a multiple of
  // kDirectAlignmentBytes and hold the range with its ends rounded out to that. If reading fails or the file ends
  // before, and the file is no longer the one that was fingerprinted, the error is CHECKPOINT_CHANGED; otherwise it is
  // what reading says.
  absl::StatusOr<std::span<const std::byte>> Read(int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> buffer);

  // How the bytes are best read.
  enum class Way {
    kDirect,  // past the page cache: by Start and Finish, or by Read
    kCached,  // through it, which has them, or there is no way past it: by ReadCached
  };
  Way WayTo(int64_t begin_bytes, int64_t end_bytes) const;

  // Whether it seems that much of it would be read past the page cache now: some blocks are asked for, not all, since a
  // file may have a hundred million. The first are not: whoever reads its header has those.
  bool IsOnStorage() const;

  // Begins a direct read; false if the queue has not taken it.
  bool Start(ReadQueue& queue, int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> buffer, uint64_t tag);

  // As Read, but through the page cache, and to the buffer's start: the copy from there to where the bytes belong is
  // the faster for it (7.0 and 6.7 GB/s, all in all, on two cores).
  absl::StatusOr<std::span<const std::byte>> ReadCached(int64_t begin_bytes, int64_t end_bytes,
                                                        std::span<std::byte> buffer);

  // How much has been read past the page cache.
  int64_t direct_bytes() const { return direct_bytes_; }

  // Ends what Start has begun, once the queue has said what came of it: reads the rest. As Read, with the same
  // arguments as Start.
  absl::StatusOr<std::span<const std::byte>> Finish(const ReadQueue::Completion& read, int64_t begin_bytes,
                                                    int64_t end_bytes, std::span<std::byte> buffer);

 private:
  ShardFile(FileSystem& file_system, std::string path, const FileIdentity& identity)
      : file_system_(file_system), path_(std::move(path)), identity_(identity) {}

  absl::StatusOr<std::shared_ptr<File>> OpenChecked(ReadMode mode);
  absl::StatusOr<std::shared_ptr<File>> Buffered();
  void GiveUpDirect();
  std::shared_ptr<File> Direct() const;
  absl::Status ReadDirect(File& file, size_t done, int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> buffer);
  absl::Status ReadBuffered(int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> to);
  absl::Status ReadEither(int64_t begin_bytes, int64_t end_bytes, std::span<std::byte> buffer);
  absl::StatusOr<std::span<const std::byte>> Result(absl::Status status, int64_t begin_bytes, int64_t end_bytes,
                                                    std::span<const std::byte> buffer);
  absl::Status Explain(absl::Status error);

  FileSystem& file_system_;
  const std::string path_;
  const FileIdentity identity_;

  std::atomic<int64_t> direct_bytes_{0};

  mutable Mutex mutex_;
  std::shared_ptr<File> direct_ ABSL_GUARDED_BY(mutex_);    // null where the file system refuses it
  std::shared_ptr<File> buffered_ ABSL_GUARDED_BY(mutex_);  // opened when first needed
};

}  // namespace weightbroker
