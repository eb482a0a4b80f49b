#include "common/base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"

namespace weightbroker {
namespace {

// Unsigned, because a hostile file system may report any number of seconds.
int64_t ToNanoseconds(const timespec& time) {
  return static_cast<int64_t>(static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u +
                              static_cast<uint64_t>(time.tv_nsec));
}

FileStat ToFileStat(const struct stat& raw) {
  FileStat stat;
  stat.device = static_cast<int64_t>(raw.st_dev);
  stat.inode = static_cast<int64_t>(raw.st_ino);
  stat.size_bytes = raw.st_size;
  stat.mtime_ns = ToNanoseconds(raw.st_mtim);
  stat.ctime_ns = ToNanoseconds(raw.st_ctim);
  stat.is_regular_file = S_ISREG(raw.st_mode);
  stat.is_directory = S_ISDIR(raw.st_mode);
  return stat;
}

absl::Status Unreadable(const std::string& path, int error_number) {
  const char* name = strerrorname_np(error_number);
  return MakeError(Reason::kCheckpointUnreadable,
                   absl::StrCat(path, ": cannot be read: ", strerrordesc_np(error_number)),
                   {{"file", path}, {"errno", name != nullptr ? name : absl::StrCat(error_number)}});
}

absl::Status NotFoundOrUnreadable(const std::string& path, int error_number) {
  if (error_number != ENOENT && error_number != ENOTDIR) return Unreadable(path, error_number);
  return MakeError(
      Reason::kModelNotFound,
      absl::StrCat(path, ": there is no such file or folder, or it is a symbolic link to one that is gone"),
      {{"file", path}});
}

// The system's calls end a path at its first NUL: what they would open is not what was named.
bool HasNul(const std::string& path) { return path.find('\0') != std::string::npos; }

struct FolderCloser {
  void operator()(DIR* folder) const { closedir(folder); }
};
struct Freer {
  void operator()(char* memory) const { std::free(memory); }
};

class RealFile : public File {
 public:
  RealFile(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::StatusOr<int64_t> ReadAt(int64_t offset_bytes, std::span<std::byte> buffer) override {
    while (true) {
      const ssize_t count = pread(fd_.get(), buffer.data(), buffer.size(), offset_bytes);
      if (count >= 0) return count;
      if (errno != EINTR) return SystemError(absl::StrCat("read ", path_, " at byte ", offset_bytes), errno);
    }
  }

  absl::StatusOr<FileStat> Stat() override {
    struct stat raw = {};
    if (fstat(fd_.get(), &raw) != 0) return SystemError(absl::StrCat("fstat ", path_), errno);
    return ToFileStat(raw);
  }

  const std::string& path() const override { return path_; }

  bool IsCached(int64_t offset_bytes, int64_t size_bytes) override {
    if (is_in_memory_) return true;
    const int64_t begin = offset_bytes / page_bytes_ * page_bytes_;
    const int64_t end = (offset_bytes + size_bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
    const int64_t pages = (end - begin) / page_bytes_;
    const auto cached = CountCachedPages(begin, end - begin);
    return (cached.has_value() ? *cached : CountMappedPages(begin, end - begin)) >= pages;
  }

  int fd() const override { return fd_.get(); }

 private:
  static bool IsInMemory(int fd) {
    struct statfs status = {};
    return fstatfs(fd, &status) == 0 && (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
  }

  // By cachestat(2), which takes no lock of this process's memory: with mincore(2) sixteen threads waited for each
  // other longer than they read. Nothing where the kernel has no such call (before 6.5); 0 where it does not tell this
  // process.
  std::optional<int64_t> CountCachedPages(int64_t begin, int64_t length) const {
    constexpr int64_t kCachestatCall = 451;  // on every architecture
    const uint64_t range[] = {static_cast<uint64_t>(begin), static_cast<uint64_t>(length)};
    uint64_t counts[5] = {};  // cached, dirty, in writeback, evicted, recently evicted
    if (syscall(kCachestatCall, fd_.get(), range, counts, 0) == 0) return static_cast<int64_t>(counts[0]);
    return errno == ENOSYS ? std::nullopt : std::optional<int64_t>(0);
  }

  int64_t CountMappedPages(int64_t begin, int64_t length) const {
    if (!TellsWhatIsCached()) return 0;
    const auto size = static_cast<size_t>(length);
    void* const mapping = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd_.get(), begin);
    if (mapping == MAP_FAILED) return 0;
    std::vector<unsigned char> pages(size / static_cast<size_t>(page_bytes_));
    const bool told = mincore(mapping, size, pages.data()) == 0;
    munmap(mapping, size);
    return told ? std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; }) : 0;
  }

  // To whoever neither owns a file nor may write it, mincore says that everything is cached.
  bool TellsWhatIsCached() const {
    struct stat raw = {};
    return fstat(fd_.get(), &raw) == 0 &&
           (raw.st_uid == geteuid() || faccessat(fd_.get(), "", W_OK, AT_EMPTY_PATH | AT_EACCESS) == 0);
  }

  const UniqueFd fd_;
  const std::string path_;
  const bool is_in_memory_ = IsInMemory(fd_.get());
  const int64_t page_bytes_ = sysconf(_SC_PAGESIZE);
};

class PosixFileSystem : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, ReadMode mode) override {
    if (HasNul(path)) return Unreadable(path, EINVAL);
    // O_NONBLOCK: opening a FIFO that nobody writes to must not hang. It means nothing for a regular file.
    const int flags = O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | (mode == ReadMode::kDirect ? O_DIRECT : 0);
    int fd = -1;
    do {
      fd = open(path.c_str(), flags);
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return Unreadable(path, errno);
    auto file = std::make_unique<RealFile>(UniqueFd(fd), path);
    ASSIGN_OR_RETURN(const FileStat stat, file->Stat());
    if (!stat.is_regular_file) {
      return MakeError(
          Reason::kCheckpointUnreadable,
          absl::StrCat(path, ": is a ", stat.is_directory ? "folder" : "special file", ", not a regular file"),
          {{"file", path}});
    }
    return file;
  }

  absl::StatusOr<FileStat> Stat(const std::string& path) override {
    if (HasNul(path)) return Unreadable(path, EINVAL);
    struct stat raw = {};
    if (stat(path.c_str(), &raw) != 0) return NotFoundOrUnreadable(path, errno);
    return ToFileStat(raw);
  }

  absl::StatusOr<std::string> RealPath(const std::string& path) override {
    if (HasNul(path)) return Unreadable(path, EINVAL);
    const std::unique_ptr<char, Freer> resolved(realpath(path.c_str(), nullptr));
    if (resolved == nullptr) return NotFoundOrUnreadable(path, errno);
    return std::string(resolved.get());
  }

  absl::StatusOr<std::vector<std::string>> ListFolder(const std::string& path) override {
    if (HasNul(path)) return Unreadable(path, EINVAL);
    const std::unique_ptr<DIR, FolderCloser> folder(opendir(path.c_str()));
    if (folder == nullptr) return NotFoundOrUnreadable(path, errno);
    std::vector<std::string> names;
    while (true) {
      errno = 0;
      const dirent* entry = readdir(folder.get());
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    if (errno != 0) return Unreadable(path, errno);
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::StatusOr<std::unique_ptr<ReadQueue>> NewReadQueue(int depth) override { return NewUringReadQueue(depth); }
};

}  // namespace

absl::Status File::ReadExactly(int64_t offset_bytes, std::span<std::byte> buffer) {
  size_t done = 0;
  while (done < buffer.size()) {
    const int64_t position = offset_bytes + static_cast<int64_t>(done);
    ASSIGN_OR_RETURN(const int64_t count, ReadAt(position, buffer.subspan(done)));
    if (count == 0) {
      const int64_t end = offset_bytes + static_cast<int64_t>(buffer.size());
      return MakeError(
          Reason::kCheckpointTruncated,
          absl::StrCat(path(), ": bytes up to ", end, " are needed but the file ends at or before byte ", position,
                       ": it is truncated, or was cut while it was being read"),
          {{"file", path()}, {"expected_bytes", absl::StrCat(end)}, {"found_bytes", absl::StrCat(position)}});
    }
    done += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> FileSystem::ReadSmallFile(const std::string& path, int64_t limit_bytes) {
  ASSIGN_OR_RETURN(const auto file, Open(path, ReadMode::kBuffered));
  ASSIGN_OR_RETURN(const FileStat stat, file->Stat());
  const auto too_large = [&](int64_t size_bytes) {
    return MakeError(
        Reason::kCheckpointTooLarge,
        absl::StrCat(path, ": has ", size_bytes, " bytes; at most ", limit_bytes, " are allowed in such a file"),
        {{"file", path}, {"found_bytes", absl::StrCat(size_bytes)}, {"limit_bytes", absl::StrCat(limit_bytes)}});
  };
  if (stat.size_bytes > limit_bytes) return too_large(stat.size_bytes);
  // One byte more than stat says, so that the usual file is read whole, its end included, in two calls.
  std::string contents(static_cast<size_t>(std::max<int64_t>(stat.size_bytes, 0)) + 1, '\0');
  int64_t done = 0;
  while (true) {
    const auto room = std::as_writable_bytes(std::span(contents)).subspan(static_cast<size_t>(done));
    ASSIGN_OR_RETURN(const int64_t count, file->ReadAt(done, room));
    if (count == 0) break;
    done += count;
    if (done > limit_bytes) return too_large(done);
    if (done == static_cast<int64_t>(contents.size())) contents.resize(contents.size() * 2);
  }
  contents.resize(static_cast<size_t>(done));
  return contents;
}

absl::StatusOr<std::unique_ptr<ReadQueue>> FileSystem::NewReadQueue(int /*depth*/) {
  return SystemError("this file system has no queue of reads", ENOSYS);
}

FileSystem& RealFileSystem() {
  static auto* const file_system = new PosixFileSystem;
  return *file_system;
}

}  // namespace weightbroker
