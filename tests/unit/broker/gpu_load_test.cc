// Loads whose result is GPU memory, as the broker sees them: descriptors, handles, and exporters that stay.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>

#include "server/broker/load_manager.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_loader.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::AnyGpuFd;
using testing::FakeLoader;
using testing::FakeLoaderSpawner;
using testing::FakeShard;
using testing::HasMetadata;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::LoadsWell;
using testing::MakeFakeGpuShard;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr char kGpu[] = "GPU-00000001-0000-0000-0000-000000000000";
constexpr char kOtherGpu[] = "GPU-00000002-0000-0000-0000-000000000000";

class GpuLoadTest : public ::testing::Test {
 protected:
  void Start(FakeLoaderSpawner::Script script, GpuFdCheck check = AnyGpuFd) {
    registry_ = Registry::Create({.device_memory = [](const std::string&) {
      return DeviceMemory{int64_t{1} << 40, "device"};
    }});
    spawner_ = std::make_unique<FakeLoaderSpawner>(std::move(script));
    loads_ = std::make_unique<LoadManager>(LoadManagerOptions{.registry = registry_,
                                                              .spawner = spawner_.get(),
                                                              .heartbeat = std::chrono::milliseconds(20),
                                                              .check_gpu_fd = check});
  }

  WeightSetRef Load(v1::HandleKind kind, const std::vector<std::string>& devices = {kGpu}) {
    NewWeightSet wanted;
    wanted.spec.set_model("/models/m");
    wanted.fingerprint.hash = std::string(64, 'a');
    wanted.placement.world_size = static_cast<int32_t>(devices.size());
    wanted.placement.ranks.clear();
    for (const std::string& device : devices) {
      wanted.placement.ranks.push_back({static_cast<int32_t>(wanted.placement.ranks.size()), device});
    }
    wanted.placement.handle_kind = kind;
    const WeightSetRef set = loads_->Load(wanted).value();
    EXPECT_TRUE(Eventually([&] {
      const v1::WeightSetState state = registry_->View(set).state;
      return state == v1::WEIGHT_SET_STATE_RESIDENT || state == v1::WEIGHT_SET_STATE_FAILED;
    }));
    return set;
  }

  static bool Eventually(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  absl::Status FailureOf(v1::HandleKind kind, const std::function<void(FakeShard&)>& spoil,
                         GpuFdCheck check = AnyGpuFd) {
    Start(
        [=](FakeLoader& loader) {
          FakeShard shard = MakeFakeGpuShard(kind, kGpu, 2);
          spoil(shard);
          if (loader.PlanFor(shard)) loader.HandOver(shard);
          loader.WaitForTheEnd();
        },
        check);
    const WeightSetRef set = Load(kind);
    const absl::Status failure = registry_->View(set).failure;
    EXPECT_TRUE(Eventually([&] { return spawner_->running_count() == 0; }));
    EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
    return failure;
  }

  std::shared_ptr<Registry> registry_;
  std::unique_ptr<FakeLoaderSpawner> spawner_;
  std::unique_ptr<LoadManager> loads_;
};

TEST_F(GpuLoadTest, VmmMemoryIsHeldByItsDescriptorsAndItsLoaderLeaves) {
  Start(LoadsWell());
  const WeightSetRef set = Load(v1::HANDLE_KIND_CUDA_VMM_FD);
  const auto lease = registry_->Acquire(set, 0, {v1::HANDLE_KIND_CUDA_VMM_FD}, nullptr);
  ASSERT_THAT(lease, IsOk());
  EXPECT_EQ(lease->shard()->device, kGpu);
  EXPECT_THAT(*lease->shard()->slab_fds, SizeIs(1));
  EXPECT_EQ(lease->shard()->exporter, nullptr);
  EXPECT_TRUE(Eventually([&] { return spawner_->running_count() == 0; }));
}

TEST_F(GpuLoadTest, ADescriptorThatIsNotTheDriversIsRefusedNamingWhatItIs) {
  EXPECT_THAT(FailureOf(
                  v1::HANDLE_KIND_CUDA_VMM_FD, [](FakeShard&) {}, CheckGpuMemoryFd),
              StatusIs(Reason::kProtocolError, AllOf(HasSubstr("slab 0"), HasSubstr("memfd"))));
}

TEST_F(GpuLoadTest, ASlabOnAnotherGpuThanItsShardIsRefusedNamingBoth) {
  EXPECT_THAT(FailureOf(v1::HANDLE_KIND_CUDA_VMM_FD,
                        [](FakeShard& shard) { shard.sealed.mutable_slabs(0)->set_device_uuid(kOtherGpu); }),
              StatusIs(Reason::kProtocolError, AllOf(HasSubstr(kGpu), HasSubstr(kOtherGpu))));
}

TEST_F(GpuLoadTest, ASlabOfAnotherKindThanWasAskedForIsRefusedNamingBoth) {
  EXPECT_THAT(
      FailureOf(v1::HANDLE_KIND_CUDA_VMM_FD,
                [](FakeShard& shard) { shard.sealed.mutable_slabs(0)->set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD); }),
      StatusIs(Reason::kProtocolError, AllOf(HasSubstr("HOST_MEMFD"), HasSubstr("CUDA_VMM_FD"))));
}

TEST_F(GpuLoadTest, AnIpcHandleOfAnotherLengthIsRefused) {
  EXPECT_THAT(FailureOf(v1::HANDLE_KIND_CUDA_IPC,
                        [](FakeShard& shard) { shard.sealed.mutable_slabs(0)->set_cuda_ipc_handle("short"); }),
              StatusIs(Reason::kProtocolError, HasSubstr("has 5 bytes")));
}

TEST_F(GpuLoadTest, SlabsOfMoreThanCanBeAddressedTogetherAreRefusedNamingTheOneTooMany) {
  EXPECT_THAT(FailureOf(v1::HANDLE_KIND_CUDA_IPC,
                        [](FakeShard& shard) {
                          v1::Slab& another = *shard.sealed.add_slabs();
                          another = shard.sealed.slabs(0);
                          another.set_size_bytes(std::numeric_limits<int64_t>::max());
                        }),
              AllOf(StatusIs(Reason::kProtocolError, HasSubstr("can be addressed")), HasMetadata("slab", "1")));
}

TEST_F(GpuLoadTest, TheLoaderOfAnIpcSetStaysAsItsExporterUntilTheSetGoes) {
  Start(LoadsWell());
  const WeightSetRef set = Load(v1::HANDLE_KIND_CUDA_IPC);
  {
    const auto lease = registry_->Acquire(set, 0, {}, nullptr);
    ASSERT_THAT(lease, IsOk());
    EXPECT_THAT(*lease->shard()->slab_fds, IsEmpty());
    EXPECT_EQ(SlabsWithHandles(*lease->shard())[0].cuda_ipc_handle(), std::string(64, 'h'));
  }
  EXPECT_EQ(spawner_->running_count(), 1);
  ASSERT_THAT(registry_->Release(set), IsOk());
  EXPECT_TRUE(Eventually([&] { return spawner_->running_count() == 0; }));
}

TEST_F(GpuLoadTest, AnIpcHandleIsShownToNobodyWhoHasNoLease) {
  Start(LoadsWell());
  const WeightSetRef set = Load(v1::HANDLE_KIND_CUDA_IPC);
  EXPECT_THAT(registry_->Describe(set).SerializeAsString(), ::testing::Not(HasSubstr("hhhhhhhh")));
}

TEST_F(GpuLoadTest, OneExporterServesEveryRankOfItsSet) {
  Start(LoadsWell());
  const WeightSetRef set = Load(v1::HANDLE_KIND_CUDA_IPC, {kGpu, kOtherGpu});
  EXPECT_EQ((*registry_->Look(set, 0, {}))->exporter, (*registry_->Look(set, 1, {}))->exporter);
  EXPECT_EQ((*registry_->Look(set, 1, {}))->device, kOtherGpu);
}

TEST_F(GpuLoadTest, AfterItsExportersDeathASetIsRefusedAndSaysSo) {
  std::atomic<FakeLoader*> exporter{nullptr};
  Start([&](FakeLoader& loader) {
    exporter = &loader;
    LoadsWell()(loader);
  });
  const WeightSetRef set = Load(v1::HANDLE_KIND_CUDA_IPC);
  const auto held = registry_->Acquire(set, 0, {}, nullptr);
  ASSERT_THAT(held, IsOk());
  exporter.load()->Shutdown();
  EXPECT_THAT(CheckExportable(*held->shard()),
              AllOf(StatusIs(Reason::kExporterDead, HasSubstr("unregister the set and register it again")),
                    HasMetadata("device_uuid", kGpu)));
  EXPECT_THAT(registry_->Describe(set).shards(0).export_refusal(), HasSubstr("has ended"));
  EXPECT_THAT(registry_->Look(set, 0, {}), IsOk());
  EXPECT_TRUE(held->held());
}

}  // namespace
}  // namespace weightbroker
