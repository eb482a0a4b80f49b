// Engines on one GPU: what they read, what happens when one dies or misbehaves, and what is left when all have gone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/device/cuda_context.h"
#include "common/device/cuda_driver.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Values;

// What a full GPU leaves for the contexts of engines yet to come.
constexpr int64_t kRoomForNewcomers = 4 * 1024 * kMiB;

// Whatever holds for both kinds of handles.
class EveryKind : public GpuTest, public ::testing::WithParamInterface<v1::HandleKind> {
 protected:
  static std::string KindName() { return GetParam() == v1::HANDLE_KIND_CUDA_IPC ? "CUDA_IPC" : "CUDA_VMM_FD"; }
};

INSTANTIATE_TEST_SUITE_P(Gpu, EveryKind, Values(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC),
                         [](const auto& kind) {
                           return kind.param == v1::HANDLE_KIND_CUDA_IPC ? "CudaIpc" : "CudaVmm";
                         });

TEST_P(EveryKind, GivesEnginesTheBytesOfTheFiles) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");

  const Finished on_gpu = RunProgram("engine", service->EngineFlags("small", {"--register", "--verify", "--cuda_device",
                                                                              "0", "--handle_kind", KindName()}));
  const Finished from_disk = RunProgram(
      "engine", {"--mode", "off", "--model", service->ModelFolder("small"), "--torch_version", "any", "--json"});

  ASSERT_TRUE(on_gpu.exit.success()) << on_gpu.errors;
  ASSERT_TRUE(from_disk.exit.success()) << from_disk.errors;
  EXPECT_EQ(on_gpu.json["source"], "attached");
  EXPECT_THAT(on_gpu.json["device"].get<std::string>(), HasSubstr("GPU-"));
  EXPECT_EQ(on_gpu.json["checksum"], from_disk.json["checksum"]);
}

TEST_P(EveryKind, SurvivesTheDeathOfOneEngineAmongFour) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small", GetParam()), IsOk());
  std::vector<std::unique_ptr<Program>> engines;
  for (int i = 0; i < 4; ++i) {
    engines.push_back(std::make_unique<Program>("gpu_engine", EngineFlags(*service, "small")));
  }
  for (const auto& engine : engines) ASSERT_TRUE(engine->WaitForLine("attached")) << engine->Errors();
  EXPECT_EQ(service->Health()->lease_count(), 4);

  engines[1]->Kill(SIGKILL);
  engines[1]->Wait();
  engines.erase(engines.begin() + 1);

  EXPECT_TRUE(Eventually([&] { return service->Health()->lease_count() == 3; }));
  const FilledGpu pressure(Uuid(), kRoomForNewcomers);
  for (const auto& engine : engines) EXPECT_TRUE(Verifies(*engine));
  Program newcomer("gpu_engine", EngineFlags(*service, "small"));
  ASSERT_TRUE(newcomer.WaitForLine("attached")) << newcomer.Errors();
  EXPECT_TRUE(Verifies(newcomer));
}

TEST_P(EveryKind, KeepsEnginesReadingWhenTheBrokerIsKilled) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small", GetParam()), IsOk());
  Program engine("gpu_engine", EngineFlags(*service, "small"));
  ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors();
  const pid_t broker = BrokerOf(*service);

  ASSERT_EQ(kill(broker, SIGKILL), 0);
  const FilledGpu pressure(Uuid(), kRoomForNewcomers);

  EXPECT_TRUE(Verifies(engine));
  EXPECT_TRUE(IsReplaced(*service, broker));
  Program newcomer("gpu_engine", EngineFlags(*service, "small"));
  ASSERT_TRUE(newcomer.WaitForLine("attached")) << newcomer.Errors() << newcomer.Output();
  EXPECT_TRUE(Verifies(newcomer));
}

TEST_P(EveryKind, GivesTheMemoryBackWithTheLastHolder) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const auto service = StartService();
  WriteSparseModel(service->NewModel("large"));
  const auto set = RegisterOnGpu(*service, "large", GetParam());
  ASSERT_THAT(set, IsOk());
  Program engine("gpu_engine", EngineFlags(*service, "large"));
  ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors();
  EXPECT_LE(FreeBytes(), before - kSlowLoadBytes);

  ASSERT_THAT(service->Unregister(set->fingerprint(), /*force=*/true), IsOk());
  EXPECT_TRUE(Verifies(engine)) << "what is mapped stays valid";
  engine.Kill(SIGTERM);
  EXPECT_TRUE(engine.Wait().success()) << engine.Errors();

  EXPECT_TRUE(ComesBackTo(before)) << "before " << before << ", now " << FreeBytes();
}

TEST_P(EveryKind, EndsAnEngineThatExitsWithItsWeights) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small", GetParam()), IsOk());

  const Finished engine = RunProgram("gpu_engine", EngineFlags(*service, "small", {"--exit_with_weights"}));

  EXPECT_TRUE(engine.exit.success()) << engine.exit.ToString() << "\n" << engine.errors;
  EXPECT_TRUE(Eventually([&] { return service->Health()->lease_count() == 0; }));
}

TEST_P(EveryKind, RefusesAnEngineThatCannotMapIt) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small", GetParam()), IsOk());
  const std::string other = GetParam() == v1::HANDLE_KIND_CUDA_IPC ? "CUDA_VMM_FD" : "CUDA_IPC";

  const Finished engine = RunProgram("gpu_engine", EngineFlags(*service, "small", {"--kind", other}));

  EXPECT_EQ(engine.exit.code, 3);
  EXPECT_EQ(engine.json["reason"], "HANDLE_KIND_UNSUPPORTED");
  EXPECT_THAT(engine.json["message"].get<std::string>(), AllOf(HasSubstr("CUDA_VMM_FD"), HasSubstr("CUDA_IPC")));
}

// How long weights lie in memory that no process with CUDA holds, before the next engine comes.
constexpr std::chrono::seconds kLongWithoutCuda(60);

using VmmEngine = GpuTest;

TEST_F(VmmEngine, DiesAloneOfAWriteToATensor) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small"), IsOk());
  Program bystander("gpu_engine", EngineFlags(*service, "small"));
  ASSERT_TRUE(bystander.WaitForLine("attached")) << bystander.Errors();

  const Finished writer = RunProgram("gpu_engine", EngineFlags(*service, "small", {"--write_fault"}));

  EXPECT_EQ(writer.exit.code, 1) << writer.errors << writer.output;
  EXPECT_THAT(writer.json["write"], "CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_TRUE(Verifies(bystander));
  Program newcomer("gpu_engine", EngineFlags(*service, "small"));
  ASSERT_TRUE(newcomer.WaitForLine("attached")) << newcomer.Errors();
  EXPECT_TRUE(Verifies(newcomer));
}

TEST_F(VmmEngine, FindsWeightsThatNoCudaProcessHolds) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const auto service = StartService();
  WriteSparseModel(service->NewModel("large"));
  const auto set = RegisterOnGpu(*service, "large");
  ASSERT_THAT(set, IsOk());
  const auto inventory = OpenNvml();
  ASSERT_THAT(inventory, IsOk());
  int64_t slabs = 0;
  for (const v1::Slab& slab : set->shards(0).slabs()) slabs += slab.size_bytes();
  const auto used = [&] { return before - FreeBytes(); };
  const auto is_alone = [&] {
    return (*inventory)->Processes(Uuid())->empty() && used() >= slabs && used() <= slabs + 16 * kMiB;
  };

  // The loader's context goes a little later than the loader is last listed.
  ASSERT_TRUE(Eventually(is_alone)) << used() << " bytes are in use, of which slabs " << slabs << "; "
                                    << DescribeHolders(*(*inventory)->Processes(Uuid()));
  std::this_thread::sleep_for(kLongWithoutCuda);
  EXPECT_TRUE(is_alone()) << used() << " bytes are in use, of which slabs " << slabs;

  RecordProperty("slab_bytes", std::to_string(slabs));
  RecordProperty("used_bytes", std::to_string(used()));
  Program engine("gpu_engine", EngineFlags(*service, "large"));
  ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors();
  EXPECT_TRUE(Verifies(engine));
}

TEST_F(VmmEngine, LeavesTheCallersContextAsItWas) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small"), IsOk());
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = service->socket();
  WeightSpec spec;
  spec.model = Service::Model("small");
  AttachOptions attach;
  attach.fallback = Fallback::kFail;
  attach.cuda_device = 0;
  CudaDriver& driver = **LoadCudaDriver();
  CudaContextHandle before = nullptr;
  CudaContextHandle after = nullptr;

  ASSERT_EQ(driver.CtxGetCurrent(&before), kCudaSuccess);
  {
    const auto weights = Client::Create(options)->Attach(spec, attach);
    ASSERT_TRUE(weights.ok()) << weights.status().ToString();
    EXPECT_TRUE(weights->Verify().ok());
    ASSERT_EQ(driver.CtxGetCurrent(&after), kCudaSuccess);
    EXPECT_EQ(before, after) << "while they are mapped";
  }
  ASSERT_EQ(driver.CtxGetCurrent(&after), kCudaSuccess);
  EXPECT_EQ(before, after) << "once they have gone";
}

TEST_F(VmmEngine, LoadsForItselfOntoItsGpuWhereThereIsNoService) {
  REQUIRE_GPUS(1);
  const int64_t before = SettledFreeBytes();
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  const auto set = RegisterOnGpu(*service, "small");
  ASSERT_THAT(set, IsOk());

  Program engine("gpu_engine", {"--mode", "off", "--model", service->ModelFolder("small")});

  ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors() << engine.Output();
  EXPECT_EQ(engine.Json()["source"], "disk");
  EXPECT_EQ(engine.Json()["uuid"], Uuid());
  EXPECT_EQ(engine.Json()["fingerprint"], set->fingerprint());
  EXPECT_TRUE(Verifies(engine));
  engine.Kill(SIGTERM);
  EXPECT_TRUE(engine.Wait().success());
  ASSERT_THAT(service->Unregister(set->fingerprint(), false), IsOk());
  EXPECT_TRUE(ComesBackTo(before));
}

TEST_F(VmmEngine, SaysWhoHoldsAGpuThatIsFullAndHasUnleasedSetsLetGoOf) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSparseModel(service->NewModel("resident"));
  WriteSparseModel(service->NewModel("wanted"));
  const auto set = RegisterOnGpu(*service, "resident");
  ASSERT_THAT(set, IsOk());
  // Room for an engine's context, which takes more than 200 MiB, and not for its weights; with the other set's, for
  // both.
  const FilledGpu filled(Uuid(), /*leave_bytes=*/kSlowLoadBytes + 200 * kMiB);
  const std::vector<std::string> flags =
      EngineFlags(*service, "wanted", {"--fallback", "disk", "--model_root", "models=" + service->ModelFolder("")});

  const Finished refused = RunProgram("gpu_engine", flags);
  std::vector<std::string> evicting = flags;
  evicting.emplace_back("--evict_unleased");
  Program served("gpu_engine", evicting);

  ASSERT_EQ(refused.exit.code, 3) << refused.output;
  EXPECT_EQ(refused.json["reason"], "MEMORY_EXHAUSTED");
  EXPECT_THAT(refused.json["metadata"]["holders"].get<std::string>(), HasSubstr(set->fingerprint().substr(0, 12)));
  EXPECT_EQ(refused.json["metadata"]["need_bytes"].get<std::string>().empty(), false);
  ASSERT_TRUE(served.WaitForLine("attached")) << served.Errors() << served.Output();
  EXPECT_EQ(served.Json()["source"], "disk");
}

using IpcEngine = GpuTest;

TEST_F(IpcEngine, KeepsReadingWhenTheExporterIsKilledAndNewcomersAreRefused) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small", v1::HANDLE_KIND_CUDA_IPC), IsOk());
  Program engine("gpu_engine", EngineFlags(*service, "small"));
  ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors();
  const std::vector<pid_t> exporters = service->Loaders();
  ASSERT_EQ(exporters.size(), 1u);

  ASSERT_EQ(kill(exporters[0], SIGKILL), 0);
  ASSERT_TRUE(Eventually([&] { return service->Loaders().empty(); }));
  const FilledGpu pressure(Uuid(), kRoomForNewcomers);

  EXPECT_TRUE(Verifies(engine));
  const Finished newcomer = RunProgram("gpu_engine", EngineFlags(*service, "small"));
  EXPECT_EQ(newcomer.exit.code, 3) << newcomer.output;
  EXPECT_THAT(newcomer.json["reason"].get<std::string>(), AnyOf("EXPORTER_DEAD", "HANDLE_STALE"));
  Program fallen_back(
      "gpu_engine",
      EngineFlags(*service, "small", {"--fallback", "disk", "--model_root", "models=" + service->ModelFolder("")}));
  ASSERT_TRUE(fallen_back.WaitForLine("attached")) << fallen_back.Errors() << fallen_back.Output();
  EXPECT_EQ(fallen_back.Json()["source"], "disk");
  EXPECT_TRUE(Verifies(fallen_back));
}

TEST_F(IpcEngine, NeedsNeitherOurLibraryNorATicket) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");

  const Finished stub = RunProgram("stub_engine", service->StubEngineFlags("small", {"--cuda_ipc", "--register"}));
  const Finished library = RunProgram("engine", service->EngineFlags("small", {"--cuda_device", "0"}));

  ASSERT_TRUE(stub.exit.success()) << stub.errors;
  ASSERT_TRUE(library.exit.success()) << library.errors;
  EXPECT_EQ(stub.json["checksum"], library.json["checksum"]);
  EXPECT_EQ(stub.json["device"], Uuid());
}

}  // namespace
}  // namespace weightbroker::testing
