#include "server/keeper/keeper.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr char kListenName[] = "wb-listen";
constexpr char kLockName[] = "wb-lock";
constexpr mode_t kPrivateMode = 0600;
constexpr milliseconds kLoaderEndTimeout(5'000);
// A broker ends when it loses its keeper, and has the listening socket until then.
constexpr milliseconds kRemainsPatience(10'000);

// What the keeper needs beside the entries' descriptors: a packet's worth on its way in, a loader or visitor each, and
// its own few. Where there are few at all, half of them must do.
constexpr int64_t kReservedFds = 400;
constexpr int64_t kLeastOpenFiles = 128;

EntryLimits LimitsFor(int64_t fd_limit) {
  EntryLimits limits;
  limits.max_fds = static_cast<size_t>(fd_limit - std::min(kReservedFds, fd_limit / 2));
  return limits;
}

SupervisorTiming TimingOf(const BrokerConfig& config) {
  SupervisorTiming timing;
  timing.ping_interval = config.broker_ping_interval;
  timing.ping_timeout = config.broker_ping_timeout;
  timing.start_timeout = config.broker_start_timeout;
  return timing;
}

UniqueFd TakeByName(std::vector<NamedFd>* fds, const std::string& name) {
  const auto it = std::find_if(fds->begin(), fds->end(), [&](const NamedFd& fd) { return fd.name == name; });
  if (it == fds->end()) return UniqueFd();
  UniqueFd taken = std::move(it->fd);
  fds->erase(it);
  return taken;
}

// The listener that the keeper before this one left with the service manager, if it is the one for `path` and its file
// is still there.
std::optional<Listener> AdoptListener(std::vector<NamedFd>* inherited, const std::string& path) {
  UniqueFd socket = TakeByName(inherited, kListenName);
  UniqueFd lock = TakeByName(inherited, kLockName);
  if (!socket.valid() || !lock.valid()) return std::nullopt;
  sockaddr_un address = {};
  socklen_t length = sizeof(address) - 1;  // so that the path ends with a NUL
  struct stat file = {};
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0 || address.sun_path != path ||
      lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode)) {
    Log(LogLevel::kWarning, "keeper.socket_not_adopted", {{"socket", path}});
    // The service manager has a duplicate, so that closing ours would not free the path for the new listener.
    flock(lock.get(), LOCK_UN);
    return std::nullopt;
  }
  return Listener::Adopt({.path = path,
                          .device = file.st_dev,
                          .inode = file.st_ino,
                          .lock = std::move(lock),
                          .socket = std::move(socket)});
}

}  // namespace

Keeper::Keeper(BrokerConfig config, CommandLine command_line, ServiceManager manager, Supervisor::State supervisor)
    : config_(std::move(config)),
      command_line_(std::move(command_line)),
      manager_(std::move(manager)),
      entries_(LimitsFor(RaiseFdLimit())),
      fd_store_(&manager_),
      loaders_(config_.loader_path, static_cast<size_t>(config_.max_loaders)),
      supervisor_(TimingOf(config_), supervisor) {
  supervisor_.set_may_start(!config_.no_broker);
  if (manager_.watchdog_interval().count() > 0) next_watchdog_ = Clock::now();
}

Keeper::~Keeper() = default;

absl::StatusOr<std::unique_ptr<Keeper>> Keeper::Start(BrokerConfig config, CommandLine command_line) {
  RETURN_IF_ERROR(RaiseFdLimitTo(kLeastOpenFiles).status());
  if (config.resume_fd.has_value()) return Resume(std::move(config), std::move(command_line));
  ServiceManager manager = ServiceManager::FromEnvironment();
  std::vector<NamedFd> inherited = ServiceManager::TakeInheritedFds();
  std::unique_ptr<Keeper> keeper(new Keeper(std::move(config), std::move(command_line), std::move(manager), {}));
  RETURN_IF_ERROR(keeper->PrepareSignals());
  RETURN_IF_ERROR(keeper->OpenSockets(&inherited));
  keeper->AdoptEntries(&inherited);
  // Otherwise when the first broker is.
  if (keeper->config_.no_broker) keeper->manager_.Notify("READY=1");
  Log(LogLevel::kInfo, "keeper.started",
      {{"socket", keeper->listener_->path()}, {"entries", absl::StrCat(keeper->entries_.size())}});
  return keeper;
}

absl::Status Keeper::PrepareSignals() {
  // Orphans of loaders come here, so that nobody else's process is left with them.
  if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return SystemError("cannot become a subreaper", errno);
  sigset_t handled;
  sigemptyset(&handled);
  for (const int signal : {SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGCHLD, SIGUSR2}) sigaddset(&handled, signal);
  sigset_t blocked = handled;
  sigaddset(&blocked, SIGPIPE);  // a log reader that has gone
  if (sigprocmask(SIG_BLOCK, &blocked, nullptr) != 0) return SystemError("cannot block signals", errno);
  signals_.reset(signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  return signals_.valid() ? absl::OkStatus() : SystemError("cannot make a signalfd", errno);
}

absl::Status Keeper::OpenSockets(std::vector<NamedFd>* inherited) {
  listener_ = AdoptListener(inherited, config_.socket);
  if (!listener_.has_value()) {
    ASSIGN_OR_RETURN(listener_, Listener::Create({.path = config_.socket,
                                                  .mode = config_.socket_mode,
                                                  .group = config_.socket_group,
                                                  .create_folder = config_.create_socket_folder,
                                                  .patience = kRemainsPatience}));
    manager_.RemoveFd(kListenName);
    manager_.RemoveFd(kLockName);
    manager_.StoreFd(kListenName, listener_->fd());
    manager_.StoreFd(kLockName, listener_->lock_fd());
  }
  if (config_.keeper_socket.empty()) return absl::OkStatus();
  ListenerOptions private_socket;
  private_socket.path = config_.keeper_socket;
  private_socket.mode = kPrivateMode;
  private_socket.type = SOCK_SEQPACKET;
  ASSIGN_OR_RETURN(private_socket_, Listener::Create(private_socket));
  return absl::OkStatus();
}

void Keeper::AdoptEntries(std::vector<NamedFd>* inherited) {
  if (!manager_.present()) return;
  for (AdoptedEntry& adopted : fd_store_.Adopt(inherited)) {
    Log(LogLevel::kInfo, "entry.adopted",
        {{"key", adopted.entry.key}, {"fds", absl::StrCat(adopted.entry.fds.size())}});
    fd_store_.Register(entries_.Restore(std::move(adopted.entry)), adopted.names);
  }
  fd_store_.RemoveStrangers();
}

int Keeper::Run() {
  while (!Finished()) {
    std::vector<pollfd> polled = WhatToPoll();
    if (poll(polled.data(), polled.size(), PollTimeout(Clock::now())) < 0 && errno != EINTR) {
      Log(LogLevel::kError, "keeper.poll_failed", {{"errno", strerrorname_np(errno)}});
      return 1;
    }
    const TimePoint now = Clock::now();
    // Packets before timers: an answer that came while this process itself was stopped is not late. Nothing here
    // blocks, so it does not matter which of the descriptors was ready.
    HandleBroker(now);
    AcceptVisitors(now);
    HandleVisitors(now);
    HandleSignals(now);
    HandleTimers(now);
    UpgradeIfQuiescent();
  }
  EndLoaders();
  // The service manager keeps the socket over a restart, and connects queue in it: its file must stay.
  if (manager_.present()) std::move(*listener_).Release();
  Log(LogLevel::kInfo, "keeper.ended", {{"exit_code", absl::StrCat(exit_code_)}});
  return exit_code_;
}

std::vector<pollfd> Keeper::WhatToPoll() const {
  std::vector<pollfd> polled = {{.fd = signals_.get(), .events = POLLIN, .revents = 0}};
  if (broker_.has_value() && broker_->session != nullptr) {
    const Connection& connection = broker_->session->connection();
    polled.push_back({.fd = connection.fd(), .events = connection.events(), .revents = 0});
  }
  if (private_socket_.has_value()) polled.push_back({.fd = private_socket_->fd(), .events = POLLIN, .revents = 0});
  for (const Visitor& visitor : visitors_) {
    polled.push_back({.fd = visitor.connection.fd(), .events = POLLIN, .revents = 0});
  }
  return polled;
}

int Keeper::PollTimeout(TimePoint now) const {
  TimePoint next = TimePoint::max();
  const auto consider = [&](const std::optional<TimePoint>& time) { next = std::min(next, time.value_or(next)); };
  consider(supervisor_.deadline());
  consider(next_watchdog_);
  if (broker_.has_value()) consider(broker_->end_by);
  if (broker_.has_value() && broker_->session != nullptr) consider(broker_->session->connection().retry_at());
  for (const Visitor& visitor : visitors_) consider(visitor.speak_by);
  if (next == TimePoint::max()) return -1;
  return static_cast<int>(std::clamp<int64_t>(std::chrono::ceil<milliseconds>(next - now).count(), 0, INT_MAX));
}

void Keeper::HandleSignals(TimePoint now) {
  signalfd_siginfo info = {};
  while (read(signals_.get(), &info, sizeof(info)) == sizeof(info)) {
    switch (info.ssi_signo) {
      case SIGTERM:
      case SIGINT:
      case SIGQUIT:
        Stop();
        break;
      case SIGHUP:
        reload_requested_ = true;
        PassReloadOn();
        break;
      case SIGUSR2:
        upgrade_requested_ = true;
        break;
      case SIGCHLD:
        Reap(now);
        break;
    }
  }
}

void Keeper::HandleTimers(TimePoint now) {
  switch (supervisor_.Next(now)) {
    case SupervisorAction::kNothing:
      break;
    case SupervisorAction::kStart:
      StartBroker(now);
      break;
    case SupervisorAction::kPing: {
      // A broker that has closed its end does not answer, and is killed for it if it does not end by itself.
      const int64_t number = supervisor_.OnPing(now);
      if (broker_.has_value() && broker_->session != nullptr) {
        broker_->session->SendPing(number);
        HandleBroker(now);
      }
      break;
    }
    case SupervisorAction::kKill:
      KillBroker(supervisor_.KillCause(now), now);
      break;
  }
  if (broker_.has_value() && broker_->end_by.has_value() && now >= *broker_->end_by) {
    broker_->end_by.reset();
    KillBroker("it has closed its connection to the keeper and did not end", now);
  }
  if (next_watchdog_.has_value() && now >= *next_watchdog_) {
    manager_.Notify("WATCHDOG=1");
    next_watchdog_ = now + manager_.watchdog_interval();
  }
}

void Keeper::Stop() {
  ++stop_requests_;
  supervisor_.set_may_start(false);
  Log(LogLevel::kInfo, "keeper.stopping", {{"request", absl::StrCat(stop_requests_)}});
  if (stop_requests_ == 1) manager_.Notify("STOPPING=1");
  if (!broker_.has_value()) return;
  if (broker_->is_child) {
    SignalBroker(stop_requests_ == 1 ? SIGTERM : SIGKILL);
  } else {
    // It is somebody else's to end; it sees that its keeper has gone.
    ForgetSession();
    broker_.reset();
  }
}

void Keeper::EndLoaders() {
  loaders_.KillAll();
  const TimePoint deadline = Clock::now() + kLoaderEndTimeout;
  while (!loaders_.empty() && Clock::now() < deadline) {
    pollfd signals = {.fd = signals_.get(), .events = POLLIN, .revents = 0};
    poll(&signals, 1, static_cast<int>(kLoaderEndTimeout.count()));
    HandleSignals(Clock::now());
  }
}

}  // namespace weightbroker
