// A real keeper with brokers that are killed, hang, misbehave and ask for loaders.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/integration/keeper/harness.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using testing::ConnectTo;
using testing::Eventually;
using testing::FakeBrokerHandle;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsRunning;
using testing::KeeperHarness;
using ::testing::SizeIs;

class KeeperProcessTest : public ::testing::Test {
 protected:
  // A broker that is ready with what it inherited.
  FakeBrokerHandle NextBrokerWith(const std::string& inherited) {
    FakeBrokerHandle broker = harness_.NextBroker();
    EXPECT_EQ(broker.greeting(), "ready " + inherited);
    return broker;
  }

  KeeperHarness harness_;
};

TEST_F(KeeperProcessTest, GivesEveryEntryToTheBrokerAfterOneThatWasKilled) {
  harness_.StartKeeper({});
  FakeBrokerHandle first = NextBrokerWith("");
  EXPECT_EQ(first.Ask("put shard/a record 3"), "ok");
  EXPECT_EQ(first.Ask("put shard/b other 1"), "ok");
  EXPECT_EQ(first.Ask("put shard/a newer 2"), "ok");
  EXPECT_EQ(first.Ask("put shard/c gone 2"), "ok");
  EXPECT_EQ(first.Ask("drop shard/c"), "ok");
  EXPECT_EQ(first.Ask("drop never/there"), "ok");
  first.Kill();
  NextBrokerWith("shard/a=newer:2 shard/b=other:1");
  EXPECT_EQ(harness_.StopKeeper(), 0);
}

TEST_F(KeeperProcessTest, KeepsMoreDescriptorsThanFitIntoOnePacket) {
  harness_.StartKeeper({});
  FakeBrokerHandle first = NextBrokerWith("");
  EXPECT_EQ(first.Ask("put many value 300"), "ok");
  first.Kill();
  NextBrokerWith("many=value:300");
}

TEST_F(KeeperProcessTest, KeepsTheOldEntryAndNoDescriptorOfAHalfOne) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("put a old 1"), "ok");
  broker.Kill();
  broker = NextBrokerWith("a=old:1");
  const int fds = harness_.KeeperFds();
  EXPECT_EQ(broker.Ask("half a"), "ok");
  EXPECT_TRUE(Eventually([&] { return harness_.KeeperFds() == fds + 1; }));
  broker.Kill();
  broker = NextBrokerWith("a=old:1");
  EXPECT_EQ(harness_.KeeperFds(), fds);
  EXPECT_EQ(broker.Ask("put a new 1"), "ok");
}

TEST_F(KeeperProcessTest, LetsConnectsQueueWhileNoBrokerRuns) {
  harness_.StartKeeper({});
  FakeBrokerHandle first = NextBrokerWith("");
  first.Stop();
  const UniqueFd client = ConnectTo(harness_.socket(), SOCK_STREAM);
  ASSERT_TRUE(client.valid());
  first.Kill();
  FakeBrokerHandle second = NextBrokerWith("");
  EXPECT_EQ(second.Ask("accept"), "ok");
  char name[32] = {};
  EXPECT_GT(recv(client.get(), name, sizeof(name), 0), 0);
  EXPECT_EQ(std::stoi(name), second.pid());
}

TEST_F(KeeperProcessTest, LeavesNoDescriptorZombieOrMemoryBehindAfterAThousandRestarts) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("put shard value 8"), "ok");
  const int fds = harness_.KeeperFds();
  std::vector<double> restart_ms;
  for (int restart = 0; restart < 1'000; ++restart) {
    const auto killed = std::chrono::steady_clock::now();
    broker.Kill();
    broker = NextBrokerWith("shard=value:8");
    restart_ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - killed).count());
    if (HasFailure()) return;
  }
  std::sort(restart_ms.begin(), restart_ms.end());
  RecordProperty("restart_p50_ms", std::to_string(restart_ms[500]));
  RecordProperty("restart_max_ms", std::to_string(restart_ms.back()));
  RecordProperty("rss_kib", std::to_string(harness_.KeeperStatus("VmRSS")));
  printf("SIGKILL to ready again: p50 %.1f ms, max %.1f ms; keeper VmRSS %lld KiB\n", restart_ms[500],
         restart_ms.back(), static_cast<long long>(harness_.KeeperStatus("VmRSS")));
  EXPECT_EQ(harness_.KeeperFds(), fds);
  EXPECT_THAT(harness_.KeeperChildren(), SizeIs(1));
  EXPECT_EQ(harness_.KeeperStatus("Threads"), 1);
#ifndef WEIGHTBROKER_SANITIZED
  EXPECT_LE(harness_.KeeperStatus("VmRSS"), 4 * 1024);
#endif
}

TEST_F(KeeperProcessTest, GoesOnThoughNobodyReadsItsLog) {
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  const UniqueFd read_end(fds[0]);
  UniqueFd write_end(fds[1]);
  ASSERT_GT(fcntl(write_end.get(), F_SETPIPE_SZ, 4096), 0);
  harness_.StartKeeper({}, "", WEIGHTBROKER_BIN_DIR "/weightbrokerd", write_end.get());
  write_end.reset();
  FakeBrokerHandle broker = NextBrokerWith("");
  for (int restart = 0; restart < 30; ++restart) {  // some 300 bytes each
    broker.Kill();
    broker = NextBrokerWith("");
  }
  EXPECT_EQ(harness_.StopKeeper(), 0);
}

// A program that is weightbrokerd with a limit of open files.
std::string WithOpenFiles(const KeeperHarness& harness, int limit) {
  const std::string path = harness.Path("limited");
  std::ofstream(path) << "#!/bin/sh\nulimit -n " << limit << "\nexec " WEIGHTBROKER_BIN_DIR "/weightbrokerd \"$@\"\n";
  EXPECT_EQ(chmod(path.c_str(), 0755), 0);
  return path;
}

TEST_F(KeeperProcessTest, ServesWithFewOpenFilesAndSaysHowMuchItCanKeepThen) {
  harness_.StartKeeper({}, "", WithOpenFiles(harness_, 256));
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_THAT(broker.Ask("spawn --exit=0"), HasSubstr("--request_fd=3"));
  EXPECT_EQ(broker.Ask("put some value 100"), "ok");
  EXPECT_THAT(broker.Ask("put more value 100"), HasSubstr("would hold 200 file descriptors; its limit is 128"));
  broker.Kill();
  NextBrokerWith("some=value:100");
}

TEST_F(KeeperProcessTest, SaysThatTooFewOpenFilesAreAllowed) {
  harness_.StartKeeper({}, "", WithOpenFiles(harness_, 100));
  EXPECT_EQ(harness_.keeper().Wait(testing::kPatience)->code, 1);
  EXPECT_THAT(harness_.Log(),
              HasSubstr("may have 100 open files (RLIMIT_NOFILE, hard) and needs at least 128: raise it"));
}

TEST_F(KeeperProcessTest, KillsAndReplacesABrokerThatHangs) {
  harness_.StartKeeper({"--broker_ping_interval=50ms", "--broker_ping_timeout=200ms"});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  broker.Stop();
  NextBrokerWith("a=value:1");
  EXPECT_TRUE(broker.WaitUntilGone());
  EXPECT_THAT(harness_.Log(), HasSubstr("it has not answered a ping for"));
}

TEST_F(KeeperProcessTest, KillsAndReplacesABrokerThatSaysItIsNotWell) {
  harness_.StartKeeper({"--broker_ping_interval=50ms", "--broker_ping_timeout=200ms"});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("sick"), "ok");
  NextBrokerWith("");
  EXPECT_TRUE(broker.WaitUntilGone());
}

TEST_F(KeeperProcessTest, LetsABrokerLiveThatIsWellAgainInTime) {
  harness_.StartKeeper({"--broker_ping_interval=20ms", "--broker_ping_timeout=15s"});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("sick"), "ok");
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.ping_not_answered"));
  EXPECT_EQ(broker.Ask("well"), "ok");
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.ping_answered_late"));
  EXPECT_TRUE(IsRunning(broker.pid()));
  EXPECT_EQ(harness_.CountInLog("event=broker.killed"), 0);
}

TEST_F(KeeperProcessTest, LetsABrokerLiveThatAnswers) {
  harness_.StartKeeper({"--broker_ping_interval=20ms", "--broker_ping_timeout=200ms"});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_TRUE(harness_.NoBrokerWithin(milliseconds(600)));
  EXPECT_TRUE(IsRunning(broker.pid()));
}

TEST_F(KeeperProcessTest, DoesNotTakeItsOwnSleepForTheBrokers) {
  harness_.StartKeeper({"--broker_ping_interval=20ms", "--broker_ping_timeout=200ms"});
  FakeBrokerHandle broker = NextBrokerWith("");
  kill(harness_.keeper_pid(), SIGSTOP);
  std::this_thread::sleep_for(milliseconds(500));
  kill(harness_.keeper_pid(), SIGCONT);
  EXPECT_TRUE(harness_.NoBrokerWithin(milliseconds(300)));
}

TEST_F(KeeperProcessTest, KillsABrokerThatDoesNotBecomeReady) {
  harness_.StartKeeper({"--broker_start_timeout=200ms"}, "--unready");
  const FakeBrokerHandle first = harness_.NextBroker();
  EXPECT_EQ(first.greeting(), "unready ");
  const FakeBrokerHandle second = harness_.NextBroker();
  EXPECT_TRUE(first.WaitUntilGone());
  EXPECT_THAT(harness_.Log(), HasSubstr("it was not ready after"));
}

TEST_F(KeeperProcessTest, KillsABrokerThatNeverSaysHello) {
  harness_.StartKeeper({"--broker_start_timeout=200ms"}, "--mute");
  const FakeBrokerHandle first = harness_.NextBroker();
  harness_.NextBroker();
  EXPECT_TRUE(first.WaitUntilGone());
}

TEST_F(KeeperProcessTest, WaitsLongerEachTimeABrokerDiesBeforeItIsReady) {
  harness_.StartKeeper({}, "--exit=5");
  EXPECT_TRUE(harness_.WaitForLog("restart_ms=160"));
  EXPECT_THAT(harness_.Log(), HasSubstr("how=\"exit code 5\" restart_ms=20"));
  EXPECT_THAT(harness_.Log(), HasSubstr("restart_ms=80"));
  EXPECT_EQ(harness_.StopKeeper(), 0);
}

TEST_F(KeeperProcessTest, EndsWithABrokerThatSaysFromTheStartThatItCannotServe) {
  for (const int code : {1, 2}) {
    harness_.StartKeeper({}, "--exit=" + std::to_string(code));
    const auto exit = harness_.keeper().Wait(testing::kPatience);
    ASSERT_TRUE(exit.ok());
    EXPECT_EQ(exit->code, code);
  }
}

TEST_F(KeeperProcessTest, DoesNotEndWithABrokerOnceThereWasAnythingToKeep) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  broker.Tell("quit 2");
  NextBrokerWith("a=value:1");
}

TEST_F(KeeperProcessTest, DropsAnEntryThatBrokerAfterBrokerDiesOfAndNoOther) {
  harness_.StartKeeper({}, "--die_of=b");
  FakeBrokerHandle broker = NextBrokerWith("");
  for (const char* put : {"put a first 1", "put b poison 2", "put c last 1"}) EXPECT_EQ(broker.Ask(put), "ok");
  const int fds = harness_.KeeperFds();
  broker.Kill();
  for (int attempt = 1; attempt <= 5; ++attempt) EXPECT_EQ(harness_.NextBroker().greeting(), "gone");
  broker = NextBrokerWith("a=first:1 c=last:1 dropped:1");
  EXPECT_EQ(harness_.CountInLog("event=entry.poisoned"), 1);
  EXPECT_THAT(harness_.Log(), HasSubstr("key=b"));
  EXPECT_EQ(harness_.KeeperFds(), fds - 2);
  EXPECT_EQ(broker.Ask("put b new 1"), "ok");
  broker.Kill();
  EXPECT_EQ(harness_.NextBroker().greeting(), "gone");
}

TEST_F(KeeperProcessTest, DropsNothingThatABrokerWasNotTakingUp) {
  harness_.StartKeeper({}, "--unready");
  FakeBrokerHandle broker = harness_.NextBroker();
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  for (int attempt = 1; attempt <= 7; ++attempt) {
    broker.Kill();
    broker = harness_.NextBroker();
    EXPECT_EQ(broker.greeting(), "unready a=value:1");
  }
}

TEST_F(KeeperProcessTest, TriesAgainWhenTheBrokersProgramCannotBeStarted) {
  const std::string broker = harness_.Path("broker");
  std::ofstream(broker) << "#!/nonexistent/interpreter\n";
  ASSERT_EQ(chmod(broker.c_str(), 0755), 0);
  harness_.StartKeeper({"--broker_path=" + broker});
  EXPECT_TRUE(harness_.WaitForLog("event=broker.not_started", 3));
  EXPECT_THAT(harness_.Log(), HasSubstr("cannot start " + broker + ": No such file or directory"));
}

TEST_F(KeeperProcessTest, KillsABrokerThatMisusesTheProtocolAndLosesNothing) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  broker.Tell("garbage");
  EXPECT_TRUE(broker.WaitUntilGone());
  EXPECT_THAT(harness_.Log(), HasSubstr("is malformed"));
  broker = NextBrokerWith("a=value:1");
  EXPECT_EQ(broker.Ask("half a"), "ok");
  broker.Tell("drop a");  // between two parts
  EXPECT_TRUE(broker.WaitUntilGone());
  NextBrokerWith("a=value:1");
}

TEST_F(KeeperProcessTest, GoesOnWithABrokerThatSendsATypeOfALaterRelease) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("unknown_type"), "ok");
  EXPECT_EQ(broker.Ask("put a value 1"), "ok");
}

TEST_F(KeeperProcessTest, RefusesABrokerOfAVersionThatItDoesNotSpeak) {
  harness_.StartKeeper({}, "--hello_version=0");
  EXPECT_THAT(harness_.NextBroker().greeting(), HasSubstr("nack: the broker speaks version 0"));
}

TEST_F(KeeperProcessTest, WelcomesABrokerOfALaterVersionInItsOwn) {
  harness_.StartKeeper({}, "--hello_version=9");
  EXPECT_EQ(harness_.NextBroker().greeting(), "welcome: ");
  EXPECT_THAT(harness_.Log(), HasSubstr("event=broker.welcomed broker=1 version=1"));
}

TEST_F(KeeperProcessTest, StartsLoadersTellsTheirEndAndReapsThem) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  const std::string started = broker.Ask("spawn --exit=3 more");
  const std::string pid = started.substr(0, started.find(' '));
  EXPECT_EQ(started, pid + " --request_fd=3 --control_fd=4 --exit=3 more request/0");
  EXPECT_EQ(broker.Ask("exited"), pid + " " + std::to_string(3 << 8));
  EXPECT_THAT(harness_.KeeperChildren(), SizeIs(1));
}

TEST_F(KeeperProcessTest, TellsTheBrokerThatALoaderWasKilled) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  const pid_t loader = std::stoi(broker.Ask("spawn --stubborn"));
  kill(loader, SIGKILL);
  EXPECT_EQ(broker.Ask("exited"), std::to_string(loader) + " 9");
}

TEST_F(KeeperProcessTest, ReapsTheOrphansOfLoaders) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  broker.Ask("spawn --orphan --exit=0");
  EXPECT_TRUE(Eventually([&] { return harness_.KeeperChildren().size() == 1; }));
}

TEST_F(KeeperProcessTest, EndsTheLoadersOfABrokerThatHasEnded) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  const pid_t loader = std::stoi(broker.Ask("spawn --stubborn"));
  broker.Kill();
  NextBrokerWith("");
  EXPECT_TRUE(Eventually([&] { return !IsRunning(loader); }));
  EXPECT_TRUE(Eventually([&] { return harness_.KeeperChildren().size() == 1; }));
}

TEST_F(KeeperProcessTest, LetsADetachedLoaderLiveUntilNobodyHasItsControlSocket) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  const pid_t loader = std::stoi(broker.Ask("spawn"));
  ASSERT_EQ(broker.Ask("detach " + std::to_string(loader) + " exporter"), "ok");
  broker.Kill();
  FakeBrokerHandle next = harness_.NextBroker();
  EXPECT_THAT(next.greeting(), HasSubstr("exporter=exporter"));
  next.Kill();
  FakeBrokerHandle last = harness_.NextBroker();
  EXPECT_TRUE(IsRunning(loader));
  ASSERT_EQ(last.Ask("drop exporter"), "ok");
  EXPECT_TRUE(Eventually([&] { return !IsRunning(loader); }));
}

TEST_F(KeeperProcessTest, DoesNotDetachWhatIsNoLoaderOfTheBroker) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  const std::string loader = std::to_string(std::stoi(broker.Ask("spawn")));
  EXPECT_THAT(broker.Ask("detach 1 exporter"), HasSubstr("process 1 is no loader of this broker"));
  ASSERT_EQ(broker.Ask("detach " + loader + " exporter"), "ok");
  EXPECT_THAT(broker.Ask("detach " + loader + " exporter"), HasSubstr("is no loader of this broker"));
}

TEST_F(KeeperProcessTest, EndsDetachedLoadersToo) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  const pid_t loader = std::stoi(broker.Ask("spawn --stubborn"));
  ASSERT_EQ(broker.Ask("detach " + std::to_string(loader) + " exporter"), "ok");
  kill(harness_.keeper_pid(), SIGTERM);
  EXPECT_TRUE(Eventually([&] { return !IsRunning(loader); }));
}

TEST_F(KeeperProcessTest, DoesNotCountDetachedLoadersAmongThoseThatRun) {
  harness_.StartKeeper({"--max_loaders=1"});
  FakeBrokerHandle broker = NextBrokerWith("");
  const std::string loader = std::to_string(std::stoi(broker.Ask("spawn")));
  ASSERT_EQ(broker.Ask("detach " + loader + " exporter"), "ok");
  EXPECT_THAT(broker.Ask("spawn"), HasSubstr("--request_fd=3"));
}

TEST_F(KeeperProcessTest, SaysWhyALoaderCannotBeStarted) {
  const std::string loader = harness_.Path("loader");
  std::ofstream(loader) << "#!/nonexistent/interpreter\n";
  ASSERT_EQ(chmod(loader.c_str(), 0755), 0);
  harness_.StartKeeper({"--loader_path=" + loader});
  FakeBrokerHandle broker = NextBrokerWith("");
  EXPECT_EQ(broker.Ask("spawn"), "the keeper refused: cannot start " + loader + ": No such file or directory");
}

TEST_F(KeeperProcessTest, LimitsHowManyLoadersRunAtOnce) {
  harness_.StartKeeper({"--max_loaders=2"});
  FakeBrokerHandle broker = NextBrokerWith("");
  broker.Ask("spawn");
  broker.Ask("spawn");
  EXPECT_THAT(broker.Ask("spawn"), HasSubstr("2 loaders are running"));
}

TEST_F(KeeperProcessTest, EndsBrokerAndLoadersOnSigtermAndLeavesNoSocket) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  const pid_t loader = std::stoi(broker.Ask("spawn --stubborn"));
  EXPECT_EQ(harness_.StopKeeper(), 0);
  EXPECT_FALSE(IsRunning(broker.pid()));
  EXPECT_FALSE(IsRunning(loader));
  EXPECT_FALSE(std::filesystem::exists(harness_.socket()));
}

TEST_F(KeeperProcessTest, WaitsForABrokerThatDrainsUntilASecondSigterm) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  broker.Stop();  // SIGTERM stays pending
  kill(harness_.keeper_pid(), SIGTERM);
  EXPECT_TRUE(harness_.WaitForLog("event=keeper.stopping request=1"));
  EXPECT_FALSE(harness_.keeper().Wait(milliseconds(200)).ok());
  kill(harness_.keeper_pid(), SIGTERM);
  const auto exit = harness_.keeper().Wait(testing::kPatience);
  ASSERT_TRUE(exit.ok());
  EXPECT_EQ(exit->code, 0);
  EXPECT_FALSE(IsRunning(broker.pid()));
}

TEST_F(KeeperProcessTest, RefusesASocketThatAnotherKeeperHas) {
  harness_.StartKeeper({});
  NextBrokerWith("");
  auto second =
      Spawn({.path = WEIGHTBROKER_BIN_DIR "/weightbrokerd", .arguments = {"--socket=" + harness_.socket()}, .fds = {}});
  ASSERT_TRUE(second.ok());
  const auto exit = second->Wait(testing::kPatience);
  ASSERT_TRUE(exit.ok());
  EXPECT_EQ(exit->code, 4);
  EXPECT_TRUE(ConnectTo(harness_.socket(), SOCK_STREAM).valid());
}

TEST_F(KeeperProcessTest, EndsItsBrokerWhenItIsInterrupted) {
  for (const int signal : {SIGINT, SIGQUIT}) {
    harness_.StartKeeper({});
    FakeBrokerHandle broker = NextBrokerWith("");
    kill(harness_.keeper_pid(), signal);
    const auto exit = harness_.keeper().Wait(testing::kPatience);
    ASSERT_TRUE(exit.ok());
    EXPECT_EQ(exit->code, 0);
    EXPECT_FALSE(IsRunning(broker.pid()));
  }
}

// The fake broker has no use for the signal, and dies of it.
TEST_F(KeeperProcessTest, PassesAReloadOnToItsBrokerAndGoesOn) {
  harness_.StartKeeper({});
  const FakeBrokerHandle broker = NextBrokerWith("");
  kill(harness_.keeper_pid(), SIGHUP);
  EXPECT_TRUE(broker.WaitUntilGone());
  NextBrokerWith("");
  EXPECT_THAT(harness_.Log(), HasSubstr("killed by SIGHUP"));
  EXPECT_EQ(harness_.StopKeeper(), 0);
}

TEST_F(KeeperProcessTest, KeepsAReloadForABrokerThatIsNotReadyUntilItIs) {
  harness_.StartKeeper({}, "--unready");
  FakeBrokerHandle broker = harness_.NextBroker();
  kill(harness_.keeper_pid(), SIGHUP);
  // The keeper looks at its signals between two packets of its broker.
  for (int i = 0; i < 2; ++i) EXPECT_EQ(broker.Ask("put a value 1"), "ok");
  EXPECT_TRUE(IsRunning(broker.pid()));
  broker.Tell("ready");
  EXPECT_TRUE(broker.WaitUntilGone());
  EXPECT_TRUE(harness_.WaitForLog("killed by SIGHUP", 1));
}

TEST_F(KeeperProcessTest, PassesItsOwnFlagsOnAndNoOtherDescriptorThanItsConnection) {
  const std::string broker = harness_.Path("broker");
  std::ofstream(broker) << "#!/bin/sh\nfor a in \"$@\"; do echo \"arg $a\" >&2; done\nls /proc/self/fd >&2\nexit 2\n";
  ASSERT_EQ(chmod(broker.c_str(), 0755), 0);
  harness_.StartKeeper({"--broker_path=" + broker, "--allowed_uids", "1,2"});
  EXPECT_TRUE(harness_.keeper().Wait(testing::kPatience).ok());
  EXPECT_THAT(harness_.Log(), HasSubstr("arg --allowed_uids\narg 1,2\narg --keeper_fd=3\n"));
  EXPECT_THAT(harness_.Log(), HasSubstr("0\n1\n2\n3\n4\n"));  // 4 is the folder that ls reads
  EXPECT_THAT(harness_.Log(), ::testing::Not(HasSubstr("\n5\n")));
}

TEST_F(KeeperProcessTest, ChecksTheConfigurationWithoutTakingTheSocket) {
  harness_.StartKeeper({"--check_config"});
  EXPECT_EQ(harness_.keeper().Wait(testing::kPatience)->code, 0);
  harness_.StartKeeper({"--broker_ping_timeout=soon"});
  EXPECT_EQ(harness_.keeper().Wait(testing::kPatience)->code, 2);
  EXPECT_THAT(harness_.Log(), HasSubstr("--broker_ping_timeout: \"soon\" is not a time"));
  harness_.StartKeeper({"--keeper_fd=3"});
  EXPECT_EQ(harness_.keeper().Wait(testing::kPatience)->code, 2);
  EXPECT_FALSE(std::filesystem::exists(harness_.socket() + ".lock"));
}

TEST_F(KeeperProcessTest, LinksNeitherGrpcNorProtobufNorCuda) {
  const UniqueFd output(open(harness_.Path("ldd").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  auto ldd = Spawn({.path = "/usr/bin/ldd",
                    .arguments = {WEIGHTBROKER_BIN_DIR "/weightbrokerd"},
                    .fds = {{output.get(), STDOUT_FILENO}}});
  ASSERT_TRUE(ldd.ok());
  ASSERT_TRUE(ldd->Wait(testing::kPatience).ok());
  std::ifstream file(harness_.Path("ldd"));
  const std::string libraries{std::istreambuf_iterator<char>(file), {}};
  EXPECT_THAT(libraries, HasSubstr("libc.so"));
  for (const char* library : {"grpc", "protobuf", "cuda"}) EXPECT_THAT(libraries, ::testing::Not(HasSubstr(library)));
}

TEST_F(KeeperProcessTest, LosesItsBrokerTogetherWithItsOwnLife) {
  harness_.StartKeeper({});
  FakeBrokerHandle broker = NextBrokerWith("");
  kill(harness_.keeper_pid(), SIGKILL);
  EXPECT_TRUE(broker.WaitUntilGone());
}

}  // namespace
}  // namespace weightbroker
