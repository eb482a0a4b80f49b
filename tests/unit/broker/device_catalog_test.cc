#include "server/broker/device_catalog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fake_gpu_inventory.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FakeGpuInventory;
using testing::HasMetadata;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr char kFirst[] = "GPU-00000001-0000-0000-0000-000000000000";
constexpr char kSecond[] = "GPU-00000002-0000-0000-0000-000000000000";
constexpr char kMig[] = "GPU-00000003-0000-0000-0000-000000000000";

GpuInfo Gpu(int ordinal, const std::string& uuid, bool mig = false) {
  return {.ordinal = ordinal,
          .uuid = uuid,
          .name = "Fake GPU",
          .compute_major = 9,
          .compute_minor = 0,
          .total_bytes = 1000,
          .free_bytes = 600,
          .mig_enabled = mig};
}

class DeviceCatalogTest : public ::testing::Test {
 protected:
  std::unique_ptr<DeviceCatalog> Make(std::vector<std::string> wanted, std::vector<GpuInfo> gpus) {
    return std::make_unique<DeviceCatalog>(DeviceCatalogOptions{
        .wanted = std::move(wanted), .open = [this, gpus]() -> absl::StatusOr<std::unique_ptr<GpuInventory>> {
          auto inventory = std::make_unique<FakeGpuInventory>(gpus);
          inventory_ = inventory.get();
          return inventory;
        }});
  }

  static std::vector<std::string> NamesOf(DeviceCatalog& catalog) {
    std::vector<std::string> names;
    for (const ServedDevice& device : catalog.Served()) names.push_back(device.name);
    return names;
  }

  FakeGpuInventory* inventory_ = nullptr;  // the catalog's
};

TEST_F(DeviceCatalogTest, ServesEveryGpuThatCanBeUsedAndThenTheHost) {
  const auto catalog = Make({"all"}, {Gpu(0, kFirst), Gpu(1, kSecond)});
  EXPECT_THAT(NamesOf(*catalog), ElementsAre(kFirst, kSecond, "host"));
  EXPECT_THAT(catalog->Served()[0].handle_kinds, ElementsAre(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC));
  EXPECT_THAT(catalog->Check(), IsOk());
  EXPECT_EQ(catalog->Report().refusal, "");
}

TEST_F(DeviceCatalogTest, PutsNothingMoreOnAGpuThatHasFailed) {
  const auto catalog = Make({"all"}, {Gpu(0, kFirst), Gpu(1, kSecond)});
  catalog->MarkFaulty(kFirst, "it has reported XID 79");
  catalog->MarkFaulty(kFirst, "and then another one");
  EXPECT_EQ(catalog->Report().devices[0].refusal(), "it has reported XID 79");
  EXPECT_EQ(catalog->Report().devices[1].refusal(), "");

  v1::RegisterRequest request;
  EXPECT_EQ(PlaceRanks(request, 1, catalog->Served())->ranks[0].device, kSecond);
  EXPECT_FALSE(PlaceRanks(request, 2, catalog->Served()).ok());
  request.add_devices(kFirst);
  EXPECT_THAT(PlaceRanks(request, 1, catalog->Served()),
              StatusIs(Reason::kDeviceUnsupported, HasSubstr("takes no more weights: it has reported XID 79")));
}

TEST_F(DeviceCatalogTest, AFaultOfEveryGpuMovesNothingToTheHostUnasked) {
  const auto catalog = Make({"all"}, {Gpu(0, kFirst), Gpu(1, kSecond)});
  catalog->MarkFaulty("", "it has reported XID 119");
  v1::RegisterRequest request;
  EXPECT_THAT(PlaceRanks(request, 1, catalog->Served()), StatusIs(Reason::kDeviceUnsupported, HasSubstr("XID 119")));
  request.add_handle_kinds(v1::HANDLE_KIND_HOST_MEMFD);
  EXPECT_EQ(PlaceRanks(request, 1, catalog->Served())->ranks[0].device, "host");
}

TEST_F(DeviceCatalogTest, ServesThoseThatAreNamedInTheirOrderByNumberOrUuid) {
  const auto catalog = Make({"1", kFirst, "1"}, {Gpu(0, kFirst), Gpu(1, kSecond), Gpu(2, kMig)});
  EXPECT_THAT(NamesOf(*catalog), ElementsAre(kSecond, kFirst, "host"));
  EXPECT_EQ(catalog->Report().devices[2].refusal(), "--devices does not name it");
}

TEST_F(DeviceCatalogTest, RefusesANameThatNoGpuHasListingThoseThereAre) {
  const auto catalog = Make({"7"}, {Gpu(0, kFirst)});
  EXPECT_THAT(catalog->Check(), AllOf(StatusIs(Reason::kDeviceUnknown, HasSubstr("names the GPU 7")),
                                      HasMetadata("devices", std::string(kFirst) + " (0)")));
}

TEST_F(DeviceCatalogTest, LeavesOutAPartitionedGpuSayingWhy) {
  const auto catalog = Make({"all"}, {Gpu(0, kFirst), Gpu(1, kMig, true)});
  EXPECT_THAT(NamesOf(*catalog), ElementsAre(kFirst, "host"));
  const GpuReport report = catalog->Report();
  EXPECT_TRUE(report.devices[1].mig_enabled());
  EXPECT_THAT(report.devices[1].refusal(), HasSubstr("partitioned (MIG)"));
}

TEST_F(DeviceCatalogTest, RefusesAPartitionedGpuThatIsNamed) {
  const auto catalog = Make({kMig}, {Gpu(0, kMig, true)});
  EXPECT_THAT(catalog->Check(), StatusIs(Reason::kDeviceUnsupported, HasSubstr("MIG")));
  EXPECT_THAT(catalog->Report().refusal, HasSubstr("MIG"));
}

TEST_F(DeviceCatalogTest, ServesTheHostAloneWithoutADriverAndSaysWhatTheDriverSaid) {
  const auto none = []() -> absl::StatusOr<std::unique_ptr<GpuInventory>> {
    return MakeError(Reason::kGpuUnavailable, "no libnvidia-ml.so.1");
  };
  DeviceCatalog catalog({.wanted = {"all"}, .open = none});
  EXPECT_THAT(NamesOf(catalog), ElementsAre("host"));
  EXPECT_THAT(catalog.Check(), IsOk());
  EXPECT_EQ(catalog.Report().refusal, "no libnvidia-ml.so.1");
  EXPECT_THAT(catalog.Report().devices, IsEmpty());
  DeviceCatalog naming({.wanted = {"0"}, .open = none});
  EXPECT_THAT(naming.Check(), StatusIs(Reason::kGpuUnavailable, HasSubstr("libnvidia-ml")));
}

TEST_F(DeviceCatalogTest, ServesTheHostAloneInABuildWithoutKernelsButListsTheGpus) {
  DeviceCatalog catalog({.wanted = {"all"},
                         .open = []() -> absl::StatusOr<std::unique_ptr<GpuInventory>> {
                           return std::make_unique<FakeGpuInventory>(std::vector<GpuInfo>{Gpu(0, kFirst)});
                         },
                         .build_has_kernels = false});
  EXPECT_THAT(NamesOf(catalog), ElementsAre("host"));
  EXPECT_THAT(catalog.Report().refusal, HasSubstr("made without CUDA's compiler"));
  ASSERT_THAT(catalog.Report().devices, SizeIs(1));
  EXPECT_THAT(catalog.Report().devices[0].refusal(), HasSubstr("made without CUDA's compiler"));
}

TEST_F(DeviceCatalogTest, AsksNobodyWhenTheHostAloneIsWanted) {
  DeviceCatalog catalog({.wanted = {"host"}, .open = []() -> absl::StatusOr<std::unique_ptr<GpuInventory>> {
                           ADD_FAILURE() << "NVML was opened";
                           return absl::InternalError("");
                         }});
  EXPECT_THAT(NamesOf(catalog), ElementsAre("host"));
  EXPECT_THAT(catalog.Report().refusal, HasSubstr("--devices=host"));
}

TEST_F(DeviceCatalogTest, KnowsWhatOfADeviceIsPartOfAFingerprint) {
  const auto catalog = Make({"all"}, {Gpu(0, kFirst), Gpu(1, kSecond)});
  const RankPlacement on_gpus[] = {{0, kFirst}, {1, kSecond}};
  EXPECT_EQ(
      catalog->FactsOf(on_gpus),
      (DeviceFacts{{"device.kind", "cuda"}, {"device.compute_capability", "9.0"}, {"device.driver_version", "999.1"}}));
  const RankPlacement on_host[] = {{0, kHostDevice}};
  EXPECT_EQ(catalog->FactsOf(on_host), HostDeviceFacts());
}

TEST_F(DeviceCatalogTest, NamesEveryComputeCapabilityOfASetOnUnequalGpus) {
  GpuInfo older = Gpu(1, kSecond);
  older.compute_major = 8;
  const auto catalog = Make({"all"}, {Gpu(0, kFirst), older});
  const RankPlacement ranks[] = {{0, kFirst}, {1, kSecond}};
  EXPECT_EQ(catalog->FactsOf(ranks)["device.compute_capability"], "8.0,9.0");
}

TEST_F(DeviceCatalogTest, SaysWhatAGpuHasLeftNowAndWhoUsesIt) {
  const auto catalog = Make({"all"}, {Gpu(0, kFirst)});
  catalog->Served();
  inventory_->SetFree(kFirst, 250);
  inventory_->SetProcesses(kFirst, {{4711, int64_t{3} << 20}});
  const auto memory = catalog->Memory(kFirst);
  ASSERT_THAT(memory, IsOk());
  EXPECT_EQ(memory->available_bytes, 250);
  EXPECT_EQ(memory->holders, "pid 4711 (3 MiB)");
  EXPECT_THAT(catalog->Memory(kSecond), StatusIs(Reason::kDeviceUnknown));
  EXPECT_THAT(catalog->Memory(kHostDevice), StatusIs(Reason::kDeviceUnknown));
}

}  // namespace
}  // namespace weightbroker
