// A cancel that meets the hand-over of a loader that stays as the exporter of its memory: the load ends with its
// exporter, or the set is resident with it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "common/base/error.h"
#include "server/broker/exporter.h"
#include "server/broker/load_session.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_loader.h"
#include "tests/unit/broker/fake_vault.h"

namespace weightbroker {
namespace {

using testing::AnyGpuFd;
using ::testing::Contains;
using testing::FakeLoader;
using testing::FakeLoaderSpawner;
using testing::FakeShard;
using testing::FakeVault;
using testing::IsOk;
using testing::MakeFakeGpuShard;
using ::testing::Not;
using testing::Refuses;
using testing::StatusIs;

constexpr char kGpu[] = "GPU-00000001-0000-0000-0000-000000000000";

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

class LoadCancelTest : public ::testing::Test {
 protected:
  LoadCancelTest() {
    NewWeightSet wanted;
    wanted.spec.set_model("/models/m");
    wanted.fingerprint.hash = std::string(64, 'a');
    wanted.placement.ranks = {{0, kGpu}};
    wanted.placement.handle_kind = v1::HANDLE_KIND_CUDA_IPC;
    set_ = registry_->Begin(wanted)->set;
    internal::v1::LoadRequest request;
    request.set_handle_kind(v1::HANDLE_KIND_CUDA_IPC);
    request.add_ranks()->set_device(kGpu);
    session_.emplace(registry_, set_, spawner_.Spawn(request).value(), std::chrono::milliseconds(20),
                     std::chrono::milliseconds(0), AnyGpuFd);
  }

  void Load(FakeLoader& loader) {
    const FakeShard shard = MakeFakeGpuShard(v1::HANDLE_KIND_CUDA_IPC, kGpu, 2);
    if (!loader.PlanFor(shard)) return;
    loader.Progress(v1::WEIGHT_SET_STATE_VERIFYING, 512);
    loader.HandOver(shard);
    handed_over_ = true;
    loader.WaitForTheEnd();
  }

  void Cancel() { session_->Cancel(MakeError(Reason::kCancelled, "an operator said so")); }

  std::atomic<bool> handed_over_{false};
  FakeVault vault_;
  const std::shared_ptr<Registry> registry_ = Registry::Create({.device_memory =
                                                                    [](const std::string&) {
                                                                      return DeviceMemory{int64_t{1} << 40, "device"};
                                                                    },
                                                                .vault = &vault_});
  FakeLoaderSpawner spawner_{[this](FakeLoader& loader) { Load(loader); }};
  WeightSetRef set_;
  std::optional<LoadSession> session_;
};

TEST_F(LoadCancelTest, LeavesTheExporterAloneOnceItsMemoryIsBeingKept) {
  vault_.OnCall([this](const std::string& call) {
    if (call == "Keep 0") Cancel();
    return absl::OkStatus();
  });

  EXPECT_THAT(session_->Run(), IsOk());

  const auto shard = registry_->Look(set_, 0, {});
  ASSERT_THAT(shard, IsOk());
  EXPECT_TRUE((*shard)->exporter->alive());
  EXPECT_EQ(spawner_.running_count(), 1);
}

TEST_F(LoadCancelTest, EndsTheExporterOfMemoryThatTheVaultDoesNotTakeAndGivesItsCause) {
  vault_.OnCall([this](const std::string& call) {
    if (call == "Keep 0") Cancel();
    return Refuses("Keep 0")(call);
  });

  EXPECT_THAT(session_->Run(), StatusIs(Reason::kCancelled));

  EXPECT_TRUE(Eventually([this] { return spawner_.running_count() == 0; }));
}

TEST_F(LoadCancelTest, KeepsNothingThatAKilledLoaderHadSentBefore) {
  const Subscription subscription = registry_->Subscribe(set_, [this] {
    if (registry_->View(set_).state != v1::WEIGHT_SET_STATE_VERIFYING) return;
    EXPECT_TRUE(Eventually([this] { return handed_over_.load(); }));
    Cancel();
  });

  EXPECT_THAT(session_->Run(), StatusIs(Reason::kCancelled));

  EXPECT_THAT(vault_.calls(), Not(Contains("Keep 0")));
  EXPECT_TRUE(Eventually([this] { return spawner_.running_count() == 0; }));
}

}  // namespace
}  // namespace weightbroker
