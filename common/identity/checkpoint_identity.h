// Which files a checkpoint is made of, and what is known of their contents without reading any weights.
//
//   ASSIGN_OR_RETURN(const CheckpointIdentity identity, ReadCheckpointIdentity(file_system, folder));
//   ... much later ...
//   RETURN_IF_ERROR(CheckUnchanged(file_system, identity));   // CHECKPOINT_CHANGED names the file and what changed
//
// Thread-safe: all functions are pure but for reading files.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// One file of a checkpoint, as it was when the identity was read.
struct FileIdentity {
  std::string name;  // relative to the folder, as the checkpoint names it
  FileStat stat;     // of what the name leads to
  // Of the whole contents: of JSON files, and of a hub cache's blobs, which are named by it; or empty.
  std::string contents_sha256;
  std::string header_sha256;  // safetensors only: of the 8 length bytes and the header
};

struct CheckpointIdentity {
  std::string folder;               // absolute, symbolic links resolved
  std::vector<FileIdentity> files;  // sorted by name: config, index, side files, shards
  // The folder's own, from before its files were read, for whoever wants to see whether one has come or gone. Set by
  // those that need it: ReadCheckpointIdentity leaves it alone.
  FileStat folder_stat = {};
};

// Reads it. Fails as FindCheckpointFiles does, as ReadSafetensorsHeader does for a header that cannot be hashed, and
// with CHECKPOINT_CHANGED for a file that is being written. Waits up to 20 ms for files that were changed just now:
// another change within the same tick of the kernel's clock would leave no trace in their stat.
absl::StatusOr<CheckpointIdentity> ReadCheckpointIdentity(FileSystem& file_system, const std::string& folder);

// Whether every file still has the stat it had: by stat alone, without opening any. CHECKPOINT_CHANGED names the first
// file that has not, with what changed; files that are gone are named as such.
absl::Status CheckUnchanged(FileSystem& file_system, const CheckpointIdentity& identity);

// How many of the files are gone, again by stat alone. CHECKPOINT_CHANGED for one that is there and is not what it was.
absl::StatusOr<int> CountGone(FileSystem& file_system, const CheckpointIdentity& identity);

// CHECKPOINT_CHANGED unless `file` has the stat that it had, given what that is `now`. `path` stands in the message.
absl::Status CheckFileUnchanged(const FileIdentity& file, const FileStat& now, const std::string& path);

// The 64 hexadecimal digits that a hub cache names a blob by, if `resolved_path` is one whose name is the SHA-256 of
// its contents (".../blobs/<64 hex>"); empty otherwise.
std::string HubBlobSha256(const std::string& resolved_path);

// Between the identity and the loader's request: its files, and its folder as the spec's model. What is known of the
// contents stays behind; stat alone is what CheckUnchanged needs.
void ToProto(const CheckpointIdentity& identity, internal::v1::LoadRequest* request);
CheckpointIdentity FromProto(const internal::v1::LoadRequest& request);

}  // namespace weightbroker
