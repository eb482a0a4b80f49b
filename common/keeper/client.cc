#include "common/keeper/client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "common/keeper/crash_point.h"
#include "common/keeper/parts.h"
#include "common/keeper/protocol.h"

namespace weightbroker {
namespace {

using Clock = std::chrono::steady_clock;
using Moment = CrashPoint::Moment;
using Type = KeeperMessageType;

constexpr std::chrono::milliseconds kRetryInterval(5);
// Between two questions whether the broker is well again.
constexpr std::chrono::milliseconds kAskAgainInterval(20);

struct Packet {
  KeeperMessage message;
  std::vector<UniqueFd> fds;
  std::shared_ptr<LoaderEnd> loader_end = nullptr;  // kSpawned
};

absl::Status KeeperGone() {
  return MakeError(Reason::kServiceUnavailable, "the keeper has gone: this broker must end, its service starts anew");
}

absl::Status TooLate(const std::string& what) {
  return MakeError(Reason::kDeadlineExceeded, absl::StrCat("the keeper did not answer in time: ", what),
                   {{"what", what}});
}

absl::Status Unexpected(const KeeperMessage& message) {
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("the keeper sent a message of type ", static_cast<int>(message.type), " out of turn"));
}

absl::Status Refused(const KeeperMessage& nack) {
  return MakeError(Reason::kKeeperRefused, absl::StrCat("the keeper refused: ", nack.value), {{"answer", nack.value}});
}

// Until the kernel has room for a packet of any size that the protocol allows.
absl::Status WaitForRoom(int socket, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() < 0) return TooLate("sending");
    pollfd room = {.fd = socket, .events = POLLOUT, .revents = 0};
    const int ready = poll(&room, 1, static_cast<int>(left.count()));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return SystemError("cannot wait for the keeper's socket", errno);
  }
}

// Whether the kernel refused a packet because too many descriptors are in flight, which passes.
bool TooManyFdsInFlight(const absl::Status& status) {
  const auto details = GetErrorDetails(status);
  const auto it = details.metadata.find("errno");
  return it != details.metadata.end() && it->second == "ETOOMANYREFS";
}

absl::Status SendPacket(int socket, const KeeperMessage& message, std::span<const int> fds,
                        Clock::time_point deadline) {
  ASSIGN_OR_RETURN(const std::string bytes, EncodeKeeperMessage(message));
  CrashPoint::FromEnvironment().Reached(message.type, Moment::kBefore);
  RETURN_IF_ERROR(WaitForRoom(socket, deadline));
  absl::Status sent = SendMessage(socket, bytes, fds);
  while (TooManyFdsInFlight(sent) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kRetryInterval);
    sent = SendMessage(socket, bytes, fds);
  }
  if (HasReason(sent, Reason::kServiceUnavailable)) return KeeperGone();
  RETURN_IF_ERROR(sent);
  CrashPoint::FromEnvironment().Reached(message.type, Moment::kAfter);
  return absl::OkStatus();
}

// Waits without a limit if there is no deadline. SERVICE_UNAVAILABLE at the end of the connection.
absl::StatusOr<Packet> ReceivePacket(int socket, std::optional<Clock::time_point> deadline) {
  std::optional<std::chrono::milliseconds> timeout;
  if (deadline.has_value()) {
    timeout =
        std::max(std::chrono::ceil<std::chrono::milliseconds>(*deadline - Clock::now()), std::chrono::milliseconds(0));
  }
  absl::StatusOr<SocketMessage> received = ReceiveMessage(socket, timeout);
  if (HasReason(received.status(), Reason::kDeadlineExceeded)) return TooLate("receiving");
  if (!received.ok()) return received.status();
  if (received->closed) return KeeperGone();
  ASSIGN_OR_RETURN(KeeperMessage message, DecodeKeeperMessage(received->bytes));
  CrashPoint::FromEnvironment().Reached(message.type, Moment::kBefore);
  return Packet{std::move(message), std::move(received->fds)};
}

// Puts the parts of entries together.
absl::Status AddPart(Packet packet, std::vector<KeeperEntry>* entries) {
  if (packet.message.part == 0) {
    entries->push_back({packet.message.key, "", {}});
  } else if (entries->empty() || entries->back().key != packet.message.key) {
    return Unexpected(packet.message);
  }
  KeeperEntry& entry = entries->back();
  entry.value += packet.message.value;
  for (UniqueFd& fd : packet.fds) entry.fds.push_back(std::move(fd));
  return absl::OkStatus();
}

struct Session {
  uint16_t version = 0;
  KeeperInheritance inheritance;
};

absl::StatusOr<Session> SayHello(int socket, Clock::time_point deadline) {
  RETURN_IF_ERROR(SendPacket(socket, {.type = Type::kHello}, {}, deadline));
  ASSIGN_OR_RETURN(Packet welcome, ReceivePacket(socket, deadline));
  if (welcome.message.type == Type::kNack) return Refused(welcome.message);
  if (welcome.message.type != Type::kWelcome || welcome.fds.size() != 1) return Unexpected(welcome.message);
  if (welcome.message.version < 1 || welcome.message.version > kKeeperProtocolVersion) {
    return MakeError(Reason::kProtocolError,
                     absl::StrCat("the keeper wants to speak version ", welcome.message.version,
                                  " of its protocol; this broker speaks 1 to ", kKeeperProtocolVersion));
  }
  CrashPoint::FromEnvironment().Reached(Type::kWelcome, Moment::kAfter);

  Session session;
  session.version = welcome.message.version;
  session.inheritance.listening_socket = std::move(welcome.fds[0]);
  session.inheritance.dropped_entries = welcome.message.status;
  while (true) {
    ASSIGN_OR_RETURN(Packet packet, ReceivePacket(socket, deadline));
    const Type type = packet.message.type;
    if (type == Type::kEndOfEntries) break;
    if (type != Type::kEntry) return Unexpected(packet.message);
    RETURN_IF_ERROR(AddPart(std::move(packet), &session.inheritance.entries));
    CrashPoint::FromEnvironment().Reached(type, Moment::kAfter);
  }
  if (static_cast<int64_t>(session.inheritance.entries.size()) != welcome.message.number) {
    return MakeError(Reason::kProtocolError, absl::StrCat("the keeper announced ", welcome.message.number,
                                                          " entries and sent ", session.inheritance.entries.size()));
  }
  CrashPoint::FromEnvironment().Reached(Type::kEndOfEntries, Moment::kAfter);
  return session;
}

absl::StatusOr<UniqueFd> ConnectOnce(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return MakeError(Reason::kSocketPathInvalid,
                     absl::StrCat("the keeper's socket path has ", path.size(), " bytes; 1 to ",
                                  sizeof(address.sun_path) - 1, " are allowed"),
                     {{"path", path}});
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return SystemError("cannot make a socket", errno);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return socket;
  if (errno == ENOENT || errno == ECONNREFUSED) {
    return MakeError(Reason::kServiceUnavailable, absl::StrCat(path, ": no keeper listens there"), {{"path", path}});
  }
  return SystemError(absl::StrCat("cannot connect to the keeper at ", path), errno);
}

}  // namespace

class KeeperClient::Impl {
 public:
  Impl(UniqueFd socket, KeeperClientOptions options, Session session)
      : socket_(std::move(socket)),
        options_(std::move(options)),
        version_(session.version),
        inheritance_(std::move(session.inheritance)) {}

  ~Impl() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    shutdown(socket_.get(), SHUT_RDWR);  // wakes the reader
    for (std::thread* thread : {&reader_, &responder_}) {
      if (thread->joinable()) thread->join();
    }
  }

  absl::Status Start() {
    ASSIGN_OR_RETURN(reader_, StartThread("the keeper's messages", [this] { ReadUntilTheEnd(); }));
    ASSIGN_OR_RETURN(responder_, StartThread("the keeper's pings", [this] { AnswerPings(); }));
    return absl::OkStatus();
  }

  KeeperInheritance TakeInheritance() {
    MutexLock lock(mutex_);
    return std::exchange(inheritance_, KeeperInheritance{});
  }

  absl::Status Ready() {
    MutexLock lock(send_mutex_);
    return Send({.type = Type::kReady}, {}, Clock::now() + options_.timeout);
  }

  absl::Status TakingUp(const std::string& key) {
    {
      MutexLock lock(send_mutex_);
      RETURN_IF_ERROR(Send({.type = Type::kTakingUp, .key = key}, {}, Clock::now() + options_.timeout));
    }
    CrashPoint::FromEnvironment().ReachedEntry(key);
    return absl::OkStatus();
  }

  absl::Status Put(const std::string& key, std::string_view value, std::span<const int> fds) {
    if (key.empty()) return MakeError(Reason::kInvalidArgument, "an entry of the keeper needs a key");
    Call call(this, Type::kPut);
    RETURN_IF_ERROR(SendParts(call, key, value, fds));
    return call.Wait().status();
  }

  absl::Status Drop(const std::string& key) { return Ask({.type = Type::kDrop, .key = key}, {}).status(); }

  absl::StatusOr<KeeperLoader> SpawnLoader(const std::vector<std::string>& arguments, int request_fd) {
    KeeperMessage message = {.type = Type::kSpawnLoader};
    for (const std::string& argument : arguments) {
      if (argument.find('\0') != std::string::npos) {
        return MakeError(Reason::kInvalidArgument, "an argument of a loader has a NUL in it and would become two");
      }
      message.value += argument + '\0';
    }
    const int fds[] = {request_fd};
    ASSIGN_OR_RETURN(Packet answer, Ask(std::move(message), fds));
    if (answer.message.type != Type::kSpawned || answer.fds.size() != 2) return Unexpected(answer.message);
    return KeeperLoader{static_cast<pid_t>(answer.message.number), std::move(answer.fds[0]), std::move(answer.fds[1]),
                        std::move(answer.loader_end)};
  }

  absl::Status DetachLoader(pid_t pid) { return Ask({.type = Type::kDetachLoader, .number = pid}, {}).status(); }

 private:
  // A question whose answer somebody waits for.
  class Call {
   public:
    Call(Impl* client, Type type) : client_(client), type_(type), deadline_(Clock::now() + client->options_.timeout) {
      MutexLock lock(client_->mutex_);
      id_ = ++client_->last_request_id_;
      client_->calls_[id_] = this;
    }
    ~Call() {
      MutexLock lock(client_->mutex_);
      client_->calls_.erase(id_);
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    int64_t id() const { return id_; }
    Clock::time_point deadline() const { return deadline_; }

    absl::StatusOr<Packet> Wait() {
      MutexLock lock(client_->mutex_);
      while (!answer_.has_value()) {
        if (client_->disconnected_) return KeeperGone();
        if (!client_->changed_.WaitUntil(client_->mutex_, deadline_) && !answer_.has_value() &&
            Clock::now() >= deadline_) {
          return TooLate(std::string(KeeperMessageTypeName(type_)));
        }
      }
      CrashPoint::FromEnvironment().Reached(type_, Moment::kAcked);
      if (answer_->message.type == Type::kNack) return Refused(answer_->message);
      return std::move(*answer_);
    }

    std::optional<Packet> answer_;  // guarded by the client's mutex_

   private:
    Impl* const client_;
    const Type type_;
    const Clock::time_point deadline_;
    int64_t id_ = 0;
  };

  absl::Status Send(KeeperMessage message, std::span<const int> fds, Clock::time_point deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(send_mutex_) {
    message.version = version_;
    return SendPacket(socket_.get(), message, fds, deadline);
  }

  absl::StatusOr<Packet> Ask(KeeperMessage message, std::span<const int> fds) {
    Call call(this, message.type);
    message.request_id = call.id();
    {
      MutexLock lock(send_mutex_);
      RETURN_IF_ERROR(Send(std::move(message), fds, call.deadline()));
    }
    return call.Wait();
  }

  // The parts follow each other: nothing else is sent in between.
  absl::Status SendParts(const Call& call, const std::string& key, std::string_view value, std::span<const int> fds) {
    MutexLock lock(send_mutex_);
    const int parts = CountParts(value.size(), fds.size());
    for (int part = 0; part < parts; ++part) {
      const absl::Status sent = Send({.type = Type::kPut,
                                      .request_id = call.id(),
                                      .part = part,
                                      .parts = parts,
                                      .key = key,
                                      .value = std::string(ValueOfPart(value, part))},
                                     FdsOfPart(fds, part), call.deadline());
      if (sent.ok()) continue;
      // The keeper waits for the next part and would take any other message for a fault.
      if (part > 0) shutdown(socket_.get(), SHUT_RDWR);
      return sent;
    }
    return absl::OkStatus();
  }

  void ReadUntilTheEnd() {
    absl::Status status;
    while (status.ok()) {
      absl::StatusOr<Packet> packet = ReceivePacket(socket_.get(), std::nullopt);
      status = packet.ok() ? Handle(*std::move(packet)) : packet.status();
    }
    bool stopping = false;
    {
      MutexLock lock(mutex_);
      disconnected_ = true;
      stopping = stopping_;
      for (const auto& [pid, end] : running_loaders_) end->Lose();
      changed_.NotifyAll();
    }
    if (stopping) return;
    Log(LogLevel::kError, "keeper.lost", {{"cause", std::string(status.message())}});
    if (options_.on_disconnected) options_.on_disconnected();
  }

  absl::Status Handle(Packet packet) {
    const Type type = packet.message.type;
    switch (type) {
      case Type::kPing: {
        MutexLock lock(mutex_);
        unanswered_ping_ = packet.message.request_id;
        changed_.NotifyAll();
        return absl::OkStatus();
      }
      case Type::kExited:
        OnExited(packet.message);
        break;
      case Type::kAck:
      case Type::kNack:
      case Type::kSpawned:
        OnAnswer(std::move(packet));
        break;
      default:
        return Unexpected(packet.message);
    }
    CrashPoint::FromEnvironment().Reached(type, Moment::kAfter);
    return absl::OkStatus();
  }

  void OnAnswer(Packet packet) {
    MutexLock lock(mutex_);
    const auto it = calls_.find(packet.message.request_id);
    if (it == calls_.end()) return;  // its caller has gone; a loader ends with its control socket, which closes here
    // Here and not when the caller wakes up: the next message may be of its end.
    if (packet.message.type == Type::kSpawned) {
      packet.loader_end = std::make_shared<LoaderEnd>();
      running_loaders_[packet.message.number] = packet.loader_end;
    }
    it->second->answer_ = std::move(packet);
    changed_.NotifyAll();
  }

  void OnExited(const KeeperMessage& exited) {
    MutexLock lock(mutex_);
    const auto it = running_loaders_.find(exited.number);
    if (it == running_loaders_.end()) return;  // nobody waits for it
    it->second->Set(exited.status);
    running_loaders_.erase(it);
  }

  void AnswerPings() {
    while (WaitForPing() && WaitUntilWell()) {
      const int64_t ping = TakePing();
      MutexLock lock(send_mutex_);
      // A failure is the reader's to notice.
      Send({.type = Type::kPong, .request_id = ping}, {}, Clock::now() + options_.timeout).IgnoreError();
      CrashPoint::FromEnvironment().Reached(Type::kPing, Moment::kAfter);
    }
  }

  // False at the end of the connection.
  bool WaitForPing() {
    MutexLock lock(mutex_);
    while (!over() && !unanswered_ping_.has_value()) changed_.Wait(mutex_);
    return !over();
  }

  // The last one that has come.
  int64_t TakePing() {
    MutexLock lock(mutex_);
    return std::exchange(unanswered_ping_, std::nullopt).value_or(0);
  }

  // Asks until the answer is yes, however long that takes: the keeper asks but once, and it is its business how long it
  // waits. False at the end of the connection.
  bool WaitUntilWell() {
    if (!options_.alive || options_.alive()) return true;
    Log(LogLevel::kError, "keeper.ping_not_answered", {{"cause", "this broker is not well"}});
    const auto begin = Clock::now();
    do {
      if (!Pause(kAskAgainInterval)) return false;
    } while (!options_.alive());
    const auto late = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    Log(LogLevel::kWarning, "keeper.ping_answered_late", {{"late_ms", absl::StrCat(late.count())}});
    return true;
  }

  // False at the end of the connection, before the time is over.
  bool Pause(std::chrono::milliseconds time) {
    const auto deadline = Clock::now() + time;
    MutexLock lock(mutex_);
    while (!over() && Clock::now() < deadline) changed_.WaitUntil(mutex_, deadline);
    return !over();
  }

  bool over() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || disconnected_; }

  const UniqueFd socket_;
  const KeeperClientOptions options_;
  const uint16_t version_;

  Mutex send_mutex_;  // one sender at a time; held over all parts of an entry

  Mutex mutex_;
  CondVar changed_;
  KeeperInheritance inheritance_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, Call*> calls_ ABSL_GUARDED_BY(mutex_);  // by request id
  // Of loaders of which the keeper has not said that they have ended, by process id.
  std::map<int64_t, std::shared_ptr<LoaderEnd>> running_loaders_ ABSL_GUARDED_BY(mutex_);
  int64_t last_request_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<int64_t> unanswered_ping_ ABSL_GUARDED_BY(mutex_);
  bool disconnected_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread reader_;
  std::thread responder_;
};

absl::StatusOr<std::unique_ptr<KeeperClient>> KeeperClient::FromFd(UniqueFd socket, KeeperClientOptions options) {
  fcntl(socket.get(), F_SETFD, FD_CLOEXEC);  // an inherited one is not, and a program started here must not have it
  ASSIGN_OR_RETURN(Session session, SayHello(socket.get(), Clock::now() + options.timeout));
  auto impl = std::make_unique<Impl>(std::move(socket), std::move(options), std::move(session));
  RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<KeeperClient>(new KeeperClient(std::move(impl)));
}

absl::StatusOr<std::unique_ptr<KeeperClient>> KeeperClient::FromPath(const std::string& path,
                                                                     KeeperClientOptions options) {
  const auto deadline = Clock::now() + options.timeout;
  absl::StatusOr<UniqueFd> socket = ConnectOnce(path);
  while (HasReason(socket.status(), Reason::kServiceUnavailable) && Clock::now() < deadline) {
    std::this_thread::sleep_for(kRetryInterval);
    socket = ConnectOnce(path);
  }
  if (!socket.ok()) return socket.status();
  return FromFd(*std::move(socket), std::move(options));
}

KeeperClient::KeeperClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KeeperClient::~KeeperClient() = default;

KeeperInheritance KeeperClient::TakeInheritance() { return impl_->TakeInheritance(); }
absl::Status KeeperClient::Ready() { return impl_->Ready(); }
absl::Status KeeperClient::TakingUp(const std::string& key) { return impl_->TakingUp(key); }
absl::Status KeeperClient::Put(const std::string& key, std::string_view value, std::span<const int> fds) {
  return impl_->Put(key, value, fds);
}
absl::Status KeeperClient::Drop(const std::string& key) { return impl_->Drop(key); }
absl::StatusOr<KeeperLoader> KeeperClient::SpawnLoader(const std::vector<std::string>& arguments, int request_fd) {
  return impl_->SpawnLoader(arguments, request_fd);
}
absl::Status KeeperClient::DetachLoader(pid_t pid) { return impl_->DetachLoader(pid); }

}  // namespace weightbroker
