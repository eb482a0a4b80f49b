// Loads and their vault: what the next broker would start again, and what it would not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "common/base/error.h"
#include "server/broker/load_manager.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_loader.h"
#include "tests/unit/broker/fake_vault.h"

namespace weightbroker {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using testing::FakeLoader;
using testing::FakeLoaderSpawner;
using testing::FakeVault;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::LoadsWell;
using ::testing::Not;
using testing::Refuses;
using testing::StatusIs;

NewWeightSet Wanted() {
  NewWeightSet wanted;
  wanted.spec.set_model("/models/m");
  wanted.fingerprint.hash = std::string(64, 'a');
  auto identity = std::make_shared<CheckpointIdentity>();
  identity->folder = "/models/m";
  identity->files.push_back({.name = "config.json", .stat = {}, .contents_sha256 = {}, .header_sha256 = {}});
  wanted.identity = std::move(identity);
  return wanted;
}

class LoadVaultTest : public ::testing::Test {
 protected:
  void Start(FakeLoaderSpawner::Script script) {
    registry_ = Registry::Create({.host_memory =
                                      [] {
                                        return HostMemory{int64_t{1} << 40, "machine"};
                                      },
                                  .vault = &vault_});
    spawner_ = std::make_unique<FakeLoaderSpawner>(std::move(script));
    LoadManagerOptions options;
    options.registry = registry_;
    options.spawner = spawner_.get();
    options.heartbeat = std::chrono::milliseconds(20);
    options.max_attempts = 3;
    options.vault = &vault_;
    loads_ = std::make_unique<LoadManager>(std::move(options));
  }

  WeightSetView Await(const WeightSetRef& set) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < deadline) {
      const WeightSetView view = registry_->View(set);
      if (view.state == v1::WEIGHT_SET_STATE_RESIDENT || view.state == v1::WEIGHT_SET_STATE_FAILED) return view;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "the load did not end";
    return registry_->View(set);
  }

  FakeVault vault_;
  std::shared_ptr<Registry> registry_;
  std::unique_ptr<FakeLoaderSpawner> spawner_;
  std::unique_ptr<LoadManager> loads_;
};

TEST_F(LoadVaultTest, KeepsALoadBeforeItsLoaderStartsAndForgetsItOnceTheSetIsKept) {
  Start([&](FakeLoader& loader) {
    EXPECT_THAT(vault_.calls(), ElementsAre("KeepLoad 1"));
    EXPECT_EQ(loader.request().files_size(), 1);
    LoadsWell()(loader);
  });
  EXPECT_EQ(Await(loads_->Load(Wanted()).value()).state, v1::WEIGHT_SET_STATE_RESIDENT);
  loads_->Shutdown();
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepLoad 1", "KeepGeneration 1", "Keep 0", "ForgetLoad"));
}

TEST_F(LoadVaultTest, FailsALoadThatCannotBeKeptAndStartsNoLoader) {
  Start(LoadsWell());
  vault_.OnCall(Refuses("KeepLoad 1"));
  EXPECT_THAT(loads_->Load(Wanted()), StatusIs(Reason::kKeeperRefused));
  EXPECT_EQ(spawner_->spawn_count(), 0);
  EXPECT_EQ(registry_->Totals().CountLoads(), 0);
}

TEST_F(LoadVaultTest, FailsALoadWhoseShardIsNotKeptAndGivesItsMemoryBack) {
  Start(LoadsWell());
  vault_.OnCall(Refuses("Keep 0"));
  const WeightSetView view = Await(loads_->Load(Wanted()).value());
  EXPECT_EQ(view.state, v1::WEIGHT_SET_STATE_FAILED);
  EXPECT_THAT(view.failure, StatusIs(Reason::kKeeperRefused));
  loads_->Shutdown();
  EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepLoad 1", "KeepGeneration 1", "Keep 0", "Forget 0", "ForgetLoad"));
}

TEST_F(LoadVaultTest, ForgetsALoadThatFailsBeforeAnybodyIsTold) {
  Start([](FakeLoader& loader) { loader.Fail(MakeError(Reason::kCheckpointChanged, "it was replaced")); });
  WeightSetRef set;
  std::atomic<bool> still_loading{false};
  vault_.OnCall([&](const std::string& call) {
    if (call == "ForgetLoad") still_loading = registry_->Totals().CountLoads() == 1;
    return absl::OkStatus();
  });
  set = loads_->Load(Wanted()).value();
  EXPECT_EQ(Await(set).state, v1::WEIGHT_SET_STATE_FAILED);
  EXPECT_TRUE(still_loading);
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepLoad 1", "ForgetLoad"));
}

TEST_F(LoadVaultTest, ForgetsALoadThatAnOperatorEnds) {
  Start([](FakeLoader& loader) { loader.WaitForTheEnd(); });
  const WeightSetRef set = loads_->Load(Wanted()).value();
  loads_->Cancel(set, MakeError(Reason::kCancelled, "an operator said so"));
  EXPECT_THAT(vault_.calls(), Contains("ForgetLoad"));
}

TEST_F(LoadVaultTest, LeavesALoadThatEndsWithThisBrokerToTheNextOne) {
  Start([](FakeLoader& loader) { loader.WaitForTheEnd(); });
  const WeightSetRef set = loads_->Load(Wanted()).value();
  loads_->Shutdown();
  EXPECT_THAT(registry_->View(set).failure, StatusIs(Reason::kDraining));
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepLoad 1"));
}

TEST_F(LoadVaultTest, StartsALoadOfAnotherBrokerAgainAndCountsTheAttempts) {
  Start(LoadsWell());
  const auto set = loads_->Resume({Wanted(), 2});
  ASSERT_THAT(set, IsOk());
  EXPECT_EQ(Await(*set).state, v1::WEIGHT_SET_STATE_RESIDENT);
  loads_->Shutdown();
  EXPECT_THAT(vault_.calls(), ElementsAre("KeepLoad 3", "KeepGeneration 1", "Keep 0", "ForgetLoad"));
}

TEST_F(LoadVaultTest, GivesUpALoadUnderWhichTooManyBrokersHaveEnded) {
  Start(LoadsWell());
  EXPECT_THAT(loads_->Resume({Wanted(), 3}), StatusIs(Reason::kLoaderFailed, HasSubstr("3 brokers")));
  EXPECT_EQ(spawner_->spawn_count(), 0);
  EXPECT_THAT(vault_.calls(), ElementsAre("ForgetLoad"));
}

}  // namespace
}  // namespace weightbroker
