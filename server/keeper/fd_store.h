// Keeps a copy of every entry in the service manager's descriptor store, so that they outlive the keeper too.
//
//   FdStore fd_store(&manager);
//   fd_store.OnStored(entry, replaced);   // each descriptor as "wb-<number>", then a new index "wb-index-<number>"
//   ...                                   // the keeper dies, and is started anew with all of them:
//   for (AdoptedEntry& adopted : fd_store.Adopt(&inherited_fds)) fd_store.Register(entry, adopted.names);
//   fd_store.RemoveStrangers();
//
// The index is a memfd that says which names make up which entry. It is written whole before it is stored, and the one
// before is removed after, so that whenever the keeper dies the newest index that is there is right. The store refuses
// a second name for the same open file, so descriptors are recognized, and one that several entries share is stored
// once. Without a service manager nothing is done. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/keeper/entry_store.h"
#include "server/keeper/service_manager.h"

namespace weightbroker {

// An entry as it came out of the service manager's store.
struct AdoptedEntry {
  StoredEntry entry;
  std::vector<std::string> names;  // of its descriptors
};

class FdStore {
 public:
  explicit FdStore(const ServiceManager* manager) : manager_(manager) {}

  // Tells the store what has changed. `replaced` and `dropped` may be null.
  void OnStored(const SharedEntry& entry, const SharedEntry& replaced);
  void OnDropped(const SharedEntry& dropped);

  // Takes the newest index out of `inherited`, and all that it names. An entry of which a descriptor is missing is
  // dropped and logged. What stays in `inherited` was not in the index.
  std::vector<AdoptedEntry> Adopt(std::vector<NamedFd>* inherited);
  // An entry is in the service manager's store already, under these names.
  void Register(const SharedEntry& entry, const std::vector<std::string>& names);
  // To be called after Adopt: removes from the store what Adopt found and nobody registered.
  void RemoveStrangers();

  // What a keeper that replaces this one by execve needs, and how it goes on with it.
  std::string Serialize() const;
  void Resume(std::string_view serialized, const std::vector<SharedEntry>& entries);

 private:
  // An open file in the service manager's store, and which entries have it, as which of their descriptors.
  struct StoredFile {
    std::vector<std::pair<const StoredEntry*, size_t>> users;
  };

  std::string NewName(std::string_view prefix);
  void StoreFile(const StoredEntry& entry, size_t index);
  void Forget(const SharedEntry& entry);
  void RemoveUnusedFiles();
  void WriteIndex();

  const ServiceManager* manager_;
  int64_t last_number_ = 0;
  std::string index_name_;                      // of the index that is in the store; empty if none
  std::map<std::string, StoredFile> files_;     // by name
  std::map<std::string, SharedEntry> entries_;  // by key
  std::set<std::string> found_names_;           // by Adopt
};

}  // namespace weightbroker
