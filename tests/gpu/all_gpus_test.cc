// Every GPU of a node at once: a rank on each, by one Register, and an engine for each.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/synthetic/checkpoint_draft.h"
#include "common/synthetic/model.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Values;

constexpr int kHeads = 32;  // of the model
constexpr int64_t kBytesOfARank = int64_t{1} << 30;
constexpr int64_t kHeadBytes = 4096;  // of each tensor are in the file; the rest is a hole

using Engines = std::vector<std::unique_ptr<Program>>;

class AllGpus : public GpuTest, public ::testing::WithParamInterface<v1::HandleKind> {
 protected:
  void SetUp() override {
    REQUIRE_GPUS(2);
    if (kHeads % Ranks() != 0) GTEST_SKIP() << kHeads << " heads cannot be split over " << Ranks() << " GPUs";
    service_ = StartService();
    const auto draft = DraftModel({.model = "llama", .published = true, .bytes = Ranks() * kBytesOfARank});
    ASSERT_THAT(draft, IsOk());
    ASSERT_THAT(WriteCheckpoint(*draft, service_->NewModel("llama"), {.sparse = true, .sparse_head_bytes = kHeadBytes}),
                IsOk());
    for (int rank = 0; rank < Ranks(); ++rank) free_before_.push_back(SettledFreeBytes(rank));
  }

  static int Ranks() { return static_cast<int>(Gpus().size()); }

  absl::StatusOr<v1::WeightSet> RegisterOnAll() const {
    std::vector<std::string> devices;
    for (const GpuInfo& gpu : Gpus()) devices.push_back(gpu.uuid);
    return RegisterOnGpu(*service_, "llama", GetParam(), devices);
  }

  // One for each rank, each with its weights.
  Engines Attach() const {
    Engines engines;
    for (int rank = 0; rank < Ranks(); ++rank) {
      engines.push_back(std::make_unique<Program>(
          "gpu_engine", EngineFlags(*service_, "llama",
                                    {"--tp", absl::StrCat(Ranks()), "--rank", absl::StrCat(rank), "--cuda_device",
                                     absl::StrCat(rank)})));
    }
    for (const auto& engine : engines) {
      EXPECT_TRUE(engine->WaitForLine("attached")) << engine->Errors() << engine->Output();
    }
    return engines;
  }

  static void StartToVerify(const Engines& engines) {
    for (const auto& engine : engines) engine->Kill(SIGUSR1);
  }
  static void ExpectVerified(const Engines& engines, int times) {
    for (const auto& engine : engines) {
      EXPECT_TRUE(engine->WaitForLine(absl::StrCat("verified ", times, "\n"))) << engine->Output() << engine->Errors();
    }
  }

  void ExpectAllGivenBack() const {
    for (int rank = 0; rank < Ranks(); ++rank) {
      EXPECT_TRUE(ComesBackTo(free_before_[static_cast<size_t>(rank)], rank))
          << "GPU " << rank << ": before " << free_before_[static_cast<size_t>(rank)] << ", now " << FreeBytes(rank);
    }
  }

  std::unique_ptr<Service> service_;
  std::vector<int64_t> free_before_;
};

INSTANTIATE_TEST_SUITE_P(Gpu, AllGpus, Values(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC),
                         [](const auto& kind) {
                           return kind.param == v1::HANDLE_KIND_CUDA_IPC ? "CudaIpc" : "CudaVmm";
                         });

TEST_P(AllGpus, KeepTheirEnginesReadingWhenTheBrokerIsKilled) {
  ASSERT_THAT(RegisterOnAll(), IsOk());
  const Engines engines = Attach();
  const pid_t broker = BrokerOf(*service_);

  StartToVerify(engines);
  ASSERT_EQ(kill(broker, SIGKILL), 0);

  ExpectVerified(engines, 1);
  ASSERT_TRUE(IsReplaced(*service_, broker));
  StartToVerify(engines);
  ExpectVerified(engines, 2);
  const Engines newcomers = Attach();
  StartToVerify(newcomers);
  ExpectVerified(newcomers, 1);
}

TEST_P(AllGpus, AreGivenBackByALoadWhoseBrokerIsKilled) {
  const pid_t broker = BrokerOf(*service_);
  std::thread caller([&] { (void)RegisterOnAll(); });
  const bool killed = Eventually([&] { return !service_->Loaders().empty() && kill(broker, SIGKILL) == 0; });
  caller.join();
  ASSERT_TRUE(killed);
  ASSERT_TRUE(IsReplaced(*service_, broker));

  const auto set = RegisterOnAll();

  ASSERT_THAT(set, IsOk());
  ASSERT_THAT(service_->Unregister(set->fingerprint(), /*force=*/false), IsOk());
  ExpectAllGivenBack();
}

TEST_P(AllGpus, AreGivenBackWhenOneRanksLoadFails) {
  const int last = Ranks() - 1;
  {
    const FilledGpu filled(Uuid(last), /*leave_bytes=*/kBytesOfARank / 2);

    const auto set = RegisterOnAll();

    EXPECT_FALSE(set.ok());
    EXPECT_THAT(std::string(set.status().message()), HasSubstr(Uuid(last)));
    EXPECT_TRUE(Eventually([&] { return service_->Loaders().empty(); }));
    for (int rank = 0; rank < last; ++rank) {
      EXPECT_TRUE(ComesBackTo(free_before_[static_cast<size_t>(rank)], rank)) << "GPU " << rank;
    }
  }
  EXPECT_THAT(RegisterOnAll(), IsOk());
}

TEST_P(AllGpus, AreResidentOnlyOnceEveryShardIs) {
  std::atomic<bool> is_done = false;
  int seen_before = 0;
  std::thread watcher([&] {
    while (!is_done) {
      const auto sets = service_->ListWeightSets();
      ASSERT_THAT(sets, IsOk());
      for (const v1::WeightSet& set : sets->weight_sets()) {
        if (set.state() != v1::WEIGHT_SET_STATE_RESIDENT) {
          ++seen_before;
          EXPECT_EQ(set.shards_size(), 0) << set.DebugString();
        } else {
          EXPECT_EQ(set.shards_size(), Ranks()) << set.DebugString();
        }
      }
    }
  });

  const auto set = RegisterOnAll();

  is_done = true;
  watcher.join();
  ASSERT_THAT(set, IsOk());
  EXPECT_GT(seen_before, 0) << "the load was over before anybody could look";
  ASSERT_EQ(set->shards_size(), Ranks());
  for (int rank = 0; rank < Ranks(); ++rank) {
    EXPECT_EQ(set->shards(rank).device(), Uuid(rank));
    EXPECT_THAT(set->shards(rank).export_refusal(), IsEmpty());
  }
}

}  // namespace
}  // namespace weightbroker::testing
