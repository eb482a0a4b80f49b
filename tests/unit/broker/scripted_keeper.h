// A keeper in a thread of the test: it takes every entry, unless the test has it refuse, and starts no loader.
//
//   ScriptedKeeper keeper;
//   auto client = keeper.Connect();
//   ... client->Put("a", "value", {fd}) ...
//   EXPECT_EQ(keeper.Get("a").value, "value");
//
// Thread-safe.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/mutex.h"
#include "common/base/socket.h"
#include "common/base/unique_fd.h"
#include "common/keeper/client.h"
#include "common/keeper/protocol.h"

namespace weightbroker::testing {

class ScriptedKeeper {
 public:
  ScriptedKeeper() {
    SocketPair pair = CreateSeqpacketPair().value();
    socket_ = std::move(pair.first);
    client_socket_ = std::move(pair.second);
    thread_ = std::thread([this] { Run(); });
  }
  ~ScriptedKeeper() {
    Close();
    thread_.join();
  }

  std::unique_ptr<KeeperClient> Connect(KeeperClientOptions options = {}) {
    return KeeperClient::FromFd(std::move(client_socket_), std::move(options)).value();
  }
  // As if it had died.
  void Close() { shutdown(socket_.get(), SHUT_RDWR); }

  void Refuse(const std::string& key) {
    MutexLock lock(mutex_);
    refused_ = key;
  }
  bool Has(const std::string& key) {
    MutexLock lock(mutex_);
    return entries_.count(key) > 0;
  }
  // What is there of that key; taken out.
  KeeperEntry Take(const std::string& key) {
    MutexLock lock(mutex_);
    KeeperEntry entry = std::move(entries_[key]);
    entries_.erase(key);
    return entry;
  }
  std::vector<std::string> dropped() {
    MutexLock lock(mutex_);
    return dropped_;
  }
  // The keys that were being taken up, in their order.
  std::vector<std::string> taken_up() {
    MutexLock lock(mutex_);
    return taken_up_;
  }

 private:
  using Type = KeeperMessageType;

  void Run() {
    while (true) {
      auto received = ReceiveMessage(socket_.get());
      if (!received.ok() || received->closed) return;
      auto message = DecodeKeeperMessage(received->bytes);
      if (!message.ok()) return;
      Answer(*message, std::move(received->fds));
    }
  }

  void Answer(const KeeperMessage& message, std::vector<UniqueFd> fds) {
    if (message.type == Type::kHello) {
      const SocketPair any = CreateSeqpacketPair().value();
      Send({.type = Type::kWelcome, .number = 0}, {any.first.get()});
      Send({.type = Type::kEndOfEntries});
    } else if (message.type == Type::kPut) {
      const bool taken = Add(message, std::move(fds));
      if (message.part + 1 < message.parts) return;
      Send({.type = taken ? Type::kAck : Type::kNack, .request_id = message.request_id, .value = taken ? "" : "full"});
    } else if (message.type == Type::kTakingUp) {
      MutexLock lock(mutex_);
      taken_up_.push_back(message.key);
    } else if (message.type == Type::kDrop) {
      {
        MutexLock lock(mutex_);
        entries_.erase(message.key);
        dropped_.push_back(message.key);
      }
      Send({.type = Type::kAck, .request_id = message.request_id});
    }
  }

  bool Add(const KeeperMessage& message, std::vector<UniqueFd> fds) {
    MutexLock lock(mutex_);
    if (message.key == refused_) return false;
    KeeperEntry& entry = entries_[message.key];
    if (message.part == 0) entry = {};
    entry.key = message.key;
    entry.value += message.value;
    for (UniqueFd& fd : fds) entry.fds.push_back(std::move(fd));
    return true;
  }

  void Send(const KeeperMessage& message, const std::vector<int>& fds = {}) {
    EXPECT_TRUE(SendMessage(socket_.get(), EncodeKeeperMessage(message).value(), fds).ok());
  }

  UniqueFd socket_;
  UniqueFd client_socket_;
  Mutex mutex_;
  std::map<std::string, KeeperEntry> entries_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> dropped_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> taken_up_ ABSL_GUARDED_BY(mutex_);
  std::string refused_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace weightbroker::testing
