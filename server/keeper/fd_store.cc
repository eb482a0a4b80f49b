#include "server/keeper/fd_store.h"

#include <fcntl.h>
#include <linux/kcmp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/read_fd.h"
#include "common/base/wire.h"

namespace weightbroker {
namespace {

constexpr char kFdPrefix[] = "wb-fd-";
constexpr char kIndexPrefix[] = "wb-index-";

// The index: {1: last number, 2: its own name, 3: entries {1: key, 2: value, 3: names of the descriptors, in order}}.
struct IndexEntry {
  std::string key;
  std::string value;
  std::vector<std::string> names;
};
struct Index {
  int64_t last_number = 0;
  std::string name;
  std::vector<IndexEntry> entries;
};

std::optional<IndexEntry> ParseIndexEntry(std::string_view bytes) {
  IndexEntry entry;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (reader.field() == 1) entry.key = reader.bytes();
    if (reader.field() == 2) entry.value = reader.bytes();
    if (reader.field() == 3) entry.names.emplace_back(reader.bytes());
  }
  return reader.ok() ? std::optional(std::move(entry)) : std::nullopt;
}

std::optional<Index> ParseIndex(std::string_view bytes) {
  Index index;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (reader.field() == 1) index.last_number = static_cast<int64_t>(reader.varint());
    if (reader.field() == 2) index.name = reader.bytes();
    if (reader.field() == 3) {
      std::optional<IndexEntry> entry = ParseIndexEntry(reader.bytes());
      if (!entry.has_value()) return std::nullopt;
      index.entries.push_back(*std::move(entry));
    }
  }
  return reader.ok() && !index.name.empty() ? std::optional(std::move(index)) : std::nullopt;
}

// All of a memfd from its beginning, wherever its offset is.
std::string ReadWhole(int fd) {
  struct stat file = {};
  if (fstat(fd, &file) != 0 || file.st_size <= 0) return "";
  const auto size_bytes = static_cast<size_t>(file.st_size);
  absl::StatusOr<std::string> bytes = ReadFd(fd, size_bytes, "reading an index");
  return bytes.ok() && bytes->size() == size_bytes ? *std::move(bytes) : "";
}

// Whether two descriptors of ours are one open file. The service manager judges likewise.
bool IsSameFile(int a, int b) {
  struct stat file_a = {};
  struct stat file_b = {};
  if (fstat(a, &file_a) != 0 || fstat(b, &file_b) != 0) return false;
  if (file_a.st_dev != file_b.st_dev || file_a.st_ino != file_b.st_ino) return false;
  const long order = syscall(SYS_kcmp, getpid(), getpid(), KCMP_FILE, a, b);
  if (order >= 0) return order == 0;
  // The kernel has no kcmp, and the same inode must do; but all memory of GPUs has the inode of the one device.
  return !S_ISCHR(file_a.st_mode);
}

int64_t NumberOfIndex(const std::string& name) {
  int64_t number = -1;
  const bool is_index =
      absl::StartsWith(name, kIndexPrefix) && absl::SimpleAtoi(name.substr(sizeof(kIndexPrefix) - 1), &number);
  return is_index ? number : -1;
}

const NamedFd* FindByName(const std::vector<NamedFd>& fds, const std::string& name) {
  const auto it = std::find_if(fds.begin(), fds.end(), [&](const NamedFd& fd) { return fd.name == name; });
  return it == fds.end() ? nullptr : &*it;
}

// The newest that can be read.
std::optional<Index> FindIndex(const std::vector<NamedFd>& fds) {
  std::map<int64_t, const NamedFd*> candidates;
  for (const NamedFd& fd : fds) {
    if (const int64_t number = NumberOfIndex(fd.name); number >= 0) candidates[number] = &fd;
  }
  for (auto it = candidates.rbegin(); it != candidates.rend(); ++it) {
    if (auto index = ParseIndex(ReadWhole(it->second->fd.get())); index.has_value()) return index;
    Log(LogLevel::kWarning, "fd_store.index_unreadable", {{"name", it->second->name}});
  }
  return std::nullopt;
}

// Duplicates of what the entry names; nothing if one is missing.
std::optional<StoredEntry> Gather(const IndexEntry& from_index, const std::vector<NamedFd>& fds) {
  StoredEntry entry = {.key = from_index.key, .value = from_index.value, .fds = {}};
  for (const std::string& name : from_index.names) {
    const NamedFd* named = FindByName(fds, name);
    if (named == nullptr) return std::nullopt;
    entry.fds.emplace_back(fcntl(named->fd.get(), F_DUPFD_CLOEXEC, 0));
    if (!entry.fds.back().valid()) return std::nullopt;
  }
  return entry;
}

}  // namespace

void FdStore::OnStored(const SharedEntry& entry, const SharedEntry& replaced) {
  if (!manager_->present()) return;
  entries_[entry->key] = entry;
  for (size_t i = 0; i < entry->fds.size(); ++i) StoreFile(*entry, i);
  WriteIndex();
  // Last, so that at every moment the index in force finds all that it names.
  if (replaced != nullptr) Forget(replaced);
}

void FdStore::OnDropped(const SharedEntry& dropped) {
  if (!manager_->present() || dropped == nullptr) return;
  entries_.erase(dropped->key);
  WriteIndex();
  Forget(dropped);
}

void FdStore::StoreFile(const StoredEntry& entry, size_t index) {
  const int fd = entry.fds[index].get();
  for (auto& [name, file] : files_) {
    const auto& [other, other_index] = file.users.front();
    if (IsSameFile(fd, other->fds[other_index].get())) {
      file.users.emplace_back(&entry, index);
      return;
    }
  }
  const std::string name = NewName(kFdPrefix);
  files_[name].users.emplace_back(&entry, index);
  manager_->StoreFd(name, fd);
}

void FdStore::Forget(const SharedEntry& entry) {
  for (auto& [name, file] : files_) {
    std::erase_if(file.users, [&](const auto& user) { return user.first == entry.get(); });
  }
  RemoveUnusedFiles();
}

void FdStore::RemoveUnusedFiles() {
  for (auto it = files_.begin(); it != files_.end();) {
    if (!it->second.users.empty()) {
      ++it;
      continue;
    }
    manager_->RemoveFd(it->first);
    it = files_.erase(it);
  }
}

std::string FdStore::NewName(std::string_view prefix) { return std::string(prefix) + absl::StrCat(++last_number_); }

void FdStore::WriteIndex() {
  const std::string old_name = std::exchange(index_name_, NewName(kIndexPrefix));
  const std::string bytes = Serialize();
  const UniqueFd memfd(memfd_create("weightbroker-index", MFD_CLOEXEC));
  if (!memfd.valid() || write(memfd.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    Log(LogLevel::kError, "fd_store.index_not_written", {{"errno", strerrorname_np(errno)}});
    index_name_ = old_name;
    return;
  }
  manager_->StoreFd(index_name_, memfd.get());
  if (!old_name.empty()) manager_->RemoveFd(old_name);
}

std::string FdStore::Serialize() const {
  std::map<std::pair<const StoredEntry*, size_t>, std::string> names;
  for (const auto& [name, file] : files_) {
    for (const auto& user : file.users) names[user] = name;
  }
  WireWriter index;
  index.AddVarint(1, static_cast<uint64_t>(last_number_));
  index.AddBytes(2, index_name_);
  for (const auto& [key, entry] : entries_) {
    WireWriter writer;
    writer.AddBytes(1, key);
    writer.AddBytes(2, entry->value);
    for (size_t i = 0; i < entry->fds.size(); ++i) writer.AddBytes(3, names[{entry.get(), i}]);
    index.AddBytes(3, writer.bytes());
  }
  return index.bytes();
}

std::vector<AdoptedEntry> FdStore::Adopt(std::vector<NamedFd>* inherited) {
  std::vector<AdoptedEntry> adopted;
  const std::optional<Index> index = FindIndex(*inherited);
  if (index.has_value()) {
    last_number_ = index->last_number;
    for (const IndexEntry& from_index : index->entries) {
      std::optional<StoredEntry> entry = Gather(from_index, *inherited);
      if (entry.has_value()) {
        adopted.push_back({*std::move(entry), from_index.names});
      } else {
        Log(LogLevel::kWarning, "fd_store.entry_incomplete", {{"key", from_index.key}});
      }
    }
  }
  std::erase_if(*inherited, [&](const NamedFd& fd) {
    if (!absl::StartsWith(fd.name, kFdPrefix) && !absl::StartsWith(fd.name, kIndexPrefix)) return false;
    found_names_.insert(fd.name);
    return true;
  });
  return adopted;
}

void FdStore::Register(const SharedEntry& entry, const std::vector<std::string>& names) {
  entries_[entry->key] = entry;
  for (size_t i = 0; i < names.size(); ++i) files_[names[i]].users.emplace_back(entry.get(), i);
}

void FdStore::RemoveStrangers() {
  if (!manager_->present()) return;
  WriteIndex();
  for (const std::string& name : std::exchange(found_names_, {})) {
    if (files_.count(name) == 0) manager_->RemoveFd(name);
  }
}

void FdStore::Resume(std::string_view serialized, const std::vector<SharedEntry>& entries) {
  const std::optional<Index> index = ParseIndex(serialized);
  if (!index.has_value()) return;  // there was no service manager
  last_number_ = index->last_number;
  index_name_ = index->name;
  std::map<std::string, SharedEntry> by_key;
  for (const SharedEntry& entry : entries) by_key[entry->key] = entry;
  for (const IndexEntry& from_index : index->entries) {
    const auto it = by_key.find(from_index.key);
    if (it != by_key.end()) Register(it->second, from_index.names);
  }
}

}  // namespace weightbroker
