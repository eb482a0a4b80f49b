#include "common/identity/checkpoint_identity.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/safetensors.h"
#include "common/identity/sha256.h"

namespace weightbroker {
namespace {

constexpr int64_t kMaxJsonBytes = 256 << 20;  // config and index have lower limits where they are parsed
constexpr int64_t kHashChunkBytes = 1 << 20;

// Kernels before 6.13, and some file systems still, stamp files with a clock that ticks every 1 to 10 ms.
constexpr int64_t kSettleNs = 20'000'000;

// A field of FileStat that tells whether a file is the same, and how it is called in messages.
struct StatField {
  const char* name;
  int64_t FileStat::*value;
};
constexpr StatField kStatFields[] = {{"device", &FileStat::device},
                                     {"inode", &FileStat::inode},
                                     {"size_bytes", &FileStat::size_bytes},
                                     {"mtime_ns", &FileStat::mtime_ns},
                                     {"ctime_ns", &FileStat::ctime_ns}};

std::string PathOf(const std::string& folder, const std::string& name) { return absl::StrCat(folder, "/", name); }

absl::Status ReadInto(File& file, int64_t begin_bytes, int64_t end_bytes, Sha256& hash) {
  std::vector<std::byte> buffer(static_cast<size_t>(std::min(kHashChunkBytes, end_bytes - begin_bytes)));
  for (int64_t at = begin_bytes; at < end_bytes;) {
    const auto part = std::span(buffer).first(static_cast<size_t>(std::min(kHashChunkBytes, end_bytes - at)));
    RETURN_IF_ERROR(file.ReadExactly(at, part));
    hash.Update(part);
    at += static_cast<int64_t>(part.size());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> HashContents(File& file, const std::string& name, int64_t size_bytes) {
  if (size_bytes > kMaxJsonBytes) {
    return MakeError(Reason::kCheckpointTooLarge,
                     absl::StrCat(Printable(name), ": has ", size_bytes, " bytes; at most ", kMaxJsonBytes,
                                  " are allowed in a JSON file"),
                     {{"file", Printable(name)},
                      {"found_bytes", absl::StrCat(size_bytes)},
                      {"limit_bytes", absl::StrCat(kMaxJsonBytes)}});
  }
  Sha256 hash;
  RETURN_IF_ERROR(ReadInto(file, 0, size_bytes, hash));
  return hash.FinishHex();
}

// A file whose header cannot be hashed has a fault that the reader of headers describes best: a pointer of Git LFS,
// say.
absl::Status DescribeBadHeader(File& file, const std::string& name) {
  RETURN_IF_ERROR(ReadSafetensorsHeader(file, name).status());
  return MakeError(Reason::kCheckpointChanged,
                   absl::StrCat(Printable(name), ": is being written while it is read: wait until it is complete"),
                   {{"file", Printable(name)}});
}

// Of the 8 bytes that give the header's length, and the header.
absl::StatusOr<std::string> HashHeader(File& file, const std::string& name, int64_t size_bytes) {
  std::array<std::byte, 8> length_bytes;
  if (size_bytes < static_cast<int64_t>(length_bytes.size())) return DescribeBadHeader(file, name);
  RETURN_IF_ERROR(file.ReadExactly(0, length_bytes));
  uint64_t length = 0;
  std::memcpy(&length, length_bytes.data(), sizeof(length));
  if (length > static_cast<uint64_t>(std::min(kMaxHeaderBytes, size_bytes - 8))) return DescribeBadHeader(file, name);
  Sha256 hash;
  RETURN_IF_ERROR(ReadInto(file, 0, 8 + static_cast<int64_t>(length), hash));
  return hash.FinishHex();
}

int64_t NowNs() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// Waits until a change to any of these files would give it another ctime than it has.
void WaitUntilSettled(const std::vector<FileIdentity>& files) {
  int64_t newest_ns = 0;
  for (const FileIdentity& file : files) newest_ns = std::max(newest_ns, file.stat.ctime_ns);
  const int64_t age_ns = NowNs() - newest_ns;
  if (age_ns >= kSettleNs) return;
  // A ctime in the future is another machine's clock: no longer wait would help.
  std::this_thread::sleep_for(std::chrono::nanoseconds(kSettleNs - std::max<int64_t>(age_ns, 0)));
}

absl::StatusOr<std::vector<FileIdentity>> StatAll(FileSystem& file_system, const CheckpointFiles& files) {
  std::vector<std::string> names = files.side_names;
  names.push_back(files.config_name);
  if (!files.index_name.empty()) names.push_back(files.index_name);
  names.insert(names.end(), files.shard_names.begin(), files.shard_names.end());
  std::sort(names.begin(), names.end());
  std::vector<FileIdentity> identities;
  for (std::string& name : names) {
    ASSIGN_OR_RETURN(const FileStat stat, file_system.Stat(PathOf(files.folder, name)));
    identities.push_back({.name = std::move(name), .stat = stat, .contents_sha256 = {}, .header_sha256 = {}});
  }
  return identities;
}

// False if it is gone. CHECKPOINT_CHANGED if it is another.
absl::StatusOr<bool> IsThereUnchanged(FileSystem& file_system, const FileIdentity& file, const std::string& path) {
  const auto now = file_system.Stat(path);
  if (HasReason(now.status(), Reason::kModelNotFound)) return false;
  RETURN_IF_ERROR(now.status());
  RETURN_IF_ERROR(CheckFileUnchanged(file, *now, path));
  return true;
}

absl::Status HashFile(FileSystem& file_system, const std::string& folder, bool is_shard, FileIdentity& identity) {
  const std::string path = PathOf(folder, identity.name);
  ASSIGN_OR_RETURN(const auto file, file_system.Open(path, ReadMode::kBuffered));
  ASSIGN_OR_RETURN(const FileStat stat, file->Stat());
  RETURN_IF_ERROR(CheckFileUnchanged(identity, stat, path));
  if (!is_shard) {
    ASSIGN_OR_RETURN(identity.contents_sha256, HashContents(*file, identity.name, stat.size_bytes));
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(identity.header_sha256, HashHeader(*file, identity.name, stat.size_bytes));
  ASSIGN_OR_RETURN(const std::string resolved, file_system.RealPath(path));
  identity.contents_sha256 = HubBlobSha256(resolved);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CheckpointIdentity> ReadCheckpointIdentity(FileSystem& file_system, const std::string& folder) {
  ASSIGN_OR_RETURN(const CheckpointFiles files, FindCheckpointFiles(file_system, folder));
  CheckpointIdentity identity{.folder = files.folder, .files = {}};
  ASSIGN_OR_RETURN(identity.files, StatAll(file_system, files));
  WaitUntilSettled(identity.files);
  for (FileIdentity& file : identity.files) {
    const bool is_shard = std::binary_search(files.shard_names.begin(), files.shard_names.end(), file.name);
    RETURN_IF_ERROR(HashFile(file_system, files.folder, is_shard, file));
  }
  RETURN_IF_ERROR(CheckUnchanged(file_system, identity));
  return identity;
}

absl::Status CheckFileUnchanged(const FileIdentity& file, const FileStat& now, const std::string& path) {
  std::string fields;
  std::string changes;
  for (const StatField& field : kStatFields) {
    const int64_t before = file.stat.*field.value;
    const int64_t after = now.*field.value;
    if (before == after) continue;
    absl::StrAppend(&fields, fields.empty() ? "" : ",", field.name);
    absl::StrAppend(&changes, changes.empty() ? "" : ", ", field.name, " was ", before, " and is ", after);
  }
  if (fields.empty()) return absl::OkStatus();
  return MakeError(
      Reason::kCheckpointChanged,
      absl::StrCat(Printable(path), ": the file was changed or replaced: ", changes, "; register the model again"),
      {{"file", Printable(file.name)}, {"path", Printable(path)}, {"changed", fields}});
}

absl::Status CheckUnchanged(FileSystem& file_system, const CheckpointIdentity& identity) {
  for (const FileIdentity& file : identity.files) {
    const std::string path = PathOf(identity.folder, file.name);
    ASSIGN_OR_RETURN(const bool is_there, IsThereUnchanged(file_system, file, path));
    if (is_there) continue;
    return MakeError(Reason::kCheckpointChanged,
                     absl::StrCat(Printable(path), ": the file is gone; restore it or register another model"),
                     {{"file", Printable(file.name)}, {"path", Printable(path)}, {"changed", "gone"}});
  }
  return absl::OkStatus();
}

absl::StatusOr<int> CountGone(FileSystem& file_system, const CheckpointIdentity& identity) {
  int gone = 0;
  for (const FileIdentity& file : identity.files) {
    ASSIGN_OR_RETURN(const bool is_there, IsThereUnchanged(file_system, file, PathOf(identity.folder, file.name)));
    if (!is_there) ++gone;
  }
  return gone;
}

std::string HubBlobSha256(const std::string& resolved_path) {
  constexpr size_t kDigits = 64;
  constexpr char kFolder[] = "/blobs/";
  const size_t slash = resolved_path.rfind('/');
  if (slash == std::string::npos || resolved_path.size() - slash - 1 != kDigits) return "";
  const std::string folder = resolved_path.substr(0, slash + 1);
  if (folder.size() < sizeof(kFolder) - 1 || !folder.ends_with(kFolder)) return "";
  std::string name = resolved_path.substr(slash + 1);
  return name.find_first_not_of("0123456789abcdef") == std::string::npos ? name : "";
}

void ToProto(const CheckpointIdentity& identity, internal::v1::LoadRequest* request) {
  request->mutable_spec()->set_model(identity.folder);
  request->clear_files();
  for (const FileIdentity& file : identity.files) {
    internal::v1::FileIdentity* const proto = request->add_files();
    proto->set_name(file.name);
    proto->set_device(file.stat.device);
    proto->set_inode(file.stat.inode);
    proto->set_size_bytes(file.stat.size_bytes);
    proto->set_mtime_ns(file.stat.mtime_ns);
    proto->set_ctime_ns(file.stat.ctime_ns);
  }
}

CheckpointIdentity FromProto(const internal::v1::LoadRequest& request) {
  CheckpointIdentity identity{.folder = request.spec().model(), .files = {}};
  for (const internal::v1::FileIdentity& proto : request.files()) {
    FileIdentity& file = identity.files.emplace_back();
    file.name = proto.name();
    file.stat = {.device = proto.device(),
                 .inode = proto.inode(),
                 .size_bytes = proto.size_bytes(),
                 .mtime_ns = proto.mtime_ns(),
                 .ctime_ns = proto.ctime_ns(),
                 .is_regular_file = true,
                 .is_directory = false};
  }
  return identity;
}

}  // namespace weightbroker
