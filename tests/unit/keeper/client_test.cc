// KeeperClient against a keeper that does only what the test says, over a socket pair.
#include "common/keeper/client.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <future>
#include <optional>
#include <thread>

#include "common/base/socket.h"
#include "common/keeper/parts.h"
#include "common/keeper/protocol.h"
#include "tests/support/no_more_threads.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/keeper/fds.h"

namespace weightbroker {
namespace {

using testing::ContentsOf;
using testing::CountOpenFds;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::MakeMemfd;
using testing::StatusIs;
using Type = KeeperMessageType;
using std::chrono::milliseconds;

constexpr milliseconds kPatience(5'000);

// The keeper's end of the pair.
class ScriptedKeeper {
 public:
  ScriptedKeeper() {
    SocketPair pair = *CreateSeqpacketPair();
    socket_ = std::move(pair.first);
    client_socket_ = std::move(pair.second);
  }

  UniqueFd TakeClientSocket() { return std::move(client_socket_); }
  void Close() { socket_.reset(); }

  void Send(const KeeperMessage& message, std::vector<int> fds = {}) {
    ASSERT_THAT(SendMessage(socket_.get(), *EncodeKeeperMessage(message), fds), IsOk());
  }
  void SendRaw(const std::string& bytes) { ASSERT_THAT(SendMessage(socket_.get(), bytes), IsOk()); }

  // The next message of that type.
  KeeperMessage Expect(Type type, std::vector<UniqueFd>* fds = nullptr) {
    auto received = ReceiveMessage(socket_.get(), kPatience);
    EXPECT_THAT(received, IsOk());
    if (!received.ok() || received->closed) return {};
    auto message = DecodeKeeperMessage(received->bytes);
    EXPECT_THAT(message, IsOk());
    EXPECT_EQ(message->type, type);
    if (fds != nullptr) *fds = std::move(received->fds);
    return *std::move(message);
  }
  bool ReceivesNothingFor(milliseconds time) {
    return HasReason(ReceiveMessage(socket_.get(), time).status(), Reason::kDeadlineExceeded);
  }

  // Answers hello with no entries.
  void WelcomeToNothing() {
    Expect(Type::kHello);
    SendWelcomeToNothing();
  }
  void SendWelcomeToNothing() {
    const UniqueFd listening = MakeMemfd("the listening socket");
    Send({.type = Type::kWelcome, .number = 0}, {listening.get()});
    Send({.type = Type::kEndOfEntries});
  }

 private:
  UniqueFd socket_;
  UniqueFd client_socket_;
};

KeeperClientOptions Impatient() {
  KeeperClientOptions options;
  options.timeout = milliseconds(200);
  return options;
}

// A client that has been welcomed.
std::unique_ptr<KeeperClient> Connect(ScriptedKeeper* keeper, KeeperClientOptions options = {}) {
  auto connecting =
      std::async(std::launch::async, [&] { return KeeperClient::FromFd(keeper->TakeClientSocket(), options); });
  keeper->WelcomeToNothing();
  auto client = connecting.get();
  EXPECT_THAT(client, IsOk());
  return *std::move(client);
}

// Has the client ask for a loader, and starts none, but says so.
KeeperLoader StartLoader(ScriptedKeeper* keeper, KeeperClient* client, pid_t pid, std::optional<int> ends_with = {}) {
  const UniqueFd memfd = MakeMemfd("");
  auto starting = std::async(std::launch::async, [&] { return client->SpawnLoader({}, memfd.get()); });
  const KeeperMessage spawn = keeper->Expect(Type::kSpawnLoader);
  keeper->Send({.type = Type::kSpawned, .request_id = spawn.request_id, .number = pid}, {memfd.get(), memfd.get()});
  if (ends_with.has_value()) keeper->Send({.type = Type::kExited, .number = pid, .status = *ends_with});
  auto loader = starting.get();
  EXPECT_THAT(loader, IsOk());
  return *std::move(loader);
}

TEST(KeeperClient, InheritsTheListeningSocketAndEveryEntryWhole) {
  ScriptedKeeper keeper;
  auto connecting = std::async(std::launch::async, [&] { return KeeperClient::FromFd(keeper.TakeClientSocket(), {}); });
  EXPECT_EQ(keeper.Expect(Type::kHello).version, kKeeperProtocolVersion);
  const UniqueFd listening = MakeMemfd("listening");
  const UniqueFd first = MakeMemfd("first");
  const UniqueFd second = MakeMemfd("second");
  keeper.Send({.type = Type::kWelcome, .number = 2}, {listening.get()});
  keeper.Send({.type = Type::kEntry, .part = 0, .parts = 2, .key = "a", .value = "one "}, {first.get()});
  keeper.Send({.type = Type::kEntry, .part = 1, .parts = 2, .key = "a", .value = "two"}, {second.get()});
  keeper.Send({.type = Type::kEntry, .key = "b"});
  keeper.Send({.type = Type::kEndOfEntries});

  auto client = connecting.get();
  ASSERT_THAT(client, IsOk());
  const KeeperInheritance inheritance = (*client)->TakeInheritance();
  EXPECT_EQ(ContentsOf(inheritance.listening_socket.get()), "listening");
  ASSERT_EQ(inheritance.entries.size(), 2);
  EXPECT_EQ(inheritance.entries[0].key, "a");
  EXPECT_EQ(inheritance.entries[0].value, "one two");
  ASSERT_EQ(inheritance.entries[0].fds.size(), 2);
  EXPECT_EQ(ContentsOf(inheritance.entries[0].fds[0].get()), "first");
  EXPECT_EQ(ContentsOf(inheritance.entries[0].fds[1].get()), "second");
  EXPECT_EQ(inheritance.entries[1].key, "b");
  EXPECT_TRUE((*client)->TakeInheritance().entries.empty());
}

TEST(KeeperClient, FailsWithTheKeepersWordsWhenItIsNotWelcome) {
  ScriptedKeeper keeper;
  auto connecting = std::async(std::launch::async, [&] { return KeeperClient::FromFd(keeper.TakeClientSocket(), {}); });
  keeper.Expect(Type::kHello);
  keeper.Send({.type = Type::kNack, .value = "another broker is connected"});
  EXPECT_THAT(connecting.get(), StatusIs(Reason::kKeeperRefused, HasSubstr("another broker is connected")));
}

TEST(KeeperClient, RefusesAKeeperThatSpeaksAVersionItDoesNotKnow) {
  for (const uint16_t version : {uint16_t{0}, uint16_t{kKeeperProtocolVersion + 1}}) {
    ScriptedKeeper keeper;
    auto connecting =
        std::async(std::launch::async, [&] { return KeeperClient::FromFd(keeper.TakeClientSocket(), {}); });
    keeper.Expect(Type::kHello);
    const UniqueFd listening = MakeMemfd("");
    keeper.Send({.type = Type::kWelcome, .version = version}, {listening.get()});
    EXPECT_THAT(connecting.get(), StatusIs(Reason::kProtocolError, HasSubstr("wants to speak version")));
  }
}

TEST(KeeperClient, RefusesAnInheritanceThatIsShorterThanAnnounced) {
  ScriptedKeeper keeper;
  auto connecting = std::async(std::launch::async, [&] { return KeeperClient::FromFd(keeper.TakeClientSocket(), {}); });
  keeper.Expect(Type::kHello);
  const UniqueFd listening = MakeMemfd("");
  keeper.Send({.type = Type::kWelcome, .number = 2}, {listening.get()});
  keeper.Send({.type = Type::kEntry, .key = "a"});
  keeper.Send({.type = Type::kEndOfEntries});
  EXPECT_THAT(connecting.get(), StatusIs(Reason::kProtocolError, HasSubstr("announced 2 entries and sent 1")));
}

TEST(KeeperClient, GivesUpOnAKeeperThatNeverWelcomesIt) {
  ScriptedKeeper keeper;
  EXPECT_THAT(KeeperClient::FromFd(keeper.TakeClientSocket(), Impatient()), StatusIs(Reason::kDeadlineExceeded));
}

TEST(KeeperClient, SaysWhichPathHasNoKeeper) {
  EXPECT_THAT(KeeperClient::FromPath("/tmp/no_keeper_here", Impatient()),
              StatusIs(Reason::kServiceUnavailable, HasSubstr("/tmp/no_keeper_here")));
  EXPECT_THAT(KeeperClient::FromPath(std::string(108, 'x'), Impatient()), StatusIs(Reason::kSocketPathInvalid));
}

TEST(KeeperClient, ReturnsFromPutOnlyWhenTheKeeperHasAcknowledgedTheLastPart) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  std::vector<UniqueFd> memfds;
  std::vector<int> fds;
  for (int i = 0; i < 300; ++i) {
    memfds.push_back(MakeMemfd(std::to_string(i)));
    fds.push_back(memfds.back().get());
  }
  const std::string value(kMaxKeeperValueBytes + 10, 'v');
  auto putting = std::async(std::launch::async, [&] { return client->Put("shard/1", value, fds); });

  std::vector<UniqueFd> first;
  std::vector<UniqueFd> second;
  const KeeperMessage part0 = keeper.Expect(Type::kPut, &first);
  const KeeperMessage part1 = keeper.Expect(Type::kPut, &second);
  EXPECT_EQ(part0.key, "shard/1");
  EXPECT_EQ(part0.value + part1.value, value);
  EXPECT_EQ(part1.part, 1);
  EXPECT_EQ(part1.parts, 2);
  ASSERT_EQ(first.size(), 250);
  ASSERT_EQ(second.size(), 50);
  EXPECT_EQ(ContentsOf(second[49].get()), "299");
  EXPECT_EQ(putting.wait_for(milliseconds(50)), std::future_status::timeout);
  keeper.Send({.type = Type::kAck, .request_id = part1.request_id});
  EXPECT_THAT(putting.get(), IsOk());
}

TEST(KeeperClient, GivesEachOfManyCallersItsOwnAnswer) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  auto dropping = std::async(std::launch::async, [&] { return client->Drop("a"); });
  const KeeperMessage drop = keeper.Expect(Type::kDrop);
  auto putting = std::async(std::launch::async, [&] { return client->Put("b", "", {}); });
  const KeeperMessage put = keeper.Expect(Type::kPut);
  keeper.Send({.type = Type::kNack, .request_id = put.request_id, .value = "the keeper is full"});
  EXPECT_THAT(putting.get(), StatusIs(Reason::kKeeperRefused, HasSubstr("the keeper is full")));
  EXPECT_EQ(dropping.wait_for(milliseconds(20)), std::future_status::timeout);
  keeper.Send({.type = Type::kAck, .request_id = drop.request_id});
  EXPECT_THAT(dropping.get(), IsOk());
}

TEST(KeeperClient, RefusesAnEntryThatCouldNotBeSentBeforeAnyOfItIs) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  EXPECT_THAT(client->Put("", "value", {}), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(client->Put(std::string(201, 'k'), "value", {}), StatusIs(Reason::kInvalidArgument));
  EXPECT_TRUE(keeper.ReceivesNothingFor(milliseconds(20)));
}

TEST(KeeperClient, StartsALoaderWithItsArgumentsAndRequest) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  const UniqueFd request = MakeMemfd("the request");
  auto starting = std::async(std::launch::async, [&] {
    return client->SpawnLoader({"--verbose", "", "--name=a b"}, request.get());
  });
  std::vector<UniqueFd> fds;
  const KeeperMessage spawn = keeper.Expect(Type::kSpawnLoader, &fds);
  EXPECT_EQ(spawn.value, std::string("--verbose\0\0--name=a b\0", 22));
  ASSERT_EQ(fds.size(), 1);
  EXPECT_EQ(ContentsOf(fds[0].get()), "the request");
  const UniqueFd control = MakeMemfd("control");
  const UniqueFd pidfd = MakeMemfd("pidfd");
  keeper.Send({.type = Type::kSpawned, .request_id = spawn.request_id, .number = 4711}, {control.get(), pidfd.get()});
  const auto loader = starting.get();
  ASSERT_THAT(loader, IsOk());
  EXPECT_EQ(loader->pid, 4711);
  EXPECT_EQ(ContentsOf(loader->control_socket.get()), "control");
  EXPECT_EQ(ContentsOf(loader->pidfd.get()), "pidfd");
}

TEST(KeeperClient, RefusesALoaderArgumentThatWouldBecomeTwo) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  const UniqueFd request = MakeMemfd("");
  EXPECT_THAT(client->SpawnLoader({std::string("a\0b", 3)}, request.get()), StatusIs(Reason::kInvalidArgument));
}

TEST(KeeperClient, TellsHowALoaderEnded) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  const KeeperLoader first = StartLoader(&keeper, client.get(), 4711);
  const KeeperLoader second = StartLoader(&keeper, client.get(), 4712, 3 << 8);
  EXPECT_EQ(second.end->Wait(kPatience), 3 << 8);
  EXPECT_EQ(first.end->Wait(milliseconds(0)), std::nullopt);
  keeper.Send({.type = Type::kExited, .number = 4711, .status = 9});
  EXPECT_EQ(first.end->Wait(kPatience), 9);
  EXPECT_EQ(first.end->Wait(milliseconds(0)), 9);
}

TEST(KeeperClient, WaitsForNoNewsOfALoaderOnceTheKeeperHasGone) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  const KeeperLoader loader = StartLoader(&keeper, client.get(), 4711);
  keeper.Close();
  EXPECT_EQ(loader.end->Wait(std::chrono::hours(1)), std::nullopt);
}

TEST(KeeperClient, TakesNoNewsOfOneLoaderForThatOfTheNextWithItsNumber) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  const KeeperLoader first = StartLoader(&keeper, client.get(), 4711, 9);
  const KeeperLoader second = StartLoader(&keeper, client.get(), 4711);
  EXPECT_EQ(first.end->Wait(kPatience), 9);
  EXPECT_EQ(second.end->Wait(milliseconds(20)), std::nullopt);
  keeper.Send({.type = Type::kExited, .number = 4711, .status = 3 << 8});
  EXPECT_EQ(second.end->Wait(kPatience), 3 << 8);
  EXPECT_EQ(first.end->Wait(milliseconds(0)), 9);
}

TEST(KeeperClient, ForgetsALoaderWhoseStartNobodyWaitedFor) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper, Impatient());
  const UniqueFd memfd = MakeMemfd("");
  EXPECT_THAT(client->SpawnLoader({}, memfd.get()), StatusIs(Reason::kDeadlineExceeded));
  const KeeperMessage late = keeper.Expect(Type::kSpawnLoader);
  keeper.Send({.type = Type::kSpawned, .request_id = late.request_id, .number = 4711}, {memfd.get(), memfd.get()});
  keeper.Send({.type = Type::kExited, .number = 4711, .status = 9});
  const KeeperLoader next = StartLoader(&keeper, client.get(), 4711);
  EXPECT_EQ(next.end->Wait(milliseconds(20)), std::nullopt);
}

TEST(KeeperClient, SaysWhichEntryItTakesUpAndWaitsForNoAnswer) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper);
  EXPECT_THAT(client->TakingUp("shard/a"), IsOk());
  EXPECT_THAT(client->TakingUp(""), IsOk());
  EXPECT_EQ(keeper.Expect(Type::kTakingUp).key, "shard/a");
  EXPECT_EQ(keeper.Expect(Type::kTakingUp).key, "");
}

TEST(KeeperClient, InheritsHowManyEntriesBrokersHaveDiedOf) {
  ScriptedKeeper keeper;
  auto connecting = std::async(std::launch::async, [&] { return KeeperClient::FromFd(keeper.TakeClientSocket(), {}); });
  keeper.Expect(Type::kHello);
  const UniqueFd listening = MakeMemfd("");
  keeper.Send({.type = Type::kWelcome, .number = 0, .status = 2}, {listening.get()});
  keeper.Send({.type = Type::kEndOfEntries});
  auto client = connecting.get();
  ASSERT_THAT(client, IsOk());
  EXPECT_EQ((*client)->TakeInheritance().dropped_entries, 2);
}

TEST(KeeperClient, AnswersAPingOnlyWhileTheBrokerIsWell) {
  ScriptedKeeper keeper;
  std::atomic<bool> well = true;
  KeeperClientOptions options;
  options.alive = [&] { return well.load(); };
  auto client = Connect(&keeper, options);
  keeper.Send({.type = Type::kPing, .request_id = 41});
  EXPECT_EQ(keeper.Expect(Type::kPong).request_id, 41);
  well = false;
  keeper.Send({.type = Type::kPing, .request_id = 42});
  EXPECT_TRUE(keeper.ReceivesNothingFor(milliseconds(50)));
}

TEST(KeeperClient, AnswersAPingOnceTheBrokerIsWellAgain) {
  ScriptedKeeper keeper;
  std::atomic<int> questions = 0;
  KeeperClientOptions options;
  options.alive = [&] { return ++questions > 3; };
  auto client = Connect(&keeper, options);
  keeper.Send({.type = Type::kPing, .request_id = 42});
  EXPECT_EQ(keeper.Expect(Type::kPong).request_id, 42);
  EXPECT_EQ(questions, 4);
}

TEST(KeeperClient, AnswersTheLastPingThatHasComeBeforeTheBrokerIsWellAgain) {
  ScriptedKeeper keeper;
  std::atomic<bool> well = false;
  std::atomic<int> questions = 0;
  KeeperClientOptions options;
  options.alive = [&] { return ++questions > 0 && well; };
  auto client = Connect(&keeper, options);
  keeper.Send({.type = Type::kPing, .request_id = 42});
  while (questions == 0) std::this_thread::yield();
  keeper.Send({.type = Type::kPing, .request_id = 43});
  StartLoader(&keeper, client.get(), 1);  // by its answer the ping has been read, too
  well = true;
  EXPECT_EQ(keeper.Expect(Type::kPong).request_id, 43);
  EXPECT_TRUE(keeper.ReceivesNothingFor(milliseconds(50)));
}

TEST(KeeperClient, EndsWhileTheBrokerIsNotWell) {
  ScriptedKeeper keeper;
  std::promise<void> asked;
  std::atomic<int> questions = 0;
  KeeperClientOptions options;
  options.alive = [&] {
    if (++questions == 1) asked.set_value();
    return false;
  };
  auto client = Connect(&keeper, options);
  keeper.Send({.type = Type::kPing, .request_id = 42});
  asked.get_future().wait();
  client.reset();
}

TEST(KeeperClient, StillHearsTheKeeperWhileTheQuestionWhetherItIsAliveHangs) {
  ScriptedKeeper keeper;
  std::promise<void> release;
  KeeperClientOptions options;
  options.alive = [released = release.get_future().share()] {
    released.wait();
    return true;
  };
  auto client = Connect(&keeper, options);
  keeper.Send({.type = Type::kPing, .request_id = 1});
  auto dropping = std::async(std::launch::async, [&] { return client->Drop("a"); });
  keeper.Send({.type = Type::kAck, .request_id = keeper.Expect(Type::kDrop).request_id});
  EXPECT_THAT(dropping.get(), IsOk());
  release.set_value();
  keeper.Expect(Type::kPong);
}

TEST(KeeperClient, FailsEveryCallOnceTheKeeperHasGoneAndSaysSoOnce) {
  ScriptedKeeper keeper;
  std::atomic<int> notices = 0;
  std::promise<void> disconnected;
  KeeperClientOptions options;
  options.on_disconnected = [&] {
    if (++notices == 1) disconnected.set_value();
  };
  auto client = Connect(&keeper, options);
  auto dropping = std::async(std::launch::async, [&] { return client->Drop("a"); });
  keeper.Expect(Type::kDrop);
  keeper.Close();
  EXPECT_THAT(dropping.get(), StatusIs(Reason::kServiceUnavailable));
  disconnected.get_future().wait();
  EXPECT_THAT(client->Put("a", "", {}), StatusIs(Reason::kServiceUnavailable));
  EXPECT_THAT(client->Ready(), StatusIs(Reason::kServiceUnavailable));
  client.reset();
  EXPECT_EQ(notices, 1);
}

TEST(KeeperClient, SaysNothingWhenItDisconnectsItself) {
  ScriptedKeeper keeper;
  std::atomic<int> notices = 0;
  KeeperClientOptions options;
  options.on_disconnected = [&] { ++notices; };
  Connect(&keeper, options).reset();
  EXPECT_EQ(notices, 0);
}

TEST(KeeperClient, DisconnectsFromAKeeperThatSendsGarbage) {
  ScriptedKeeper keeper;
  std::promise<void> disconnected;
  KeeperClientOptions options;
  options.on_disconnected = [&] { disconnected.set_value(); };
  auto client = Connect(&keeper, options);
  keeper.SendRaw("garbage");
  disconnected.get_future().wait();
  EXPECT_THAT(client->Drop("a"), StatusIs(Reason::kServiceUnavailable));
}

TEST(KeeperClient, GivesUpACallThatIsNotAnsweredInTimeAndIgnoresTheLateAnswer) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper, Impatient());
  EXPECT_THAT(client->Drop("a"), StatusIs(Reason::kDeadlineExceeded, HasSubstr("drop")));
  const KeeperMessage late = keeper.Expect(Type::kDrop);
  keeper.Send({.type = Type::kAck, .request_id = late.request_id});
  auto dropping = std::async(std::launch::async, [&] { return client->Drop("b"); });
  keeper.Send({.type = Type::kAck, .request_id = keeper.Expect(Type::kDrop).request_id});
  EXPECT_THAT(dropping.get(), IsOk());
}

TEST(KeeperClient, GivesUpOnAKeeperThatDoesNotRead) {
  ScriptedKeeper keeper;
  auto client = Connect(&keeper, Impatient());
  const std::string value(1024 * 1024, 'v');  // more than the socket holds
  EXPECT_THAT(client->Put("a", value, {}), StatusIs(Reason::kDeadlineExceeded));
  // The keeper was left in the middle of an entry.
  EXPECT_THAT(client->Drop("b"), StatusIs(Reason::kServiceUnavailable));
}

TEST(KeeperClient, SaysSoWhenThereIsNoThreadForIt) {
  ScriptedKeeper keeper;
  const testing::NoMoreThreads no_more_threads;
  auto connecting =
      std::async(std::launch::deferred, [&] { return KeeperClient::FromFd(keeper.TakeClientSocket(), {}); });
  keeper.SendWelcomeToNothing();
  EXPECT_THAT(connecting.get(), StatusIs(Reason::kSystemError, HasSubstr("cannot start a thread")));
}

TEST(KeeperClient, LeavesNoDescriptorBehind) {
  const int before = CountOpenFds();
  for (int round = 0; round < 20; ++round) {
    ScriptedKeeper keeper;
    auto client = Connect(&keeper);
  }
  EXPECT_EQ(CountOpenFds(), before);
}

}  // namespace
}  // namespace weightbroker
