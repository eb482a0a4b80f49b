#include "server/endpoint/acceptor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>

#include "client/include/weightbroker/redeem.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "server/endpoint/listener.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/redeem_cxx17.h"
#include "tests/unit/endpoint/socket_client.h"
#include "tests/unit/endpoint/temp_folder.h"
#include "tests/unit/endpoint/ticket_request.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::weightbroker::testing::Connect;
using ::weightbroker::testing::IsClosedWithin;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::kHttp2Preface;
using ::weightbroker::testing::kNobody;
using ::weightbroker::testing::RunAsUser;
using ::weightbroker::testing::Send;
using ::weightbroker::testing::TempFolder;
using ::weightbroker::testing::TicketRequest;

constexpr int kPatienceMs = 10'000;  // for what must happen; never waited for in full unless a test fails

size_t OpenDescriptors() {
  return static_cast<size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator()));
}

// What a client of the ticket protocol got.
struct Redeemed {
  int code = -1;
  std::vector<UniqueFd> fds;
  std::string error;
};

Redeemed Redeem(const std::string& path, std::string_view ticket, size_t capacity = 1024,
                int timeout_ms = kPatienceMs) {
  std::vector<int> fds(capacity);
  size_t count = 0;
  char error[kRedeemErrorBytes] = {};
  Redeemed redeemed;
  redeemed.code = RedeemFromCxx17(path.c_str(), ticket.data(), ticket.size(), fds.data(), capacity, &count, timeout_ms,
                                  error, sizeof(error));
  redeemed.error = error;
  for (size_t i = 0; i < count; ++i) redeemed.fds.emplace_back(fds[i]);
  return redeemed;
}

// Descriptors of memfds that hold their own number, so that their order shows.
SharedFds NumberedFds(int count) {
  auto fds = std::make_shared<std::vector<UniqueFd>>();
  for (int i = 0; i < count; ++i) {
    fds->emplace_back(memfd_create("numbered", MFD_CLOEXEC));
    EXPECT_EQ(write(fds->back().get(), &i, sizeof(i)), static_cast<ssize_t>(sizeof(i)));
  }
  return fds;
}

int NumberIn(const UniqueFd& fd) {
  int number = -1;
  EXPECT_EQ(pread(fd.get(), &number, sizeof(number), 0), static_cast<ssize_t>(sizeof(number)));
  return number;
}

class AcceptorTest : public ::testing::Test {
 protected:
  AcceptorTest() { SetLogLevel(LogLevel::kError); }

  void Start(AcceptorOptions options = {}) {
    auto listener = Listener::Create({.path = path_, .mode = 0666});
    ASSERT_THAT(listener, IsOk());
    listener_.emplace(*std::move(listener));
    ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
    options.listen_fd = listener_->fd();
    options.tickets = &tickets_;
    options.serve_http2 = [this](UniqueFd connection, const Peer& peer) {
      MutexLock lock(mutex_);
      served_.emplace_back(std::move(connection), peer);
      changed_.NotifyAll();
    };
    options.on_refused = [this](const std::string& reason, const Peer& peer) {
      MutexLock lock(mutex_);
      ++refusals_[reason];
      last_refused_ = peer;
      changed_.NotifyAll();
    };
    acceptor_.emplace(std::move(options));
  }

  template <typename Condition>
  bool WaitUntil(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + milliseconds(kPatienceMs);
    MutexLock lock(mutex_);
    while (!condition()) {
      if (!changed_.WaitUntil(mutex_, deadline)) return condition();
    }
    return true;
  }
  bool WaitForServed(size_t count) {
    return WaitUntil([&] { return served_.size() >= count; });
  }
  bool WaitForRefusal(const std::string& reason, int count = 1) {
    return WaitUntil([&] { return refusals_[reason] >= count; });
  }
  int Refusals() {
    MutexLock lock(mutex_);
    int sum = 0;
    for (const auto& [reason, count] : refusals_) sum += count;
    return sum;
  }

  std::string Issue(SharedFds fds, uid_t uid = geteuid(), milliseconds lifetime = milliseconds(60'000)) {
    const Ticket ticket = tickets_.Issue({.uid = uid, .lease_id = 1, .fds = std::move(fds)}, lifetime);
    return std::string(ticket.begin(), ticket.end());
  }

  // Both kinds of clients are served.
  void ExpectServing() {
    const Redeemed redeemed = Redeem(path_, Issue(NumberedFds(2)));
    EXPECT_EQ(redeemed.code, 0) << redeemed.error;
    EXPECT_EQ(redeemed.fds.size(), 2u);
    size_t before = 0;
    {
      MutexLock lock(mutex_);
      before = served_.size();
    }
    const UniqueFd client = Connect(path_);
    Send(client, kHttp2Preface);
    EXPECT_TRUE(WaitForServed(before + 1));
  }

  TempFolder folder_;
  const std::string path_ = folder_ / "s";
  TicketBox tickets_;
  std::optional<Listener> listener_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::pair<UniqueFd, Peer>> served_;
  std::map<std::string, int> refusals_;
  Peer last_refused_;
  std::optional<Acceptor> acceptor_;
};

TEST_F(AcceptorTest, RespondsWhileItsThreadIsAtWorkAndNotWhileItHangs) {
  std::atomic<bool> go_on{false};
  Start();
  EXPECT_TRUE(acceptor_->Responds(milliseconds(kPatienceMs)));
  EXPECT_TRUE(acceptor_->Responds(milliseconds(kPatienceMs)));
  acceptor_.reset();
  listener_.reset();

  AcceptorOptions hangs;
  std::atomic<bool> hanging{false};
  auto listener = Listener::Create({.path = path_, .mode = 0666});
  ASSERT_THAT(listener, IsOk());
  hangs.listen_fd = listener->fd();
  hangs.tickets = &tickets_;
  hangs.on_refused = [&](const std::string&, const Peer&) {
    hanging = true;
    while (!go_on) std::this_thread::sleep_for(milliseconds(1));
  };
  Acceptor acceptor(std::move(hangs));
  const UniqueFd garbage = Connect(path_);
  Send(garbage, std::string(100, 'x'));
  while (!hanging) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_FALSE(acceptor.Responds(milliseconds(20)));
  go_on = true;
  EXPECT_TRUE(acceptor.Responds(milliseconds(kPatienceMs)));
}

TEST_F(AcceptorTest, HandsAnHttp2ConnectionOverWithEveryByteUnreadAndItsPeerKnown) {
  Start();
  const UniqueFd client = Connect(path_);
  Send(client, kHttp2Preface);
  ASSERT_TRUE(WaitForServed(1));

  const auto& [connection, peer] = served_[0];
  char bytes[64];
  EXPECT_EQ(std::string(bytes, static_cast<size_t>(recv(connection.get(), bytes, sizeof(bytes), 0))), kHttp2Preface);
  EXPECT_EQ(peer.uid, geteuid());
  EXPECT_EQ(peer.pid, getpid());
  EXPECT_NE(fcntl(connection.get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(connection.get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(AcceptorTest, PutsTogetherAPrefaceThatArrivesByteByByte) {
  Start();
  const UniqueFd client = Connect(path_);
  for (const char byte : kHttp2Preface) {
    Send(client, {&byte, 1});
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(WaitForServed(1));
}

TEST_F(AcceptorTest, GivesTheDescriptorsOfATicketInTheirOrder) {
  Start();
  const Redeemed redeemed = Redeem(path_, Issue(NumberedFds(3)));

  ASSERT_EQ(redeemed.code, 0) << redeemed.error;
  ASSERT_EQ(redeemed.fds.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(NumberIn(redeemed.fds[static_cast<size_t>(i)]), i);
    EXPECT_NE(fcntl(redeemed.fds[static_cast<size_t>(i)].get(), F_GETFD) & FD_CLOEXEC, 0);
  }
}

TEST_F(AcceptorTest, Gives300DescriptorsByOneTicketAndLeaksNone) {
  Start();
  const SharedFds fds = NumberedFds(300);
  const size_t before = OpenDescriptors();
  {
    const Redeemed redeemed = Redeem(path_, Issue(fds));
    ASSERT_EQ(redeemed.code, 0) << redeemed.error;
    ASSERT_EQ(redeemed.fds.size(), 300u);
    for (int i = 0; i < 300; ++i) EXPECT_EQ(NumberIn(redeemed.fds[static_cast<size_t>(i)]), i);
  }
  acceptor_->Stop();
  EXPECT_LE(OpenDescriptors(), before);
}

TEST_F(AcceptorTest, GivesNoDescriptorsByATicketForNone) {
  Start();
  const Redeemed redeemed = Redeem(path_, Issue(NumberedFds(0)), 0);
  EXPECT_EQ(redeemed.code, 0) << redeemed.error;
}

TEST_F(AcceptorTest, PutsTogetherATicketThatArrivesByteByByte) {
  Start();
  const UniqueFd client = Connect(path_);
  for (const char byte : TicketRequest(Issue(NumberedFds(1)))) {
    Send(client, {&byte, 1});
    std::this_thread::sleep_for(milliseconds(1));
  }
  char reply[ticket_protocol::kReplyHeaderBytes];
  ASSERT_EQ(recv(client.get(), reply, sizeof(reply), MSG_WAITALL), static_cast<ssize_t>(sizeof(reply)));
  EXPECT_EQ(reply[12], 0);
  EXPECT_EQ(reply[16], 1);
}

TEST_F(AcceptorTest, RefusesATicketUsedTwice) {
  Start();
  const std::string ticket = Issue(NumberedFds(1));
  ASSERT_EQ(Redeem(path_, ticket).code, 0);

  const Redeemed second = Redeem(path_, ticket);

  EXPECT_EQ(second.code, EACCES);
  EXPECT_THAT(second.error, HasSubstr("used already"));
  EXPECT_TRUE(WaitForRefusal(refusal::kTicketInvalid));
}

TEST_F(AcceptorTest, RefusesATicketThatExpiredOrWasRevoked) {
  Start();
  const std::string expired = Issue(NumberedFds(1), geteuid(), milliseconds(0));
  EXPECT_THAT(Redeem(path_, expired).error, HasSubstr("has expired"));

  const std::string revoked = Issue(NumberedFds(1));
  tickets_.Revoke(1);
  EXPECT_EQ(Redeem(path_, revoked).code, EACCES);
  EXPECT_TRUE(WaitForRefusal(refusal::kTicketInvalid, 2));
}

TEST_F(AcceptorTest, RefusesAnotherUsersTicketAndLeavesItToItsOwner) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  Start();
  const std::string ticket = Issue(NumberedFds(1));

  EXPECT_EQ(RunAsUser(kNobody, [&] { return Redeem(path_, ticket).code == EACCES ? 0 : 1; }), 0);

  ASSERT_TRUE(WaitForRefusal(refusal::kTicketInvalid));
  EXPECT_EQ(last_refused_.uid, kNobody);
  EXPECT_EQ(Redeem(path_, ticket).code, 0);
}

TEST_F(AcceptorTest, RefusesAUserWhoIsNotAllowedInWhateverLanguageTheySpeak) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  Start({.access = {.allowed_uids = {1234}, .allowed_gids = {}}, .handshake_timeout = milliseconds(300)});
  const std::string ticket = Issue(NumberedFds(1), kNobody);

  EXPECT_EQ(RunAsUser(kNobody,
                      [&] {
                        const Redeemed refused = Redeem(path_, ticket);
                        EXPECT_EQ(refused.code, EACCES);
                        EXPECT_THAT(refused.error, HasSubstr("user 65534 (group 65534) may not use this service"));
                        const UniqueFd client = Connect(path_);
                        Send(client, kHttp2Preface);
                        EXPECT_TRUE(IsClosedWithin(client, kPatienceMs));
                        return ::testing::Test::HasFailure() ? 1 : 0;
                      }),
            0);
  EXPECT_TRUE(WaitForRefusal(refusal::kAccessDenied, 2));
  EXPECT_TRUE(served_.empty());
  EXPECT_EQ(tickets_.size(), 1u);  // never looked at
  ExpectServing();                 // root always may
}

TEST_F(AcceptorTest, LetsMembersOfAnAllowedSupplementaryGroupIn) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to choose groups";
  Start({.access = {.allowed_uids = {}, .allowed_gids = {4321}}});
  const std::string ticket = Issue(NumberedFds(1), kNobody);
  const gid_t group = 4321;

  EXPECT_EQ(RunAsUser(geteuid(),
                      [&] {
                        if (setgroups(1, &group) != 0 || setgid(kNobody) != 0 || setuid(kNobody) != 0) return 125;
                        return Redeem(path_, ticket).code;
                      }),
            0);
}

TEST_F(AcceptorTest, DropsWhoeverSaysNothingInTimeAndServesOthersMeanwhile) {
  Start({.handshake_timeout = milliseconds(300)});
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(Connect(path_));
  const UniqueFd half_preface = Connect(path_);
  Send(half_preface, kHttp2Preface.substr(0, 12));
  const UniqueFd no_settings = Connect(path_);
  Send(no_settings, kHttp2Preface.substr(0, 24));
  const UniqueFd half_ticket = Connect(path_);
  Send(half_ticket, TicketRequest(std::string(32, 't')).substr(0, 30));

  ExpectServing();
  EXPECT_EQ(Refusals(), 0);

  EXPECT_TRUE(WaitForRefusal(refusal::kHandshakeTimeout, 53));
  for (const UniqueFd& client : silent) EXPECT_TRUE(IsClosedWithin(client, kPatienceMs));
  EXPECT_TRUE(IsClosedWithin(half_preface, kPatienceMs));
  EXPECT_TRUE(IsClosedWithin(no_settings, kPatienceMs));
  EXPECT_TRUE(IsClosedWithin(half_ticket, kPatienceMs));
  ExpectServing();
}

TEST_F(AcceptorTest, DoesNotSpinOnHalfAHandshake) {
  Start({.handshake_timeout = milliseconds(2000)});
  const UniqueFd half = Connect(path_);
  Send(half, kHttp2Preface.substr(0, 12));
  std::this_thread::sleep_for(milliseconds(20));
  timespec before{};
  timespec after{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
  std::this_thread::sleep_for(milliseconds(300));
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
  const double used_ms = static_cast<double>(after.tv_sec - before.tv_sec) * 1e3 +
                         static_cast<double>(after.tv_nsec - before.tv_nsec) / 1e6;

  EXPECT_LT(used_ms, 100);
}

TEST_F(AcceptorTest, DropsGarbageAtOnce) {
  Start();
  const UniqueFd garbage = Connect(path_);
  Send(garbage, "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(IsClosedWithin(garbage, kPatienceMs));
  EXPECT_TRUE(WaitForRefusal(refusal::kHandshakeGarbage));
  ExpectServing();
}

TEST_F(AcceptorTest, DropsHalfAHandshakeOnceItsClientIsGone) {
  Start();
  {
    const UniqueFd preface = Connect(path_);
    Send(preface, kHttp2Preface.substr(0, 23));
    const UniqueFd ticket = Connect(path_);
    Send(ticket, TicketRequest("ticket").substr(0, 17));
  }
  EXPECT_TRUE(WaitForRefusal(refusal::kHandshakeGarbage, 2));
  ExpectServing();
}

TEST_F(AcceptorTest, CountsNobodyWhoOnlyLookedWhetherTheServiceIsThere) {
  Start();
  for (int i = 0; i < 10; ++i) Connect(path_);
  ExpectServing();
  EXPECT_EQ(Refusals(), 0);
}

TEST_F(AcceptorTest, AnswersATicketRequestThatItDoesNotUnderstand) {
  Start();
  const UniqueFd client = Connect(path_);
  Send(client, TicketRequest("ticket", /*version=*/9));
  char reply[4096];
  const ssize_t size = recv(client.get(), reply, sizeof(reply), 0);

  ASSERT_GT(size, 24);
  EXPECT_EQ(reply[12], 3);
  EXPECT_THAT(std::string(reply + 24, static_cast<size_t>(size) - 24), HasSubstr("version 9"));
  EXPECT_TRUE(WaitForRefusal(refusal::kHandshakeGarbage));
}

TEST_F(AcceptorTest, DropsTheOldestWhenTooManyAreWaiting) {
  Start({.handshake_timeout = milliseconds(60'000), .max_pending_handshakes = 3});
  std::vector<UniqueFd> clients;
  for (int i = 0; i < 4; ++i) {
    clients.push_back(Connect(path_));
    Send(clients.back(), kHttp2Preface.substr(0, 4));
  }

  EXPECT_TRUE(WaitForRefusal(refusal::kTooManyHandshakes));
  EXPECT_TRUE(IsClosedWithin(clients[0], kPatienceMs));
  Send(clients[3], kHttp2Preface.substr(4));
  EXPECT_TRUE(WaitForServed(1));
  EXPECT_EQ(Refusals(), 1);
}

TEST_F(AcceptorTest, ServesOthersWhileClientsDoNotTakeTheirDescriptors) {
  Start();
  const SharedFds fds = NumberedFds(300);
  std::vector<UniqueFd> slow;
  for (int i = 0; i < 10; ++i) {
    slow.push_back(Connect(path_));
    Send(slow.back(), TicketRequest(Issue(fds)));
  }
  ExpectServing();
}

TEST_F(AcceptorTest, SurvivesClientsThatDieAtAnyStep) {
  Start();
  const std::string request = TicketRequest(Issue(NumberedFds(1)));
  for (size_t size = 0; size <= request.size(); size += 4) {
    EXPECT_EQ(RunAsUser(geteuid(),
                        [&] {
                          const UniqueFd client = Connect(path_);
                          Send(client, request.substr(0, size));
                          return raise(SIGKILL);
                        }),
              -1);
  }
  ExpectServing();
}

TEST_F(AcceptorTest, WaitsForDescriptorsWithoutSpinningAndServesWhoeverWaitedInTheBacklog) {
  Start();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const UniqueFd waiting = Connect(path_);  // accepted, if at all, before the limit falls
  std::this_thread::sleep_for(milliseconds(20));
  const UniqueFd client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit none = before;
  none.rlim_cur = 3;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);

  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
  EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  Send(client, kHttp2Preface);
  timespec cpu_before{};
  timespec cpu_after{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_before);
  std::this_thread::sleep_for(milliseconds(300));
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu_after);
  const bool served_early = !served_.empty();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);

  EXPECT_FALSE(served_early);
  EXPECT_LT(static_cast<double>(cpu_after.tv_sec - cpu_before.tv_sec) * 1e3 +
                static_cast<double>(cpu_after.tv_nsec - cpu_before.tv_nsec) / 1e6,
            100);
  EXPECT_TRUE(WaitForServed(1));
}

TEST_F(AcceptorTest, TellsAReceiverAtItsLimitOfOpenFilesAndLeavesItNone) {
  Start();
  const std::string ticket = Issue(NumberedFds(40));

  EXPECT_EQ(RunAsUser(geteuid(),
                      [&] {
                        const size_t open_before = OpenDescriptors();
                        const UniqueFd highest(open("/dev/null", O_RDONLY | O_CLOEXEC));
                        const rlim_t limit = static_cast<rlim_t>(highest.get()) + 20;
                        const rlimit tight = {.rlim_cur = limit, .rlim_max = limit};
                        setrlimit(RLIMIT_NOFILE, &tight);
                        const Redeemed redeemed = Redeem(path_, ticket);
                        EXPECT_EQ(redeemed.code, EMFILE);
                        EXPECT_THAT(redeemed.error, HasSubstr("RLIMIT_NOFILE"));
                        EXPECT_TRUE(redeemed.fds.empty());
                        EXPECT_EQ(OpenDescriptors(), open_before + 1);
                        return ::testing::Test::HasFailure() ? 1 : 0;
                      }),
            0);
  ExpectServing();
}

TEST_F(AcceptorTest, RetriesWhenTheKernelHasTooManyDescriptorsOnTheirWay) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  // The kernel counts descriptors in flight per user against RLIMIT_NOFILE, for users without privileges. A client that
  // does not read holds 100 of them; the second must wait, and gets them as soon as the first has gone.
  ASSERT_EQ(chown(folder_.path().c_str(), kNobody, kNobody), 0);
  EXPECT_EQ(
      RunAsUser(kNobody,
                [&] {
                  const SharedFds fds = NumberedFds(100);
                  const rlimit tight = {.rlim_cur = 150, .rlim_max = 150};
                  setrlimit(RLIMIT_NOFILE, &tight);
                  auto listener = Listener::Create({.path = path_});
                  EXPECT_THAT(listener, IsOk());
                  std::vector<UniqueFd> slow;
                  for (int i = 0; i < 3; ++i) slow.push_back(Connect(path_));
                  acceptor_.emplace(AcceptorOptions{
                      .listen_fd = listener->fd(), .tickets = &tickets_, .handshake_timeout = milliseconds(60'000)});
                  for (const UniqueFd& client : slow) Send(client, TicketRequest(Issue(fds, kNobody)));
                  std::thread releaser([&slow] {
                    std::this_thread::sleep_for(milliseconds(200));
                    slow.clear();
                  });
                  char error[kRedeemErrorBytes] = {};
                  const std::string ticket = Issue(NumberedFds(5), kNobody);
                  int received[5];
                  size_t count = 0;
                  const int code = RedeemTicket(path_.c_str(), ticket.data(), ticket.size(), received, 5, &count,
                                                kPatienceMs, error, sizeof(error));
                  EXPECT_EQ(code, 0) << error;
                  releaser.join();
                  acceptor_.reset();
                  return ::testing::Test::HasFailure() ? 1 : 0;
                }),
      0);
}

TEST_F(AcceptorTest, DropsAReplyThatCannotBeSentInTime) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  // The third client cannot be sent anything while the first two do not read: see above.
  ASSERT_EQ(chown(folder_.path().c_str(), kNobody, kNobody), 0);
  EXPECT_EQ(RunAsUser(kNobody,
                      [&] {
                        const SharedFds fds = NumberedFds(100);
                        const rlimit tight = {.rlim_cur = 150, .rlim_max = 150};
                        setrlimit(RLIMIT_NOFILE, &tight);
                        auto listener = Listener::Create({.path = path_});
                        EXPECT_THAT(listener, IsOk());
                        std::vector<UniqueFd> clients;
                        for (int i = 0; i < 3; ++i) clients.push_back(Connect(path_));
                        AcceptorOptions options{
                            .listen_fd = listener->fd(), .tickets = &tickets_, .handshake_timeout = milliseconds(200)};
                        options.on_refused = [this](const std::string& reason, const Peer&) {
                          MutexLock lock(mutex_);
                          ++refusals_[reason];
                          changed_.NotifyAll();
                        };
                        acceptor_.emplace(std::move(options));
                        for (const UniqueFd& client : clients) Send(client, TicketRequest(Issue(fds, kNobody)));
                        EXPECT_TRUE(WaitForRefusal(refusal::kReplyTimeout));
                        EXPECT_EQ(Refusals(), 1);
                        EXPECT_TRUE(IsClosedWithin(clients[2], kPatienceMs));
                        acceptor_.reset();
                        return ::testing::Test::HasFailure() ? 1 : 0;
                      }),
            0);
}

TEST_F(AcceptorTest, AcceptsNoMoreOnceStoppedAndDropsWhatWasPending) {
  Start();
  const UniqueFd pending = Connect(path_);
  Send(pending, kHttp2Preface.substr(0, 5));
  ExpectServing();

  acceptor_->Stop();

  EXPECT_TRUE(IsClosedWithin(pending, kPatienceMs));
  const UniqueFd late = Connect(path_);
  EXPECT_TRUE(late.valid());  // it waits in the backlog for whoever inherits the socket
  EXPECT_FALSE(IsClosedWithin(late, 50));
  acceptor_->Stop();
}

TEST(RedeemTicket, NamesWhatIsWrongWithItsArguments) {
  int fds[1];
  size_t count = 9;
  char error[kRedeemErrorBytes] = {};
  const auto redeem = [&](const char* path, const void* ticket, size_t size) {
    return RedeemTicket(path, ticket, size, fds, 1, &count, 1000, error, sizeof(error));
  };
  EXPECT_EQ(redeem(nullptr, "t", 1), EINVAL);
  EXPECT_EQ(count, 0u);
  EXPECT_EQ(redeem(std::string(108, 'p').c_str(), "t", 1), EINVAL);
  EXPECT_THAT(std::string(error), HasSubstr("more than 107 bytes"));
  EXPECT_EQ(redeem("/p", nullptr, 1), EINVAL);
  EXPECT_EQ(redeem("/p", "t", 0), EINVAL);
  EXPECT_EQ(redeem("/p", std::string(65, 't').data(), 65), EINVAL);
  EXPECT_EQ(RedeemTicket("/p", "t", 1, fds, 1, nullptr, 1000, nullptr, 0), EINVAL);
}

TEST(RedeemTicket, SaysThatNothingIsThere) {
  TempFolder folder;
  EXPECT_EQ(Redeem(folder / "s", "ticket").code, ENOENT);
  { ASSERT_THAT(Listener::Create({.path = folder / "s"}), IsOk()); }
}

TEST(RedeemTicket, TimesOutOnAServiceThatNeverAnswers) {
  TempFolder folder;
  auto listener = Listener::Create({.path = folder / "s"});
  ASSERT_THAT(listener, IsOk());

  EXPECT_EQ(Redeem(folder / "s", "ticket", 1, 50).code, ETIMEDOUT);
}

// Answers one connection with bytes of the test's choice.
class FakeService {
 public:
  FakeService(const Listener& listener, std::string reply, int fds_with_last_byte = 0)
      : thread_([fd = listener.fd(), reply = std::move(reply), fds_with_last_byte] {
          UniqueFd connection;
          while (!connection.valid()) connection.reset(accept(fd, nullptr, nullptr));
          char request[128];
          EXPECT_GT(recv(connection.get(), request, sizeof(request), 0), 0);
          SendWithFds(connection, reply, fds_with_last_byte);
        }) {}
  ~FakeService() { thread_.join(); }

 private:
  static void SendWithFds(const UniqueFd& connection, const std::string& reply, int count) {
    if (count == 0) return Send(connection, reply);
    Send(connection, reply.substr(0, reply.size() - 1));
    char last = reply.back();
    iovec data = {.iov_base = &last, .iov_len = 1};
    std::vector<char> control(CMSG_SPACE(static_cast<size_t>(count) * sizeof(int)));
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(static_cast<size_t>(count) * sizeof(int));
    for (int i = 0; i < count; ++i) {
      const int fd = STDERR_FILENO;
      memcpy(CMSG_DATA(rights) + static_cast<size_t>(i) * sizeof(int), &fd, sizeof(int));
    }
    EXPECT_EQ(sendmsg(connection.get(), &message, MSG_NOSIGNAL), 1);
  }

  std::thread thread_;
};

std::string ReplyHeader(uint32_t version, uint32_t status, uint32_t fd_count, uint32_t message_size) {
  std::string header("\x89WBFD\r\n\x1a", 8);
  for (const uint32_t number : {version, status, fd_count, message_size}) {
    for (int shift = 0; shift < 32; shift += 8) header.push_back(static_cast<char>(number >> shift));
  }
  return header;
}

TEST(RedeemTicket, DoesNotTrustWhatAnswers) {
  struct Case {
    const char* what;
    std::string reply;
    int fds;
    int code;
  };
  const Case cases[] = {
      {"another service", "HTTP/1.1 400 Bad Request\r\n\r\n", 0, EPROTO},
      {"another version", ReplyHeader(2, 0, 0, 0), 0, EPROTO},
      {"an over-long message", ReplyHeader(1, 1, 0, 1025), 0, EPROTO},
      {"descriptors beside a refusal", ReplyHeader(1, 1, 1, 0), 0, EPROTO},
      {"a status unknown", ReplyHeader(1, 77, 0, 0), 0, EPROTO},
      {"half a header", ReplyHeader(1, 0, 0, 0).substr(0, 20), 0, ECONNRESET},
      {"no descriptors after all", ReplyHeader(1, 0, 2, 0), 0, ECONNRESET},
      {"a byte without descriptors", ReplyHeader(1, 0, 2, 0) + "F", 0, EPROTO},
      {"fewer descriptors", ReplyHeader(1, 0, 2, 0) + "F", 1, EPROTO},
      {"more descriptors", ReplyHeader(1, 0, 2, 0) + "F", 3, EPROTO},
      {"descriptors with another byte", ReplyHeader(1, 0, 2, 0) + "x", 2, EPROTO},
      {"descriptors with the header", ReplyHeader(1, 0, 0, 0), 2, 0},
      {"more descriptors than there is room for", ReplyHeader(1, 0, 5, 0), 0, ENOBUFS},
  };
  for (const Case& test : cases) {
    TempFolder folder;
    auto listener = Listener::Create({.path = folder / "s"});
    ASSERT_THAT(listener, IsOk());
    const size_t open_before = OpenDescriptors();
    {
      const FakeService service(*listener, test.reply, test.fds);
      const Redeemed redeemed = Redeem(folder / "s", "ticket", 4);
      EXPECT_EQ(redeemed.code, test.code) << test.what << ": " << redeemed.error;
      EXPECT_TRUE(redeemed.fds.empty()) << test.what;
    }
    EXPECT_EQ(OpenDescriptors(), open_before) << test.what;
  }
}

}  // namespace
}  // namespace weightbroker
