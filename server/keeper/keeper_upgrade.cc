// How the keeper replaces its own program: by execve, which keeps its process id, its children and its descriptors.

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/read_fd.h"
#include "common/base/status_macros.h"
#include "common/process/spawn.h"
#include "server/keeper/keeper.h"

namespace weightbroker {
namespace {

constexpr std::chrono::milliseconds kCheckTimeout(2'000);

SavedSocket Describe(const Listener& listener) {
  return {.path = listener.path(),
          .device = static_cast<int64_t>(listener.device()),
          .inode = static_cast<int64_t>(listener.inode()),
          .lock_fd = listener.lock_fd(),
          .fd = listener.fd()};
}

Listener Adopt(const SavedSocket& socket) {
  return Listener::Adopt({.path = socket.path,
                          .device = static_cast<dev_t>(socket.device),
                          .inode = static_cast<ino_t>(socket.inode),
                          .lock = UniqueFd(socket.lock_fd),
                          .socket = UniqueFd(socket.fd)});
}

absl::StatusOr<UniqueFd> WriteToMemfd(const std::string& bytes) {
  UniqueFd memfd(memfd_create("weightbroker-keeper-state", MFD_CLOEXEC));
  if (!memfd.valid()) return SystemError("cannot make a memfd", errno);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written = pwrite(memfd.get(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (written < 0) return SystemError("cannot write a memfd", errno);
    done += static_cast<size_t>(written);
  }
  return memfd;
}

absl::StatusOr<std::string> ReadMemfd(int memfd) {
  constexpr char kWhat[] = "cannot read the state of the keeper before";
  struct stat file = {};
  if (fstat(memfd, &file) != 0) return SystemError(kWhat, errno);
  const auto size_bytes = static_cast<size_t>(file.st_size);
  ASSIGN_OR_RETURN(std::string bytes, ReadFd(memfd, size_bytes, kWhat));
  if (bytes.size() < size_bytes) return SystemError(kWhat, EIO);
  return bytes;
}

absl::Status SetCloseOnExec(const std::vector<int>& fds, bool close_on_exec) {
  for (const int fd : fds) {
    if (fcntl(fd, F_SETFD, close_on_exec ? FD_CLOEXEC : 0) != 0) {
      return SystemError(absl::StrCat("descriptor ", fd, " cannot be handed over"), errno);
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool Keeper::Quiescent() const {
  return visitors_.empty() && (!broker_.has_value() || broker_->session == nullptr || broker_->session->quiescent());
}

void Keeper::UpgradeIfQuiescent() {
  if (!upgrade_requested_ || stop_requests_ > 0 || !Quiescent()) return;
  upgrade_requested_ = false;
  absl::Status status = CheckSuccessor();
  if (status.ok()) status = Upgrade();
  Log(LogLevel::kError, "keeper.upgrade_failed",
      {{"path", command_line_.program}, {"cause", std::string(status.message())}});
}

// A program that cannot even start, does not know this state, or refuses these flags, must not get all that there is.
absl::Status Keeper::CheckSuccessor() const {
  std::vector<std::string> arguments = command_line_.arguments;
  arguments.push_back(absl::StrCat("--check_resume=", kKeeperStateVersion));
  ASSIGN_OR_RETURN(ChildProcess child, Spawn({.path = command_line_.program, .arguments = arguments, .fds = {}}));
  ASSIGN_OR_RETURN(const ExitStatus exit, child.Wait(kCheckTimeout));
  if (exit.success()) return absl::OkStatus();
  return MakeError(Reason::kConfigurationInvalid,
                   absl::StrCat("the program at ", command_line_.program, " cannot take over: ", exit.ToString()),
                   {{"path", command_line_.program}});
}

absl::Status Keeper::Upgrade() {
  const KeeperState state = WriteDownState();
  ASSIGN_OR_RETURN(const UniqueFd memfd, WriteToMemfd(SerializeKeeperState(state)));
  std::vector<int> fds = state.Fds();
  fds.push_back(memfd.get());
  Log(LogLevel::kInfo, "keeper.upgrading", {{"path", command_line_.program}, {"fds", absl::StrCat(fds.size())}});

  const std::string resume_flag = absl::StrCat("--resume_fd=", memfd.get());
  std::vector<char*> arguments = {const_cast<char*>(command_line_.program.c_str())};
  for (const std::string& argument : command_line_.arguments) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(const_cast<char*>(resume_flag.c_str()));
  arguments.push_back(nullptr);

  absl::Status status = SetCloseOnExec(fds, false);
  if (status.ok()) {
    execv(command_line_.program.c_str(), arguments.data());
    status = SystemError(absl::StrCat("cannot execute ", command_line_.program), errno);
  }
  SetCloseOnExec(fds, true).IgnoreError();  // one that could not be changed before cannot be now
  return status;
}

KeeperState Keeper::WriteDownState() const {
  KeeperState state;
  state.listener = Describe(*listener_);
  if (private_socket_.has_value()) state.private_socket = Describe(*private_socket_);
  for (const SharedEntry& entry : entries_.entries()) {
    SavedEntry& written = state.entries.emplace_back();
    written.key = entry->key;
    written.value = entry->value;
    for (const UniqueFd& fd : entry->fds) written.fds.push_back(fd.get());
  }
  state.attempts = entries_.attempts();
  if (broker_.has_value()) {
    SavedBroker& broker = state.broker.emplace();
    broker.number = last_broker_number_;
    broker.pid = broker_->pid;
    broker.pidfd = broker_->pidfd.get();
    broker.is_child = broker_->is_child;
    if (broker_->session != nullptr) {
      broker.control_fd = broker_->session->connection().fd();
      broker.welcomed = broker_->session->welcomed();
      broker.version = broker_->session->connection().version();
    }
  }
  state.last_broker_number = last_broker_number_;
  for (const auto& [pid, owner] : loaders_.owners()) state.loaders.push_back({.pid = pid, .owner = owner});
  state.supervisor = supervisor_.state();
  state.notify_socket = manager_.notify_socket();
  state.watchdog_interval = manager_.watchdog_interval();
  state.fd_store = fd_store_.Serialize();
  return state;
}

absl::StatusOr<std::unique_ptr<Keeper>> Keeper::Resume(BrokerConfig config, CommandLine command_line) {
  const UniqueFd memfd(config.resume_fd.value_or(-1));
  ASSIGN_OR_RETURN(const std::string bytes, ReadMemfd(memfd.get()));
  ASSIGN_OR_RETURN(KeeperState state, ParseKeeperState(bytes));
  RETURN_IF_ERROR(SetCloseOnExec(state.Fds(), true));

  ServiceManager manager(state.notify_socket, state.watchdog_interval);
  std::unique_ptr<Keeper> keeper(
      new Keeper(std::move(config), std::move(command_line), std::move(manager), state.supervisor));
  RETURN_IF_ERROR(keeper->PrepareSignals());
  keeper->listener_ = Adopt(state.listener);
  if (state.private_socket.has_value()) keeper->private_socket_ = Adopt(*state.private_socket);
  for (SavedEntry& written : state.entries) {
    StoredEntry entry = {.key = std::move(written.key), .value = std::move(written.value), .fds = {}};
    for (const int fd : written.fds) entry.fds.emplace_back(fd);
    keeper->entries_.Restore(std::move(entry));
  }
  keeper->entries_.Resume(std::move(state.attempts));
  keeper->fd_store_.Resume(state.fd_store, keeper->entries_.entries());
  for (const SavedLoader& loader : state.loaders) {
    keeper->loaders_.Resume(static_cast<pid_t>(loader.pid), loader.owner);
  }
  keeper->last_broker_number_ = state.last_broker_number;
  if (state.broker.has_value()) keeper->ResumeBroker(*state.broker);
  Log(LogLevel::kInfo, "keeper.resumed",
      {{"socket", keeper->listener_->path()},
       {"entries", absl::StrCat(keeper->entries_.size())},
       {"fds", absl::StrCat(keeper->entries_.fd_count())}});
  keeper->Reap(std::chrono::steady_clock::now());  // whoever ended meanwhile
  return keeper;
}

void Keeper::ResumeBroker(const SavedBroker& state) {
  BrokerInOffice& broker = broker_.emplace();
  broker.pid = static_cast<pid_t>(state.pid);
  broker.pidfd.reset(state.pidfd);
  broker.is_child = state.is_child;
  if (state.control_fd < 0) {
    broker.end_by = std::chrono::steady_clock::now();
    return;
  }
  broker.session = std::make_unique<BrokerSession>(state.number, Connection(UniqueFd(state.control_fd)), Context());
  if (state.welcomed) broker.session->ResumeWelcomed(static_cast<uint16_t>(state.version));
}

}  // namespace weightbroker
