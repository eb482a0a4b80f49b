// Files in memory: no system call, and nothing but what was put there.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/error.h"
#include "common/base/file.h"

namespace weightbroker {

// `bytes` must outlive the file.
class MemoryFile : public File {
 public:
  MemoryFile(std::string path, std::string_view bytes) : path_(std::move(path)), bytes_(bytes) {}

  absl::StatusOr<int64_t> ReadAt(int64_t offset_bytes, std::span<std::byte> buffer) override {
    const auto offset = static_cast<size_t>(offset_bytes);
    if (offset >= bytes_.size()) return 0;
    const std::string_view part = bytes_.substr(offset, buffer.size());
    std::transform(part.begin(), part.end(), buffer.begin(), [](char c) { return static_cast<std::byte>(c); });
    return static_cast<int64_t>(part.size());
  }
  absl::StatusOr<FileStat> Stat() override {
    FileStat stat;
    stat.size_bytes = static_cast<int64_t>(bytes_.size());
    stat.is_regular_file = true;
    return stat;
  }
  const std::string& path() const override { return path_; }

 private:
  const std::string path_;
  const std::string_view bytes_;
};

// One folder, "/model". Every path that is asked for is kept.
class MemoryFileSystem : public FileSystem {
 public:
  static constexpr char kFolder[] = "/model";

  void Add(const std::string& name, std::string bytes) { files_[Path(name)] = std::move(bytes); }

  const std::vector<std::string>& asked_for() const { return asked_for_; }

  // -1 where there is no such file.
  int64_t SizeOf(const std::string& name) const {
    const auto file = files_.find(Path(name));
    return file == files_.end() ? -1 : static_cast<int64_t>(file->second.size());
  }

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, ReadMode) override {
    asked_for_.push_back(path);
    const auto file = files_.find(path);
    if (file == files_.end()) return NotFound(path);
    return std::make_unique<MemoryFile>(path, file->second);
  }
  absl::StatusOr<FileStat> Stat(const std::string& path) override {
    asked_for_.push_back(path);
    const auto file = files_.find(path);
    if (file != files_.end()) return MemoryFile(path, file->second).Stat();
    if (path != kFolder) return NotFound(path);
    FileStat stat;
    stat.is_directory = true;
    return stat;
  }
  absl::StatusOr<std::string> RealPath(const std::string& path) override { return path; }
  absl::StatusOr<std::vector<std::string>> ListFolder(const std::string&) override {
    std::vector<std::string> names;
    for (const auto& [path, bytes] : files_) names.push_back(path.substr(sizeof(kFolder)));
    return names;
  }

 private:
  static std::string Path(const std::string& name) { return std::string(kFolder) + "/" + name; }
  static absl::Status NotFound(const std::string& path) { return MakeError(Reason::kModelNotFound, path, {}); }

  std::map<std::string, std::string> files_;
  std::vector<std::string> asked_for_;
};

}  // namespace weightbroker
