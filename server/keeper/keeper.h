// The keeper: owns the service's socket and what brokers wrote down, runs a broker, and outlives it.
//
//   auto keeper = Keeper::Start(config, command_line);         // the socket's errors, one sentence each
//   if (!keeper.ok()) return keeper.status();
//   return (*keeper)->Run();                                    // until SIGTERM
//
// One thread, one poll loop, nothing in it blocks. Signals: SIGTERM, SIGINT and SIGQUIT end the broker, a second one
// kills it; SIGHUP has the broker read again what it is to hold; SIGUSR2 replaces this program by what lies at its path
// now, keeping everything (see keeper_state.h).
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "server/config/config.h"
#include "server/endpoint/listener.h"
#include "server/keeper/broker_session.h"
#include "server/keeper/entry_store.h"
#include "server/keeper/fd_store.h"
#include "server/keeper/keeper_state.h"
#include "server/keeper/loaders.h"
#include "server/keeper/service_manager.h"
#include "server/keeper/supervisor.h"

namespace weightbroker {

// How this program was started, so that it can be started again.
struct CommandLine {
  std::string program;  // absolute, its symlinks not resolved: an upgrade may have changed where they lead
  std::vector<std::string> arguments;  // without argv[0] and --resume_fd
};

// The broker in office: a child, or one that came over the private socket.
struct BrokerInOffice {
  pid_t pid = 0;   // 0 if it is in a namespace that is not ours
  UniqueFd pidfd;  // invalid likewise
  bool is_child = false;
  std::unique_ptr<BrokerSession> session;                       // gone once the broker has closed its end
  std::optional<std::chrono::steady_clock::time_point> end_by;  // when a child without a session is killed
};

class Keeper {
 public:
  static absl::StatusOr<std::unique_ptr<Keeper>> Start(BrokerConfig config, CommandLine command_line);
  ~Keeper();
  Keeper(const Keeper&) = delete;
  Keeper& operator=(const Keeper&) = delete;

  // Returns the exit code.
  int Run();

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  // One that has connected to the private socket and said nothing yet.
  struct Visitor {
    Connection connection;
    pid_t pid = 0;
    UniqueFd pidfd;
    TimePoint speak_by;
  };

  // keeper.cc: the start and the loop.
  Keeper(BrokerConfig config, CommandLine command_line, ServiceManager manager, Supervisor::State supervisor);
  absl::Status PrepareSignals();
  absl::Status OpenSockets(std::vector<NamedFd>* inherited);
  void AdoptEntries(std::vector<NamedFd>* inherited);
  std::vector<pollfd> WhatToPoll() const;
  int PollTimeout(TimePoint now) const;
  void HandleSignals(TimePoint now);
  void HandleTimers(TimePoint now);
  void Stop();
  bool Finished() const { return stop_requests_ > 0 && !broker_.has_value(); }
  void EndLoaders();

  // keeper_broker.cc: the broker's life.
  SessionContext Context();
  void StartBroker(TimePoint now);
  absl::Status TryStartBroker(TimePoint now);
  void HandleBroker(TimePoint now);
  void OnBrokerReady();
  void SignalBroker(int signal) const;
  void PassReloadOn();
  void KillBroker(const std::string& cause, TimePoint now);
  void EndSession(const absl::Status& why, TimePoint now);
  void ForgetSession();
  void OnBrokerEnded(const std::string& how, TimePoint now);
  void DropWhatBrokersDieOf();
  void Reap(TimePoint now);
  void EndWithIt(int wait_status);
  void OnChildEnded(pid_t pid, int wait_status, TimePoint now);

  // keeper_visitors.cc: the private socket.
  void AcceptVisitors(TimePoint now);
  void HandleVisitors(TimePoint now);
  // False once the visitor is done with: taken into office or sent away.
  bool HandleVisitor(Visitor* visitor, TimePoint now);
  void TakeIntoOffice(Visitor* visitor, ReceivedPacket hello, TimePoint now);

  // keeper_upgrade.cc: replacing this program.
  bool Quiescent() const;
  void UpgradeIfQuiescent();
  absl::Status CheckSuccessor() const;
  // Returns only if it fails; then nothing has changed.
  absl::Status Upgrade();
  KeeperState WriteDownState() const;
  static absl::StatusOr<std::unique_ptr<Keeper>> Resume(BrokerConfig config, CommandLine command_line);
  void ResumeBroker(const SavedBroker& state);

  const BrokerConfig config_;
  const CommandLine command_line_;
  ServiceManager manager_;
  EntryStore entries_;
  FdStore fd_store_;
  Loaders loaders_;
  Supervisor supervisor_;
  std::optional<Listener> listener_;        // always there once Start has returned
  std::optional<Listener> private_socket_;  // with --keeper_socket
  UniqueFd signals_;
  std::optional<BrokerInOffice> broker_;
  std::vector<Visitor> visitors_;
  int64_t last_broker_number_ = 0;
  std::optional<TimePoint> next_watchdog_;
  int stop_requests_ = 0;
  bool upgrade_requested_ = false;
  bool reload_requested_ = false;  // and not passed on yet
  int exit_code_ = 0;
};

}  // namespace weightbroker
