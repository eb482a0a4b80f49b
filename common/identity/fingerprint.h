// The identity of a weight set: a SHA-256 over the canonical form of spec, environment and what is in the files.
//
//   ASSIGN_OR_RETURN(auto identity, ReadCheckpointIdentity(file_system, folder));     // headers, config, index; no weights
//   const Fingerprint wanted = ComputeFingerprint(spec, environment, identity, HostDeviceFacts());
//   if (wanted.hash != resident.hash) for (auto& d : DiffFingerprints(wanted, resident)) ...   // every field, both values
//
// The canonical form is described in docs/fingerprint-format.md. Rank is not part of it. Thread-safe: all functions are
// pure but for reading files.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/checkpoint/checkpoint.h"
#include "weightbroker/internal/v1/loader.pb.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// One file of a checkpoint, as it was when the identity was read.
struct FileIdentity {
  std::string name;           // relative to the folder, as the checkpoint names it
  FileStat stat;              // of what the name leads to
  std::string contents_sha256;  // whole contents: of JSON files, and of a hub cache's blobs, which are named by it; or empty
  std::string header_sha256;  // safetensors only: of the 8 length bytes and the header
};

struct CheckpointIdentity {
  std::string folder;                // absolute, symbolic links resolved
  std::vector<FileIdentity> files;   // sorted by name: config, index, side files, shards
};

// Reads it. Fails as FindCheckpointFiles does, and with CHECKPOINT_TRUNCATED or CHECKPOINT_TOO_LARGE for a header that
// cannot be hashed.
absl::StatusOr<CheckpointIdentity> ReadCheckpointIdentity(FileSystem& file_system, const std::string& folder);

// Whether every file still has the stat it had: by stat alone, without opening any. CHECKPOINT_CHANGED names the first
// file that has not, with what changed; files that are gone are named as such.
absl::Status CheckUnchanged(FileSystem& file_system, const CheckpointIdentity& identity);

// The 40 or 64 hexadecimal digits that a hub cache names a blob by, if `resolved_path` is one whose name is a SHA-256
// (".../blobs/<64 hex>"); empty otherwise.
std::string HubBlobSha256(const std::string& resolved_path);

// What the service knows of the device, by field name; for host memory {"device.compute_capability": "none", ...}.
using DeviceFacts = std::map<std::string, std::string>;
DeviceFacts HostDeviceFacts();

struct Fingerprint {
  std::string hash;                               // 64 lower-case hexadecimal digits
  std::map<std::string, std::string> components;  // field -> canonical value; what the hash is over
};

// The spec must be complete (see CompleteSpec) and the environment checked (see CheckEnvironment).
Fingerprint ComputeFingerprint(const v1::WeightSpec& spec, const v1::Environment& environment,
                               const CheckpointIdentity& identity, const DeviceFacts& device_facts);

// ENVIRONMENT_REQUIRED if a part is missing; INVALID_ARGUMENT if one is over-long or has control characters.
absl::Status CheckEnvironment(const v1::Environment& environment);

// Every field in which they differ, sorted; empty if the hashes are equal.
std::vector<v1::FingerprintDifference> DiffFingerprints(const Fingerprint& requested, const Fingerprint& resident);

// Between the identity and the loader's request.
void ToProto(const CheckpointIdentity& identity, internal::v1::LoadRequest* request);
CheckpointIdentity FromProto(const internal::v1::LoadRequest& request);

}  // namespace weightbroker
