// All that a keeper must know to go on where the one before it stopped, when it replaces itself by execve: written into
// a memfd, with every descriptor by its number, because execve keeps them open.
//
// Versioned: fields are only ever added, and a keeper whose kKeeperStateVersion is lower refuses (it is asked before).
// Pure functions, thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/keeper/entry_store.h"
#include "server/keeper/supervisor.h"

namespace weightbroker {

inline constexpr int kKeeperStateVersion = 1;

// Descriptors are numbers here: who owns them is the reader's to decide.
struct SavedSocket {
  std::string path;
  int64_t device = 0;
  int64_t inode = 0;
  int lock_fd = -1;
  int fd = -1;
};

struct SavedEntry {
  std::string key;
  std::string value;
  std::vector<int> fds;
};

struct SavedBroker {
  int64_t number = 0;
  int64_t pid = 0;      // 0 if it is not to be seen from here
  int pidfd = -1;       // -1 likewise
  int control_fd = -1;  // -1 if it has closed its end and is about to end
  bool is_child = false;
  bool welcomed = false;
  int version = 0;
};

struct SavedLoader {
  int64_t pid = 0;
  int64_t owner = 0;
};

struct KeeperState {
  SavedSocket listener;
  std::optional<SavedSocket> private_socket;
  std::vector<SavedEntry> entries;
  EntryStore::Attempts attempts;
  std::optional<SavedBroker> broker;
  int64_t last_broker_number = 0;
  std::vector<SavedLoader> loaders;
  Supervisor::State supervisor;
  std::string notify_socket;
  std::chrono::microseconds watchdog_interval{0};
  std::string fd_store;

  // Every descriptor that is named.
  std::vector<int> Fds() const;
};

std::string SerializeKeeperState(const KeeperState& state);
// PROTOCOL_ERROR if it is malformed or of a higher version.
absl::StatusOr<KeeperState> ParseKeeperState(std::string_view bytes);

}  // namespace weightbroker
