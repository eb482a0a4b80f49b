// The weights outlive the broker, however it ends.

#include "tests/integration/survival/survival.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kLargeBytes = int64_t{256} << 20;

void WriteSmallModel(const Service& service) {
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Tensor("v", "F32", {1024}).Write(service.NewModel("small"));
}

// Attaches, over as many brokers as it takes.
Result<MappedWeights> AttachInTheEnd(const Service& service, const std::string& model) {
  auto weights = service.Attach(model);
  Eventually([&] {
    if (!weights.ok()) weights = service.Attach(model);
    return weights.ok();
  });
  return weights;
}

// Has the model loaded, over as many brokers as it takes.
absl::StatusOr<v1::WeightSet> RegisterInTheEnd(const Service& service, const std::string& model) {
  auto set = service.Register(model);
  Eventually([&] {
    if (!set.ok()) set = service.Register(model);
    return set.ok();
  });
  return set;
}

class SurvivalTest : public ::testing::Test {
 protected:
  SurvivalTest() { WriteSmallModel(service_); }

  const Service service_;
};

// ---- SIGKILL of the broker.

TEST_F(SurvivalTest, AKilledBrokersSuccessorServesTheSameSet) {
  const auto before = service_.Register("small");
  ASSERT_THAT(before, IsOk());
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(KillBroker(service_, SIGKILL));
    const auto weights = AttachInTheEnd(service_, "small");
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    EXPECT_EQ(weights->fingerprint(), before->fingerprint());
    EXPECT_EQ(weights->generation(), 1);
    EXPECT_TRUE(weights->Verify().ok());
  }
  const auto health = service_.Health();
  ASSERT_THAT(health, IsOk());
  ASSERT_THAT(health->weight_sets(), SizeIs(1));
  const v1::WeightSet& after = health->weight_sets(0);
  EXPECT_EQ(after.register_time().SerializeAsString(), before->register_time().SerializeAsString());
  EXPECT_EQ(after.resident_time().SerializeAsString(), before->resident_time().SerializeAsString());
  EXPECT_EQ(after.load_seconds(), before->load_seconds());
  EXPECT_EQ(after.read_bytes(), before->read_bytes());
  EXPECT_TRUE(after.has_adopt_time());
  EXPECT_EQ(health->reserved_bytes(), before->shards(0).size_bytes());
}

TEST_F(SurvivalTest, ASuccessorOpensNoFileOfTheModel) {
  ASSERT_THAT(service_.Register("small"), IsOk());
  OpenWatch watch(service_.ModelFolder("small"));
  ASSERT_TRUE(service_.Attach("small").ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(KillBroker(service_, SIGKILL));
    ASSERT_TRUE(AttachInTheEnd(service_, "small").ok());
    ASSERT_THAT(service_.Register("small"), IsOk());
  }
  EXPECT_THAT(watch.Opened(), IsEmpty());
  // That it would have been seen.
  ReadFile(service_.ModelFolder("small") + "/config.json");
  EXPECT_THAT(watch.Opened(), Contains("config.json"));
}

TEST_F(SurvivalTest, ASuccessorNoticesThatAFileHasChangedMeanwhile) {
  const auto before = service_.Register("small");
  ASSERT_THAT(before, IsOk());
  kill(BrokerOf(service_), SIGKILL);
  CheckpointBuilder().Tensor("w", "BF16", {32, 64}).Write(service_.ModelFolder("small"));
  const auto weights = service_.Attach("small");
  ASSERT_FALSE(weights.ok());
  const auto after = RegisterInTheEnd(service_, "small");
  ASSERT_THAT(after, IsOk());
  EXPECT_NE(after->fingerprint(), before->fingerprint());
  EXPECT_EQ(service_.Health()->weight_sets_size(), 2);
}

TEST_F(SurvivalTest, ASuccessorReleasesWhatItHasAdopted) {
  const int memfds_before = service_.CountMemfds();
  const auto set = service_.Register("small");
  ASSERT_THAT(set, IsOk());
  EXPECT_GT(service_.CountMemfds(), memfds_before);
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  ASSERT_TRUE(WaitForStatus(service_, v1::HealthResponse::STATUS_READY));
  ASSERT_THAT(service_.Unregister(set->fingerprint(), /*force=*/false), IsOk());
  EXPECT_TRUE(Eventually([&] { return service_.CountMemfds() == memfds_before; }));
  EXPECT_EQ(service_.Health()->reserved_bytes(), 0);
  // What was released does not come back, and its generation is not given out again.
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  ASSERT_TRUE(WaitForStatus(service_, v1::HealthResponse::STATUS_IDLE));
  const auto again = RegisterInTheEnd(service_, "small");
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->generation(), 2);
}

TEST_F(SurvivalTest, ALoadUnderWayIsFinishedByTheNextBroker) {
  WriteLargeModel(service_.NewModel("large"), kLargeBytes);
  std::thread caller([&] { (void)service_.Register("large"); });  // fails with its broker
  ASSERT_TRUE(Eventually([&] { return !service_.Loaders().empty(); }));
  const pid_t loader = service_.Loaders().front();
  kill(loader, SIGSTOP);  // so that it is caught in the middle
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  caller.join();
  ASSERT_TRUE(WaitForStatus(service_, v1::HealthResponse::STATUS_READY));
  EXPECT_FALSE(std::filesystem::exists("/proc/" + std::to_string(loader)));
  const auto weights = AttachInTheEnd(service_, "large");
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->generation(), 1);
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_THAT(service_.Loaders(), IsEmpty());
}

TEST_F(SurvivalTest, ACallerJoinsTheLoadThatTheNextBrokerHasStartedAgain) {
  WriteLargeModel(service_.NewModel("large"), kLargeBytes);
  std::thread caller([&] { EXPECT_THAT(RegisterInTheEnd(service_, "large"), IsOk()); });
  ASSERT_TRUE(Eventually([&] { return !service_.Loaders().empty(); }));
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  caller.join();
  EXPECT_EQ(service_.Health()->weight_sets_size(), 1);
  EXPECT_EQ(service_.Health()->weight_sets(0).generation(), 1);
}

// ---- Other ends.

TEST(Survival, ABrokerThatHangsIsReplacedByOneWithTheSameSet) {
  const Service service({"--broker_ping_interval=50ms", "--broker_ping_timeout=300ms"});
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  const auto held = service.Attach("small");
  ASSERT_TRUE(held.ok());
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(KillBroker(service, SIGSTOP));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 5) << "0.35 s is the promise; the margin is for a busy machine";
  EXPECT_TRUE(held->Verify().ok());
  const auto weights = AttachInTheEnd(service, "small");
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(weights->generation(), 1);
}

TEST_F(SurvivalTest, ABrokerThatIsAskedToEndLeavesEverythingToTheNextOne) {
  ASSERT_THAT(service_.Register("small"), IsOk());
  const auto held = service_.Attach("small");
  ASSERT_TRUE(held.ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(KillBroker(service_, SIGTERM));
    const auto weights = AttachInTheEnd(service_, "small");
    ASSERT_TRUE(weights.ok());
    EXPECT_EQ(weights->generation(), 1);
  }
  EXPECT_TRUE(held->Verify().ok());
}

TEST(Survival, ABrokerIsReplacedByTheProgramThatLiesAtItsPathNow) {
  const InstalledBroker installed;
  const Service service({"--broker_path=" + installed.path()});
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  const auto held = service.Attach("small");
  ASSERT_TRUE(held.ok());
  for (int i = 0; i < 3; ++i) {
    installed.InstallAnew();
    ASSERT_TRUE(KillBroker(service, SIGTERM));
    const auto weights = AttachInTheEnd(service, "small");
    ASSERT_TRUE(weights.ok());
    EXPECT_EQ(weights->generation(), 1);
    const std::string program = "/proc/" + std::to_string(BrokerOf(service)) + "/exe";
    EXPECT_TRUE(std::filesystem::equivalent(program, installed.path())) << "the old program was started again";
  }
  EXPECT_TRUE(held->Verify().ok());
}

TEST_F(SurvivalTest, TheServiceEndsCleanlyWithASetThatIsHeld) {
  ASSERT_THAT(service_.Register("small"), IsOk());
  Program engine("engine", service_.EngineFlags("small", {"--hold_seconds", "600"}));
  ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors();
  const std::vector<pid_t> family = service_.Processes();
  Program& keeper = const_cast<Service&>(service_).program();
  keeper.Kill(SIGTERM);
  EXPECT_EQ(keeper.Wait().code, 0);
  for (const pid_t pid : family) EXPECT_FALSE(std::filesystem::exists("/proc/" + std::to_string(pid)));
  EXPECT_FALSE(std::filesystem::exists(service_.socket()));
  EXPECT_TRUE(engine.IsRunning());
}

TEST_F(SurvivalTest, ABrokerThatHasLostItsKeeperEndsAndEnginesGoOn) {
  ASSERT_THAT(service_.Register("small"), IsOk());
  const auto held = service_.Attach("small");
  ASSERT_TRUE(held.ok());
  const pid_t broker = BrokerOf(service_);
  Program& keeper = const_cast<Service&>(service_).program();
  keeper.Kill(SIGKILL);
  keeper.Wait();
  EXPECT_TRUE(Eventually([&] {
    std::error_code error;
    return !std::filesystem::exists("/proc/" + std::to_string(broker) + "/exe", error);
  }));
  EXPECT_THAT(keeper.Errors(), HasSubstr("the keeper has gone"));
  EXPECT_TRUE(held->Verify().ok());
}

TEST(Survival, ASetThatBrokerAfterBrokerDiesOfIsDroppedAndCanBeLoadedAnew) {
  setenv("WEIGHTBROKER_TEST_CRASH_AT", "kept_entry:shard/", 1);
  Service service;
  unsetenv("WEIGHTBROKER_TEST_CRASH_AT");
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  const auto held = service.Attach("small");
  ASSERT_TRUE(held.ok());
  // Until then the next broker would begin the load again.
  ASSERT_TRUE(Eventually(
      [&] { return service.program().Errors().find("event=entry.dropped key=load/") != std::string::npos; }));
  ASSERT_TRUE(KillBroker(service, SIGKILL));
  ASSERT_TRUE(WaitForStatus(service, v1::HealthResponse::STATUS_IDLE)) << service.program().Errors();
  EXPECT_THAT(service.program().Errors(), HasSubstr("event=entry.poisoned"));
  EXPECT_TRUE(held->Verify().ok());
  const auto again = RegisterInTheEnd(service, "small");
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->generation(), 2);
}

// ---- Two units: --keeper_socket.

TEST(Survival, ABrokerThatSomebodyElseStartsAdoptsOverThePrivateSocket) {
  const TemporaryFolder folder;
  const std::string keeper_socket = folder / "keeper.sock";
  const std::vector<std::string> common = {
      "--socket", folder / "s.sock", "--model_roots", "models=" + (folder / "models"), "--metrics_address",
      "",         "--keeper_socket", keeper_socket};
  std::filesystem::create_directories(folder / "models/small");
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(folder / "models/small");
  std::vector<std::string> keeper_flags = common;
  keeper_flags.push_back("--no_broker");
  Program keeper("weightbrokerd", keeper_flags);
  const std::vector<std::string> attach = {"--socket", folder / "s.sock", "--model", "models:small", "--torch_version",
                                           "any",      "--json"};
  {
    Program broker("weightbroker-broker", common);
    ASSERT_TRUE(Eventually([&] { return broker.Errors().find("broker.ready") != std::string::npos; }));
    const Finished registered = RunProgram(
        "weightbroker", {"register", "--socket", folder / "s.sock", "models:small", "--torch_version", "any"});
    ASSERT_EQ(registered.exit.code, 0) << registered.errors;
    broker.Kill(SIGKILL);
    broker.Wait();
  }
  Program broker("weightbroker-broker", common);
  const Finished engine = RunProgram("stub_engine", attach);
  EXPECT_EQ(engine.exit.code, 0) << engine.errors;
  EXPECT_EQ(engine.json["generation"], 1);
  EXPECT_THAT(broker.Errors(), HasSubstr("weights.adopted"));
  broker.Kill(SIGTERM);
  EXPECT_EQ(broker.Wait().code, 0);
  keeper.Kill(SIGTERM);
  EXPECT_EQ(keeper.Wait().code, 0);
}

}  // namespace
}  // namespace weightbroker::testing
