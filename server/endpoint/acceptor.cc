#include "server/endpoint/acceptor.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/base/thread.h"
#include "server/endpoint/handshake.h"
#include "server/endpoint/http2_refusal.h"
#include "server/endpoint/reply.h"

namespace weightbroker {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPauseAfterAcceptFailure{50};  // nothing tells when descriptors are free again
constexpr milliseconds kFdsInFlightRetry{5};
constexpr int64_t kMostReadOfTheRefused = 64 * 1024;  // what a client says before and after its first call is far less
constexpr int kAcceptsPerRound = 64;                  // then the connections that are waiting get their turn
constexpr uint64_t kListenId = 0;
constexpr uint64_t kStopId = 1;
constexpr uint64_t kPingId = 2;
constexpr uint64_t kFirstConnectionId = 3;

// A connection that has not been handed over:
//   handshake -> reply -> closed                       a ticket
//   handshake -> refusal -> reply -> lingering         HTTP/2 of somebody who may not come in
struct Connection {
  UniqueFd fd;
  Peer peer;
  absl::Status access;  // not ok: gets a refusal in whatever language it speaks
  Clock::time_point deadline;
  bool watched = false;  // by epoll
  std::optional<Http2Refusal> refusal = {};
  int64_t refusal_bytes = 0;        // read of it
  std::optional<Reply> reply = {};  // once it is known what to say
  bool lingering = false;           // all has been said; the other side is to close
};

// Accept fails for want of something that may come back.
bool IsExhaustion(int error_number) {
  return error_number == EMFILE || error_number == ENFILE || error_number == ENOBUFS || error_number == ENOMEM;
}

UniqueFd OrDie(int fd, const char* what) {
  if (fd < 0) {
    Log(LogLevel::kError, "endpoint.cannot_start", {{"what", what}, {"error", strerror(errno)}});
    std::abort();
  }
  return UniqueFd(fd);
}

}  // namespace

class Acceptor::Loop {
 public:
  explicit Loop(AcceptorOptions options)
      : options_(std::move(options)),
        epoll_(OrDie(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
        stop_(OrDie(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
        ping_(OrDie(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
    fcntl(options_.listen_fd, F_SETFL, fcntl(options_.listen_fd, F_GETFL) | O_NONBLOCK);
    Watch(EPOLL_CTL_ADD, options_.listen_fd, EPOLLIN, kListenId);
    Watch(EPOLL_CTL_ADD, stop_.get(), EPOLLIN, kStopId);
    Watch(EPOLL_CTL_ADD, ping_.get(), EPOLLIN, kPingId);
    thread_ = StartThreadOrExit("the endpoint", [this] { Run(); });
  }

  ~Loop() {
    Wake(stop_);
    thread_.join();
  }

  bool Responds(milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    MutexLock lock(mutex_);
    const int64_t wanted = rounds_ + 1;
    Wake(ping_);
    while (rounds_ < wanted && Clock::now() < deadline) round_ended_.WaitUntil(mutex_, deadline);
    return rounds_ >= wanted;
  }

 private:
  using Connections = std::map<uint64_t, Connection>;

  void Run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "wb-endpoint");
    std::array<epoll_event, 128> events;
    while (true) {
      const int count = epoll_wait(epoll_.get(), events.data(), events.size(), TimeToNextDeadline());
      for (int i = 0; i < count; ++i) {
        const uint64_t id = events[static_cast<size_t>(i)].data.u64;
        if (id == kStopId) return;
        if (id == kPingId) {
          uint64_t pings = 0;
          [[maybe_unused]] const ssize_t taken = read(ping_.get(), &pings, sizeof(pings));
          continue;
        }
        if (id == kListenId) {
          AcceptSome();
        } else {
          OnEvent(id, events[static_cast<size_t>(i)].events);
        }
      }
      const auto now = Clock::now();
      ResumeAccepting(now);
      RetryDescriptors();
      DropLate(now);
      MutexLock lock(mutex_);
      ++rounds_;
      round_ended_.NotifyAll();
    }
  }

  static void Wake(const UniqueFd& event) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof(one));
  }

  void Watch(int operation, int fd, uint32_t events, uint64_t id) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    epoll_ctl(epoll_.get(), operation, fd, &event);
  }

  int TimeToNextDeadline() const {
    std::optional<Clock::time_point> next = accept_again_;
    if (!deadlines_.empty()) next = std::min(next.value_or(Clock::time_point::max()), deadlines_.begin()->first);
    if (!fds_in_flight_.empty()) next = std::min(*next, Clock::now() + kFdsInFlightRetry);
    if (!next.has_value()) return -1;
    const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now());
    return static_cast<int>(std::max<int64_t>(left.count(), 0));
  }

  void AcceptSome() {
    for (int i = 0; i < kAcceptsPerRound; ++i) {
      UniqueFd fd(accept4(options_.listen_fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (fd.valid()) {
        Admit(std::move(fd));
      } else if (IsExhaustion(errno)) {
        return PauseAccepting(errno);
      } else if (errno != EINTR && errno != ECONNABORTED) {
        return;  // EAGAIN: nobody is waiting
      }
    }
  }

  // Clients wait in the backlog meanwhile. Going on at once would spin: the listener stays readable.
  void PauseAccepting(int error_number) {
    if (!exhausted_) {
      Log(LogLevel::kWarning, "endpoint.accept_failed",
          {{"error", strerror(error_number)}, {"pending", absl::StrCat(connections_.size())}});
    }
    exhausted_ = true;
    accept_again_ = Clock::now() + kPauseAfterAcceptFailure;
    Watch(EPOLL_CTL_MOD, options_.listen_fd, 0, kListenId);
  }

  void ResumeAccepting(Clock::time_point now) {
    if (!accept_again_.has_value() || *accept_again_ > now) return;
    accept_again_.reset();
    Watch(EPOLL_CTL_MOD, options_.listen_fd, EPOLLIN, kListenId);
  }

  void Admit(UniqueFd fd) {
    exhausted_ = false;
    const auto peer = ReadPeer(fd.get());
    if (!peer.ok()) return;
    const auto groups = ReadPeerGroups(fd.get());
    Connection connection{.fd = std::move(fd), .peer = *peer, .access = absl::OkStatus(), .deadline = {}};
    connection.access = CheckAccess(options_.access, *peer, groups.ok() ? *groups : std::vector<gid_t>());
    if (!connection.access.ok()) Refused(refusal::kAccessDenied, *peer);
    if (static_cast<int>(connections_.size()) >= options_.max_pending_handshakes) DropOldest();
    const auto it = connections_.emplace_hint(connections_.end(), next_id_++, std::move(connection));
    SetDeadline(it);
    OnReadable(it);
  }

  void OnEvent(uint64_t id, uint32_t events) {
    const auto it = connections_.find(id);
    if (it == connections_.end()) return;  // dropped by what came before in the same round
    if (it->second.lingering) return Linger(it);
    if (it->second.reply.has_value()) return Advance(it);
    if (it->second.refusal.has_value()) return ReadForRefusal(it);
    const bool closed = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    if (OnReadable(it) && closed) OnClosedEarly(it);
  }

  // Looks at what has arrived. True if that was not enough to know what to do.
  bool OnReadable(Connections::iterator it) {
    char bytes[kMaxHandshakeBytes];
    const ssize_t count = recv(it->second.fd.get(), bytes, sizeof(bytes), MSG_PEEK | MSG_DONTWAIT);
    if (count == 0) {
      Drop(it);  // it connected, perhaps to see whether anybody is here, and left
      return false;
    }
    if (count < 0 && errno != EAGAIN && errno != EINTR) {
      Drop(it);
      return false;
    }
    const Handshake handshake = ReadHandshake({bytes, static_cast<size_t>(std::max<ssize_t>(count, 0))});
    switch (handshake.kind) {
      case Handshake::Kind::kIncomplete:
        WatchForMore(it);
        return true;
      case Handshake::Kind::kHttp2:
        OnHttp2(it);
        return false;
      case Handshake::Kind::kTicket:
        OnTicket(it, handshake);
        return false;
      case Handshake::Kind::kMalformed:
        Refused(refusal::kHandshakeGarbage, it->second.peer);
        StartReply(it, Reply::TicketRefusal(handshake.error));
        return false;
      case Handshake::Kind::kGarbage:
        Refused(refusal::kHandshakeGarbage, it->second.peer);
        Drop(it);
        return false;
    }
    return false;
  }

  // Edge-triggered: what has been peeked at stays in the socket, and must not wake us again.
  void WatchForMore(Connections::iterator it) {
    if (it->second.watched) return;
    it->second.watched = true;
    Watch(EPOLL_CTL_ADD, it->second.fd.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, it->first);
  }

  // It said a part and will say no more.
  void OnClosedEarly(Connections::iterator it) {
    Refused(refusal::kHandshakeGarbage, it->second.peer);
    Drop(it);
  }

  void OnHttp2(Connections::iterator it) {
    if (it->second.access.ok() && options_.admit_http2) {
      it->second.access = options_.admit_http2(it->second.peer);
      if (!it->second.access.ok()) Refused(refusal::kTooManyConnections, it->second.peer);
    }
    if (!it->second.access.ok()) return StartRefusal(it);
    Connection connection = Take(it);
    options_.serve_http2(std::move(connection.fd), connection.peer);
  }

  // The greeting always fits into a socket that nothing has been written to.
  void StartRefusal(Connections::iterator it) {
    const std::string greeting = Http2Refusal::Greeting();
    [[maybe_unused]] const ssize_t sent =
        send(it->second.fd.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    it->second.refusal.emplace();
    ReadForRefusal(it);
  }

  void ReadForRefusal(Connections::iterator it) {
    Connection& connection = it->second;
    char bytes[4096];
    while (!connection.refusal->stream().has_value()) {
      const ssize_t count = ReadOfTheRefused(&connection, bytes, sizeof(bytes));
      if (count < 0) return WatchForMore(it);
      if (count == 0) return Drop(it);
      connection.refusal->Read({bytes, static_cast<size_t>(count)});
    }
    StartReply(it, Reply::WithBytes(connection.refusal->Answer(connection.access)));
  }

  // 0 when there is no more to read, -1 when there is no more yet. Of whoever sends without end, enough has been read.
  static ssize_t ReadOfTheRefused(Connection* connection, char* bytes, size_t size) {
    if (connection->refusal_bytes > kMostReadOfTheRefused) return 0;
    const ssize_t count = recv(connection->fd.get(), bytes, size, MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN ? -1 : 0;
    connection->refusal_bytes += count;
    return count;
  }

  void OnTicket(Connections::iterator it, const Handshake& handshake) {
    Connection& connection = it->second;
    if (!connection.access.ok()) return StartReply(it, Reply::TicketRefusal(connection.access));
    auto grant = options_.tickets->Redeem(handshake.ticket, connection.peer.uid);
    if (!grant.ok()) {
      Refused(refusal::kTicketInvalid, connection.peer);
      return StartReply(it, Reply::TicketRefusal(grant.status()));
    }
    StartReply(it, Reply::WithFds(std::move(grant->fds)));
  }

  void StartReply(Connections::iterator it, Reply reply) {
    it->second.reply = std::move(reply);
    SetDeadline(it);
    Advance(it);
  }

  void Advance(Connections::iterator it) {
    switch (it->second.reply->Advance(it->second.fd.get())) {
      case Reply::Progress::kSent:
        return FinishReply(it);
      case Reply::Progress::kBlocked:
        return WatchForMore(it);
      case Reply::Progress::kFdsInFlight:
        fds_in_flight_.insert(it->first);
        return;
      case Reply::Progress::kBroken:
        return Drop(it);
    }
  }

  void RetryDescriptors() {
    const std::set<uint64_t> waiting = std::exchange(fds_in_flight_, {});
    for (const uint64_t id : waiting) {
      if (const auto it = connections_.find(id); it != connections_.end()) Advance(it);
    }
  }

  // What was sent can still be read after the socket is closed. An HTTP/2 client, though, still writes, and would find
  // the connection broken before it has read why: it is left to close it, which it does after a GOAWAY.
  void FinishReply(Connections::iterator it) {
    if (!it->second.refusal.has_value()) return Drop(it);
    it->second.lingering = true;
    WatchForMore(it);
    Linger(it);
  }

  void Linger(Connections::iterator it) {
    char unread[4096];
    ssize_t count = 0;
    do {
      count = ReadOfTheRefused(&it->second, unread, sizeof(unread));
    } while (count > 0);
    if (count == 0) Drop(it);
  }

  void SetDeadline(Connections::iterator it) {
    deadlines_.erase({it->second.deadline, it->first});
    it->second.deadline = Clock::now() + options_.handshake_timeout;
    deadlines_.insert({it->second.deadline, it->first});
  }

  void DropLate(Clock::time_point now) {
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      const auto it = connections_.find(deadlines_.begin()->second);
      const Connection& connection = it->second;
      const bool counted = !connection.access.ok();  // as access_denied
      if (!counted) {
        Refused(connection.reply.has_value() ? refusal::kReplyTimeout : refusal::kHandshakeTimeout, connection.peer);
      }
      Drop(it);
    }
  }

  void DropOldest() {
    if (deadlines_.empty()) return;
    const auto it = connections_.find(deadlines_.begin()->second);
    Refused(refusal::kTooManyHandshakes, it->second.peer);
    Drop(it);
  }

  Connection Take(Connections::iterator it) {
    if (it->second.watched) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it->second.fd.get(), nullptr);
    deadlines_.erase({it->second.deadline, it->first});
    fds_in_flight_.erase(it->first);
    Connection connection = std::move(it->second);
    connections_.erase(it);
    return connection;
  }

  void Drop(Connections::iterator it) { Take(it); }

  void Refused(const char* reason, const Peer& peer) {
    LogRefusal(reason, peer);
    if (options_.on_refused) options_.on_refused(reason, peer);
  }

  // A few lines a second: whoever floods the socket must not flood the log.
  void LogRefusal(const char* reason, const Peer& peer) {
    constexpr int kLinesPerSecond = 10;
    const auto now = Clock::now();
    if (now - log_second_ >= std::chrono::seconds(1)) {
      if (log_lines_ > kLinesPerSecond) {
        Log(LogLevel::kWarning, "endpoint.refusals_not_logged",
            {{"count", absl::StrCat(log_lines_ - kLinesPerSecond)}});
      }
      log_second_ = now;
      log_lines_ = 0;
    }
    if (++log_lines_ > kLinesPerSecond) return;
    Log(LogLevel::kWarning, "endpoint.refused",
        {{"reason", reason}, {"uid", absl::StrCat(peer.uid)}, {"peer_pid", absl::StrCat(peer.pid)}});
  }

  const AcceptorOptions options_;
  const UniqueFd epoll_;
  const UniqueFd stop_;
  const UniqueFd ping_;

  Mutex mutex_;
  CondVar round_ended_;
  int64_t rounds_ ABSL_GUARDED_BY(mutex_) = 0;  // of the loop

  std::thread thread_;

  // Only the loop's thread touches what follows.
  uint64_t next_id_ = kFirstConnectionId;
  Connections connections_;                                     // by id, never used again
  std::set<std::pair<Clock::time_point, uint64_t>> deadlines_;  // of every connection
  std::set<uint64_t> fds_in_flight_;                            // replies that the kernel put off
  std::optional<Clock::time_point> accept_again_;               // while accepting is paused
  bool exhausted_ = false;                                      // since accept failed; logged once
  Clock::time_point log_second_;
  int log_lines_ = 0;
};

Acceptor::Acceptor(AcceptorOptions options) : loop_(std::make_unique<Loop>(std::move(options))) {}

Acceptor::~Acceptor() = default;

void Acceptor::Stop() { loop_.reset(); }

bool Acceptor::Responds(milliseconds timeout) { return loop_->Responds(timeout); }

}  // namespace weightbroker
