// The service on a real GPU: what its processes hold of it, and what is left when they are killed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/memory/cuda_slab.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::Values;

constexpr int64_t kDriverKeepsBytes = 16 * kMiB;

std::string MapsOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/maps"));
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string OomScoreOf(pid_t pid) {
  std::string score;
  std::ifstream(absl::StrCat("/proc/", pid, "/oom_score_adj")) >> score;
  return score;
}

class GpuServiceTest : public GpuTest {
 protected:
  // What NVML lists of the GPU, for a message.
  static std::string Processes() {
    const auto inventory = OpenNvml();
    if (!inventory.ok()) return "?";
    const auto processes = (*inventory)->Processes(Uuid());
    return processes.ok() ? DescribeHolders(*processes, 100) : "?";
  }
  static size_t CountProcesses() { return (*OpenNvml())->Processes(Uuid())->size(); }
};

class EveryGpuKind : public GpuServiceTest, public ::testing::WithParamInterface<v1::HandleKind> {};

INSTANTIATE_TEST_SUITE_P(Gpu, EveryGpuKind, Values(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC),
                         [](const auto& kind) {
                           return kind.param == v1::HANDLE_KIND_CUDA_IPC ? "CudaIpc" : "CudaVmm";
                         });

TEST_F(GpuServiceTest, HealthListsTheGpusAndOffersTheirKinds) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  const auto health = service->Health();
  ASSERT_THAT(health, IsOk());
  ASSERT_THAT(health->devices(), SizeIs(static_cast<int>(Gpus().size())));
  EXPECT_EQ(health->devices(0).uuid(), Uuid());
  EXPECT_EQ(health->devices(0).total_bytes(), Gpus()[0].total_bytes);
  EXPECT_THAT(health->devices(0).refusal(), IsEmpty());
  EXPECT_THAT(health->gpu_refusal(), IsEmpty());
  EXPECT_THAT(health->handle_kinds(),
              ElementsAre(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC, v1::HANDLE_KIND_HOST_MEMFD));
  std::printf("driver %s, compute capability %s\n", health->driver_version().c_str(),
              health->devices(0).compute_capability().c_str());
}

TEST_F(GpuServiceTest, NoProcessOfItsOwnHasCudaWhileAVmmSetIsResident) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const size_t processes_before = CountProcesses();
  const auto service = StartService();
  WriteSparseModel(service->NewModel("large"));
  const auto set = RegisterOnGpu(*service, "large");
  ASSERT_THAT(set, IsOk());
  EXPECT_TRUE(Eventually([&] { return service->Loaders().empty(); }));
  EXPECT_THAT(MapsOf(service->program().pid()), Not(HasSubstr("libnvidia-ml"))) << "the keeper";
  EXPECT_TRUE(Eventually([&] { return CountProcesses() == processes_before; })) << Processes();
  const int64_t slabs = set->shards(0).size_bytes();
  EXPECT_TRUE(Eventually([&] { return FreeBytes() >= before - slabs - kDriverKeepsBytes; }))
      << "before " << before << ", slabs " << slabs << ", now " << FreeBytes();
  EXPECT_LE(FreeBytes(), before - slabs);
}

TEST_P(EveryGpuKind, ALoaderThatIsKilledFailsItsRegisterAloneAndGivesTheMemoryBack) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const auto service = StartService();
  WriteSparseModel(service->NewModel("large"), 4 * kSlowLoadBytes);
  WriteSmallGpuModel(*service, "small");
  absl::StatusOr<v1::WeightSet> result;
  std::thread caller([&] { result = RegisterOnGpu(*service, "large", GetParam()); });
  const bool killed = Eventually([&] {
    const std::vector<pid_t> loaders = service->Loaders();
    if (loaders.empty()) return false;
    return kill(loaders.front(), SIGKILL) == 0;
  });
  caller.join();
  ASSERT_TRUE(killed);
  EXPECT_THAT(result, StatusIs(Reason::kLoaderFailed, HasSubstr("SIGKILL")));
  EXPECT_TRUE(ComesBackTo(before)) << "before " << before << ", now " << FreeBytes() << "; " << Processes();
  EXPECT_THAT(RegisterOnGpu(*service, "small", GetParam()), IsOk());
}

TEST_P(EveryGpuKind, ABrokerThatIsKilledInTheMiddleOfALoadLeavesItToTheNext) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const auto service = StartService();
  WriteSparseModel(service->NewModel("large"), 4 * kSlowLoadBytes);
  const pid_t broker = BrokerOf(*service);
  std::thread caller([&] { (void)RegisterOnGpu(*service, "large", GetParam()); });
  const bool killed = Eventually([&] { return !service->Loaders().empty() && kill(broker, SIGKILL) == 0; });
  caller.join();
  ASSERT_TRUE(killed);
  ASSERT_TRUE(IsReplaced(*service, broker));
  const auto set = RegisterOnGpu(*service, "large", GetParam());
  ASSERT_THAT(set, IsOk());
  ASSERT_THAT(service->Unregister(set->fingerprint(), /*force=*/false), IsOk());
  EXPECT_TRUE(ComesBackTo(before)) << "before " << before << ", now " << FreeBytes() << "; " << Processes();
}

TEST_P(EveryGpuKind, ASetOutlivesThreeBrokersWithItsGenerationAndGoesWhenItIsUnregistered) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const auto service = StartService();
  WriteSparseModel(service->NewModel("large"));
  const auto set = RegisterOnGpu(*service, "large", GetParam());
  ASSERT_THAT(set, IsOk());
  for (int i = 0; i < 3; ++i) {
    const pid_t broker = BrokerOf(*service);
    ASSERT_EQ(kill(broker, SIGKILL), 0);
    ASSERT_TRUE(IsReplaced(*service, broker));
    const auto again = RegisterOnGpu(*service, "large", GetParam());
    ASSERT_THAT(again, IsOk());
    EXPECT_EQ(again->generation(), set->generation());
    EXPECT_TRUE(again->has_adopt_time());
    EXPECT_THAT(again->shards(0).export_refusal(), IsEmpty());
  }
  EXPECT_THAT(service->Loaders(), SizeIs(GetParam() == v1::HANDLE_KIND_CUDA_IPC ? 1 : 0));
  ASSERT_THAT(service->Unregister(set->fingerprint(), /*force=*/false), IsOk());
  EXPECT_TRUE(Eventually([&] { return service->Loaders().empty(); }));
  EXPECT_TRUE(ComesBackTo(before)) << "before " << before << ", now " << FreeBytes() << "; " << Processes();
}

TEST_P(EveryGpuKind, EverythingGoesWithTheService) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  {
    const auto service = StartService();
    WriteSparseModel(service->NewModel("large"));
    ASSERT_THAT(RegisterOnGpu(*service, "large", GetParam()), IsOk());
    EXPECT_LE(FreeBytes(), before - kSlowLoadBytes);
    service->program().Kill(SIGTERM);
    EXPECT_TRUE(service->program().Wait().success()) << service->program().Errors();
  }
  EXPECT_TRUE(ComesBackTo(before)) << "before " << before << ", now " << FreeBytes() << "; " << Processes();
}

TEST_F(GpuServiceTest, BrokerLoaderAndExporterKilledTogetherLeaveWhatNeedsNoneOfThem) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  WriteSparseModel(service->NewModel("large"));
  const auto vmm = RegisterOnGpu(*service, "small", v1::HANDLE_KIND_CUDA_VMM_FD);
  ASSERT_THAT(vmm, IsOk());
  const auto ipc = RegisterOnGpu(*service, "large", v1::HANDLE_KIND_CUDA_IPC);
  ASSERT_THAT(ipc, IsOk());
  const pid_t broker = BrokerOf(*service);
  ASSERT_THAT(service->Loaders(), SizeIs(1));
  for (const pid_t loader : service->Loaders()) kill(loader, SIGKILL);
  ASSERT_EQ(kill(broker, SIGKILL), 0);
  ASSERT_TRUE(IsReplaced(*service, broker));
  // The kernel gives a dying exporter's memory back before it closes the socket by which its death is known.
  const auto refuses = [&](const std::string& fingerprint) {
    const auto health = service->Health();
    for (const v1::WeightSet& set : health->weight_sets()) {
      if (set.fingerprint() == fingerprint) return !set.shards(0).export_refusal().empty();
    }
    ADD_FAILURE() << "the next broker knows no " << fingerprint;
    return false;
  };
  EXPECT_TRUE(Eventually([&] { return refuses(ipc->fingerprint()); }));
  EXPECT_FALSE(refuses(vmm->fingerprint()));
  ASSERT_THAT(service->Unregister(ipc->fingerprint(), /*force=*/false), IsOk());
  EXPECT_THAT(RegisterOnGpu(*service, "large", v1::HANDLE_KIND_CUDA_IPC), IsOk());
}

TEST_F(GpuServiceTest, AnExporterIsNotTheFirstThatGoesWhereMemoryRunsOut) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");

  ASSERT_THAT(RegisterOnGpu(*service, "small", v1::HANDLE_KIND_CUDA_IPC), IsOk());

  ASSERT_THAT(service->Loaders(), SizeIs(1));
  EXPECT_EQ(OomScoreOf(service->Loaders().front()), OomScoreOf(BrokerOf(*service)));
}

TEST_F(GpuServiceTest, AGpuThatIsFullIsSaidWithNeedHaveAndHolders) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const auto service = StartService();
  WriteSparseModel(service->NewModel("large"), 4 * kSlowLoadBytes);
  {
    const auto cuda = LoadCudaDriver();
    ASSERT_THAT(cuda, IsOk());
    const auto context = CudaContext::Retain(**cuda, FindCudaDevice(**cuda, Uuid()).value());
    ASSERT_THAT(context, IsOk());
    const auto memory = CudaVmmMemory::Create(*context, FreeBytes() - kSlowLoadBytes);
    ASSERT_THAT(memory, IsOk());
    const auto set = RegisterOnGpu(*service, "large");
    EXPECT_THAT(set, AllOf(StatusIs(Reason::kMemoryExhausted, AllOf(HasSubstr(Uuid()), HasSubstr("pid "))),
                           HasMetadata("limited_by", "device")));
    std::printf("%s\n", set.status().ToString().c_str());
  }
  ASSERT_TRUE(ComesBackTo(before)) << Processes();
  EXPECT_THAT(RegisterOnGpu(*service, "large"), IsOk());
}

TEST_F(GpuServiceTest, IsNotStartedForAGpuThatIsNotThere) {
  REQUIRE_GPUS(1);
  const TemporaryFolder folder;
  const Finished service = RunProgram(
      "weightbrokerd",
      {"--socket", folder / "s.sock", "--metrics_address=", "--devices", "GPU-00000000-0000-0000-0000-000000000000"});
  EXPECT_FALSE(service.exit.success());
  EXPECT_THAT(service.errors, AllOf(HasSubstr("GPU-00000000"), HasSubstr(Uuid())));
}

TEST_F(GpuServiceTest, OfOneGpuHasItsUuidInTheNameOfItsSocket) {
  REQUIRE_GPUS(1);
  const TemporaryFolder folder;
  Program service("weightbrokerd", {"--socket", folder / "{gpu_uuid}.sock", "--metrics_address=", "--devices", Uuid()});
  const std::string socket = folder / (Uuid() + ".sock");
  EXPECT_TRUE(Eventually([&] { return access(socket.c_str(), F_OK) == 0; })) << service.Errors();
  service.Kill(SIGTERM);
  EXPECT_TRUE(service.Wait().success()) << service.Errors();
}

}  // namespace
}  // namespace weightbroker::testing
