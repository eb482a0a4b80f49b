// The broker's side of the keeper's protocol (protocol.h): what it wrote down before, and the calls to write down more.
//
//   KeeperClientOptions options;
//   options.alive = [&] { return watchdog.HeartbeatIsFresh(); };
//   options.on_disconnected = [&] { shutdown.Request(); };
//   auto keeper = KeeperClient::FromFd(flags.keeper_fd, options);       // or FromPath(flags.keeper_socket, options)
//   if (!keeper.ok()) return keeper.status();
//   KeeperInheritance inheritance = (*keeper)->TakeInheritance();       // the listening socket, what was kept
//   for each entry { (*keeper)->TakingUp(entry.key); ... adopt it, or Drop it ... }
//   (*keeper)->TakingUp("");
//   RETURN_IF_ERROR((*keeper)->Ready());                                // once calls are answered
//   RETURN_IF_ERROR((*keeper)->Put("shard/0a1b/0", record, slab_fds));  // returns when the keeper has it: now RESIDENT
//
// The keeper is the only one that a broker needs: a broker that has lost it (on_disconnected) must end, because what it
// makes resident from then on nobody would keep. It does not notice when the keeper upgrades itself.
//
// Thread-safe. Runs two threads: one reads, and calls on_disconnected; the other asks `alive` and answers pings, so
// that an `alive` that blocks (on a lock that a hung thread holds) makes the broker late without making this client
// deaf. Neither thread may destroy the client. Links neither gRPC nor protobuf.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/keeper/loader_end.h"

namespace weightbroker {

// One thing that a broker wrote down: see Put.
struct KeeperEntry {
  std::string key;
  std::string value;
  std::vector<UniqueFd> fds;
};

// What the keeper gives to a new broker.
struct KeeperInheritance {
  UniqueFd listening_socket;         // of the service; shared with the keeper: do not shut it down
  std::vector<KeeperEntry> entries;  // sorted by key
  int dropped_entries = 0;           // that broker after broker had died of, since one was last ready
};

// A loader that the keeper has started and will reap.
struct KeeperLoader {
  pid_t pid = -1;
  UniqueFd control_socket;  // our end; the loader has the other
  UniqueFd pidfd;           // readable when it has ended; may be used to signal it
  std::shared_ptr<LoaderEnd> end = std::make_shared<LoaderEnd>();
};

struct KeeperClientOptions {
  // Whether this broker still does its work; asked at each ping, and again until it does: the ping is answered then. No
  // answer within the keeper's --broker_ping_timeout gets the broker killed and replaced. Unset: always true.
  std::function<bool()> alive;
  // The keeper has gone, or what it sent was malformed (then logged). Called once, never after the destructor began.
  std::function<void()> on_disconnected;
  // How long a call, and the whole of the handshake, may take. FromPath also waits that long for a keeper to listen.
  std::chrono::milliseconds timeout{10'000};
};

class KeeperClient {
 public:
  // Says hello over a socket inherited from the keeper, which is owned from here on, or over a new connection to the
  // keeper's private socket. SERVICE_UNAVAILABLE if there is no keeper or it goes; KEEPER_REFUSED with its message if
  // it has another broker or does not speak our version; DEADLINE_EXCEEDED; PROTOCOL_ERROR; SYSTEM_ERROR.
  static absl::StatusOr<std::unique_ptr<KeeperClient>> FromFd(UniqueFd socket, KeeperClientOptions options);
  static absl::StatusOr<std::unique_ptr<KeeperClient>> FromPath(const std::string& path, KeeperClientOptions options);
  ~KeeperClient();  // closes the connection
  KeeperClient(const KeeperClient&) = delete;
  KeeperClient& operator=(const KeeperClient&) = delete;

  // What the keeper had when this broker said hello. The first call gets it, later ones nothing.
  KeeperInheritance TakeInheritance();

  // Every call below fails with SERVICE_UNAVAILABLE if the keeper has gone, and DEADLINE_EXCEEDED after
  // options.timeout: then it is not known whether the keeper has done it.

  // Tells the keeper that this broker serves. A broker that dies after this is replaced at once.
  absl::Status Ready();

  // Tells the keeper which entry this broker is about to make sense of; empty for none. If broker after broker ends
  // over the same one, the keeper drops it. Not acknowledged: the keeper has it whatever becomes of this broker.
  absl::Status TakingUp(const std::string& key);

  // Writes down an entry, in place of one of the same key, and returns when the keeper has all of it. `fds` stay the
  // caller's; the keeper has duplicates. An entry is replaced whole or not at all, whenever the broker dies.
  // INVALID_ARGUMENT for an empty, over-long or unprintable key; KEEPER_REFUSED if the keeper is at one of its limits.
  absl::Status Put(const std::string& key, std::string_view value, std::span<const int> fds);

  // Forgets an entry; ok if there is none. Drop before you close your own descriptors of it: whoever closes the last
  // one spends the time that the kernel takes to free the memory, and the keeper has better things to do.
  absl::Status Drop(const std::string& key);

  // Starts a loader with --request_fd and --control_fd and then `arguments`. `request_fd` stays the caller's. The
  // keeper reaps it, and kills it if this broker ends. KEEPER_REFUSED if it cannot be started; INVALID_ARGUMENT for an
  // argument with a NUL in it.
  absl::StatusOr<KeeperLoader> SpawnLoader(const std::vector<std::string>& arguments, int request_fd);

  // Has the keeper not kill that loader when this broker ends: it goes on until it ends by itself, which it does once
  // its control socket is closed everywhere. Put the socket into an entry first to keep it over this broker's end.
  // KEEPER_REFUSED if it is no loader of this broker, or the keeper is too old to know how.
  absl::Status DetachLoader(pid_t pid);

 private:
  class Impl;
  explicit KeeperClient(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace weightbroker
