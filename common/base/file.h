// Files, behind an interface with a real and a fault-injecting implementation (tests/support/faulty_file_system.h).
//
//   ASSIGN_OR_RETURN(auto file, file_system.Open(path, ReadMode::kBuffered));
//   ASSIGN_OR_RETURN(const FileStat before, file->Stat());
//   RETURN_IF_ERROR(file->ReadExactly(0, buffer));            // CHECKPOINT_TRUNCATED if the file ends before
//
// Thread-safe: a File may be read from several threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/read_queue.h"

namespace weightbroker {

// What stat says of a file. Two files with equal stats are taken for the same contents: an edit can restore size, mtime
// and inode, but not ctime.
struct FileStat {
  int64_t device = 0;
  int64_t inode = 0;
  int64_t size_bytes = 0;
  int64_t mtime_ns = 0;  // nanoseconds since the epoch
  int64_t ctime_ns = 0;  // nanoseconds since the epoch
  bool is_regular_file = false;
  bool is_directory = false;

  bool operator==(const FileStat&) const = default;
};

enum class ReadMode {
  kBuffered,
  kDirect,  // O_DIRECT: offset, length and address must be multiples of kDirectAlignmentBytes
};

inline constexpr int64_t kDirectAlignmentBytes = 4096;

class File {
 public:
  virtual ~File() = default;

  // Reads up to `buffer.size()` bytes from `offset_bytes`; 0 means end of file. Short reads are legal. SYSTEM_ERROR
  // with the path and the errno otherwise.
  virtual absl::StatusOr<int64_t> ReadAt(int64_t offset_bytes, std::span<std::byte> buffer) = 0;

  virtual absl::StatusOr<FileStat> Stat() = 0;

  virtual const std::string& path() const = 0;

  // Whether the page cache holds all of these bytes, so that kBuffered reads them without the disk. False where the
  // system does not tell this process.
  virtual bool IsCached(int64_t /*offset_bytes*/, int64_t /*size_bytes*/) { return false; }

  // The descriptor behind it, which stays the file's; -1 if there is none.
  virtual int fd() const { return -1; }

  // Reads all of `buffer`; CHECKPOINT_TRUNCATED naming file, expected and found if the file ends before.
  absl::Status ReadExactly(int64_t offset_bytes, std::span<std::byte> buffer);
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Opens a regular file for reading. CHECKPOINT_UNREADABLE with the path and the errno; for kDirect also where the
  // file system refuses it (errno=EINVAL), and the caller falls back to kBuffered. Never waits: a FIFO, a device or a
  // folder is CHECKPOINT_UNREADABLE too.
  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, ReadMode mode) = 0;

  // Follows symbolic links. MODEL_NOT_FOUND if there is no such file, CHECKPOINT_UNREADABLE otherwise.
  virtual absl::StatusOr<FileStat> Stat(const std::string& path) = 0;

  // Resolves every symbolic link. Fails as Stat does.
  virtual absl::StatusOr<std::string> RealPath(const std::string& path) = 0;

  // The names in a folder, sorted, without "." and "..". Fails as Stat does.
  virtual absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& path) = 0;

  // For reads of this file system's files, up to `depth` (> 0) of them under way at once. SYSTEM_ERROR with the errno
  // if there is none to be had; then each read must be waited for.
  virtual absl::StatusOr<std::unique_ptr<ReadQueue>> NewReadQueue(int depth);

  // Reads a whole small file, at most `limit_bytes`; CHECKPOINT_TOO_LARGE above.
  absl::StatusOr<std::string> ReadSmallFile(const std::string& path, int64_t limit_bytes);
};

// The operating system's. Never deleted.
FileSystem& RealFileSystem();

}  // namespace weightbroker
