// The private socket: brokers that the keeper has not started, one of which may be in office at a time.

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "server/keeper/keeper.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace weightbroker {
namespace {

constexpr size_t kMaxVisitors = 8;
constexpr std::chrono::milliseconds kSpeakTimeout(2'000);

// A handle on the process that connected, which a process that later gets its number is not; invalid if there is none.
UniqueFd PidfdOfPeer(int socket, pid_t pid) {
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0) return UniqueFd(pidfd);
  return pid > 0 ? UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) : UniqueFd();
}

}  // namespace

void Keeper::AcceptVisitors(TimePoint now) {
  while (private_socket_.has_value() && visitors_.size() < kMaxVisitors) {
    UniqueFd socket(accept4(private_socket_->fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) return;
    ucred peer = {};
    socklen_t size = sizeof(peer);
    const bool known = getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
    if (!known || (peer.uid != geteuid() && peer.uid != 0)) {
      Log(LogLevel::kWarning, "visitor.refused", {{"cause", "another user"}, {"uid", absl::StrCat(peer.uid)}});
      continue;
    }
    UniqueFd pidfd = PidfdOfPeer(socket.get(), peer.pid);
    visitors_.push_back({Connection(std::move(socket)), peer.pid, std::move(pidfd), now + kSpeakTimeout});
  }
}

void Keeper::HandleVisitors(TimePoint now) {
  std::erase_if(visitors_, [&](Visitor& visitor) { return !HandleVisitor(&visitor, now); });
}

bool Keeper::HandleVisitor(Visitor* visitor, TimePoint now) {
  const auto refuse = [&](const std::string& cause) {
    Log(LogLevel::kWarning, "visitor.refused", {{"visitor_pid", absl::StrCat(visitor->pid)}, {"cause", cause}});
    return false;
  };
  absl::StatusOr<std::optional<ReceivedPacket>> packet = visitor->connection.Receive();
  if (!packet.ok()) return refuse(std::string(packet.status().message()));
  if (!packet->has_value()) return now < visitor->speak_by || refuse("it has said nothing");
  const KeeperMessage& hello = (*packet)->message;
  if (hello.type != KeeperMessageType::kHello) return refuse("it did not begin with \"hello\"");
  std::string why_not = WhyNotWelcome(hello);
  if (broker_.has_value()) why_not = absl::StrCat("another broker is connected (process ", broker_->pid, ")");
  if (stop_requests_ > 0) why_not = "the keeper is stopping";
  if (!why_not.empty()) {
    visitor->connection.Send({.type = KeeperMessageType::kNack, .request_id = hello.request_id, .value = why_not});
    visitor->connection.Flush(now).IgnoreError();  // it is sent away either way
    return refuse(why_not);
  }
  TakeIntoOffice(visitor, **std::move(packet), now);
  return false;
}

void Keeper::TakeIntoOffice(Visitor* visitor, ReceivedPacket hello, TimePoint now) {
  BrokerInOffice& broker = broker_.emplace();
  broker.pid = visitor->pid;
  broker.pidfd = std::move(visitor->pidfd);
  broker.session = std::make_unique<BrokerSession>(++last_broker_number_, std::move(visitor->connection), Context());
  supervisor_.OnStarted(now);
  Log(LogLevel::kInfo, "broker.connected",
      {{"broker", absl::StrCat(last_broker_number_)}, {"broker_pid", absl::StrCat(broker.pid)}});
  const absl::Status status = broker.session->Handle(std::move(hello), now);
  if (!status.ok()) return EndSession(status, now);
  HandleBroker(now);
}

}  // namespace weightbroker
