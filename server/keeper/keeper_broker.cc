// The broker's life: how it is started, heard, killed, and replaced.

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/process/spawn.h"
#include "server/keeper/keeper.h"

namespace weightbroker {
namespace {

constexpr int kKeeperFd = 3;  // in the broker
// Exit codes of a broker that says itself that it cannot serve: for want of something, or with these flags.
constexpr int kFailedExitCode = 1;
constexpr int kUsageExitCode = 2;
constexpr std::chrono::milliseconds kEndGrace(1'000);  // between closing its connection and its end

}  // namespace

SessionContext Keeper::Context() {
  return {.listening_fd = listener_->fd(),
          .entries = &entries_,
          .fd_store = &fd_store_,
          .loaders = &loaders_,
          .supervisor = &supervisor_};
}

void Keeper::StartBroker(TimePoint now) {
  const absl::Status started = TryStartBroker(now);
  if (started.ok()) return;
  supervisor_.OnEnded(now);
  Log(LogLevel::kError, "broker.not_started",
      {{"cause", std::string(started.message())}, {"retry_ms", absl::StrCat(supervisor_.UntilStart(now).count())}});
}

absl::Status Keeper::TryStartBroker(TimePoint now) {
  ASSIGN_OR_RETURN(SocketPair control, CreateSeqpacketPair());
  SpawnOptions options;
  options.path = config_.broker_path;
  options.arguments = command_line_.arguments;
  options.arguments.push_back(absl::StrCat("--keeper_fd=", kKeeperFd));
  options.fds = {{control.second.get(), kKeeperFd}};
  ASSIGN_OR_RETURN(ChildProcess child, Spawn(options));

  BrokerInOffice& broker = broker_.emplace();
  broker.pid = child.pid();
  broker.pidfd = std::move(child).Release();
  broker.is_child = true;
  broker.session =
      std::make_unique<BrokerSession>(++last_broker_number_, Connection(std::move(control.first)), Context());
  supervisor_.OnStarted(now);
  Log(LogLevel::kInfo, "broker.started",
      {{"broker", absl::StrCat(last_broker_number_)},
       {"broker_pid", absl::StrCat(broker.pid)},
       {"path", options.path}});
  return absl::OkStatus();
}

void Keeper::HandleBroker(TimePoint now) {
  if (!broker_.has_value() || broker_->session == nullptr) return;
  const bool was_ready = supervisor_.phase() == Supervisor::Phase::kReady;
  const absl::Status status = broker_->session->OnReadable(now);
  if (!was_ready && supervisor_.phase() == Supervisor::Phase::kReady) OnBrokerReady();
  if (!status.ok()) EndSession(status, now);
}

void Keeper::OnBrokerReady() {
  Log(LogLevel::kInfo, "broker.ready", {{"broker", absl::StrCat(broker_->session->number())}});
  manager_.Notify("READY=1");  // again for each broker, which changes nothing
  PassReloadOn();
}

// To a broker of ours that is ready: one that is not may have read the file already, and would die of the signal before
// it has blocked it. Somebody else's is theirs to tell.
void Keeper::PassReloadOn() {
  if (!reload_requested_ || !broker_.has_value() || supervisor_.phase() != Supervisor::Phase::kReady) return;
  reload_requested_ = false;
  if (!broker_->is_child) return;
  Log(LogLevel::kInfo, "keeper.reload_passed_on", {{"broker_pid", absl::StrCat(broker_->pid)}});
  SignalBroker(SIGHUP);
}

void Keeper::SignalBroker(int signal) const {
  if (broker_->pidfd.valid()) syscall(SYS_pidfd_send_signal, broker_->pidfd.get(), signal, nullptr, 0);
}

void Keeper::KillBroker(const std::string& cause, TimePoint now) {
  Log(LogLevel::kError, "broker.killed", {{"broker_pid", absl::StrCat(broker_->pid)}, {"cause", cause}});
  SignalBroker(SIGKILL);
  supervisor_.OnKilled(now);
  if (!broker_->is_child) OnBrokerEnded("killed", now);  // somebody else reaps it
}

void Keeper::EndSession(const absl::Status& why, TimePoint now) {
  ForgetSession();
  // One that was refused has been told, and may say so before it ends.
  const bool misbehaved = !HasReason(why, Reason::kServiceUnavailable) && !HasReason(why, Reason::kKeeperRefused);
  if (misbehaved) {
    KillBroker(std::string(why.message()), now);
  } else if (!broker_->is_child) {
    OnBrokerEnded("it has disconnected", now);
  } else if (stop_requests_ == 0) {
    broker_->end_by = now + kEndGrace;
  }
}

void Keeper::ForgetSession() {
  if (broker_->session == nullptr) return;
  if (const int killed = loaders_.KillAllOf(broker_->session->number()); killed > 0) {
    Log(LogLevel::kInfo, "loaders.killed",
        {{"count", absl::StrCat(killed)}, {"cause", "their broker has gone: nobody reads what they say"}});
  }
  entries_.DropPartial();
  broker_->session.reset();
}

void Keeper::OnBrokerEnded(const std::string& how, TimePoint now) {
  ForgetSession();
  const pid_t pid = broker_->pid;
  broker_.reset();
  supervisor_.OnEnded(now);
  Log(stop_requests_ > 0 ? LogLevel::kInfo : LogLevel::kWarning, "broker.ended",
      {{"broker_pid", absl::StrCat(pid)},
       {"how", how},
       {"restart_ms", absl::StrCat(supervisor_.UntilStart(now).count())}});
  if (stop_requests_ == 0) DropWhatBrokersDieOf();
}

void Keeper::DropWhatBrokersDieOf() {
  const SharedEntry dropped = entries_.OnBrokerEnded();
  if (dropped == nullptr) return;
  fd_store_.OnDropped(dropped);
  Log(LogLevel::kError, "entry.poisoned",
      {{"key", dropped->key}, {"cause", "broker after broker has ended while it took this entry up: it is dropped"}});
}

void Keeper::Reap(TimePoint now) {
  int wait_status = 0;
  while (const pid_t pid = waitpid(-1, &wait_status, WNOHANG)) {
    if (pid > 0) {
      OnChildEnded(pid, wait_status, now);
    } else if (errno != EINTR) {
      return;
    }
  }
}

// Before there was ever anything to keep, whoever started this service should see why it does not serve. Later the
// reason may pass, and what is kept is worth waiting for.
void Keeper::EndWithIt(int wait_status) {
  if (supervisor_.ever_ready() || entries_.size() > 0 || stop_requests_ > 0 || !WIFEXITED(wait_status)) return;
  const int code = WEXITSTATUS(wait_status);
  if (code != kFailedExitCode && code != kUsageExitCode) return;
  exit_code_ = code;
  Stop();
}

void Keeper::OnChildEnded(pid_t pid, int wait_status, TimePoint now) {
  const std::string how = ExitStatus::FromWaitStatus(wait_status).ToString();
  if (broker_.has_value() && broker_->is_child && broker_->pid == pid) {
    if (broker_->session != nullptr) broker_->session->HandleTheRest(now);
    OnBrokerEnded(how, now);
    EndWithIt(wait_status);
    return;
  }
  if (const std::optional<int64_t> owner = loaders_.OnExited(pid); owner.has_value()) {
    Log(LogLevel::kInfo, "loader.ended", {{"loader_pid", absl::StrCat(pid)}, {"how", how}});
    if (broker_.has_value() && broker_->session != nullptr && broker_->session->number() == *owner) {
      broker_->session->SendExited(pid, wait_status);
      HandleBroker(now);
    }
    return;
  }
  Log(LogLevel::kDebug, "keeper.orphan_reaped", {{"orphan_pid", absl::StrCat(pid)}, {"how", how}});
}

}  // namespace weightbroker
