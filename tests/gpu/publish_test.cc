// Engines that publish weights of their own into GPU memory: the real service, real engines, and every byte compared.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/src/redeem_ticket.h"
#include "common/base/error.h"
#include "common/device/cuda_context.h"
#include "common/memory/cuda_slab.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tensors_of_every_kind.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::Values;

constexpr int kRacers = 16;
constexpr int kKills = 50;
constexpr int64_t kColumns = 1024;

// Memory of the first GPU, and what lies there.
class Gpu {
 public:
  std::string Read(const void* data, int64_t size_bytes) const {
    std::string bytes(static_cast<size_t>(size_bytes), '\0');
    const CudaScope current(context_);
    EXPECT_EQ(driver().MemcpyDtoHAsync(bytes.data(), reinterpret_cast<CudaDevicePtr>(data), bytes.size(), nullptr),
              kCudaSuccess);
    EXPECT_EQ(driver().CtxSynchronize(), kCudaSuccess);
    return bytes;
  }

  std::string Read(const Tensor& tensor) const { return Read(tensor.data, tensor.size_bytes); }

  void Write(CudaDevicePtr to, const std::string& bytes) const {
    const CudaScope current(context_);
    EXPECT_EQ(driver().MemcpyHtoDAsync(to, bytes.data(), bytes.size(), nullptr), kCudaSuccess);
    EXPECT_EQ(driver().CtxSynchronize(), kCudaSuccess);
  }

  CudaIpcMemory Holding(const std::string& bytes) const {
    CudaIpcMemory memory = *CudaIpcMemory::Allocate(context_, static_cast<int64_t>(bytes.size()));
    Write(memory.address(), bytes);
    return memory;
  }

  const CudaContext& context() const { return context_; }

 private:
  CudaDriver& driver() const { return context_.driver(); }

  const CudaContext context_ = *CudaContext::Retain(**LoadCudaDriver(), 0);
};

// Whatever holds for both kinds of handles.
class GpuPublish : public GpuTest, public ::testing::WithParamInterface<v1::HandleKind> {
 protected:
  static std::string KindName() { return GetParam() == v1::HANDLE_KIND_CUDA_IPC ? "CUDA_IPC" : "CUDA_VMM_FD"; }

  // Of which publish_engine fuses three tensors.
  static void WriteModel(const Service& service) {
    CheckpointBuilder()
        .Tensor("layer.q_proj.weight", "BF16", {2 * kColumns, kColumns})
        .Tensor("layer.k_proj.weight", "BF16", {kColumns, kColumns})
        .Tensor("layer.v_proj.weight", "BF16", {kColumns, kColumns})
        .Tensor("layer.o_proj.weight", "BF16", {kColumns, 2 * kColumns})
        .Tensor("norm.weight", "F32", {kColumns})
        .Write(service.NewModel("m"));
  }

  static std::unique_ptr<Service> StartWithModel() {
    auto service = StartService();
    WriteModel(*service);
    return service;
  }

  static std::vector<std::string> PublisherFlags(const Service& service, const std::vector<std::string>& more = {}) {
    std::vector<std::string> flags = service.StubEngineFlags(
        "m",
        {"--model_folder", service.ModelFolder("m"), "--cuda_device", "0", "--handle_kind", KindName(), "--verify"});
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  static WeightSpec EngineSpec() {
    WeightSpec spec;
    spec.model = Service::Model("m");
    spec.layout = "engine";
    spec.engine = "test_engine";
    spec.engine_version = "7";
    return spec;
  }

  static PublishOptions Options() {
    PublishOptions options;
    options.attach.cuda_device = 0;
    options.attach.handle_kinds = {static_cast<HandleKind>(GetParam())};
    options.attach.deadline = kPatience;
    return options;
  }

  static Client MakeClient(const Service& service) {
    ClientOptions options;
    options.mode = Mode::kClient;
    options.torch_version = "any";
    options.socket_path = service.socket();
    return *Client::Create(options);
  }

  static v1::Shard OnlyShard(const Service& service) { return service.Health()->weight_sets(0).shards(0); }
};

INSTANTIATE_TEST_SUITE_P(Gpu, GpuPublish, Values(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC),
                         [](const auto& kind) {
                           return kind.param == v1::HANDLE_KIND_CUDA_IPC ? "CudaIpc" : "CudaVmm";
                         });

TEST_P(GpuPublish, OfManyThatRaceOnePublishesAndAllHaveTheSame) {
  REQUIRE_GPUS(1);
  const auto service = StartWithModel();
  std::vector<std::unique_ptr<Program>> racers;
  for (int i = 0; i < kRacers; ++i) {
    racers.push_back(std::make_unique<Program>("publish_engine", PublisherFlags(*service)));
  }
  int published = 0;
  std::set<std::string> checksums;
  for (const auto& racer : racers) {
    ASSERT_TRUE(racer->Wait().success()) << racer->Errors();
    published += racer->Json()["source"] == "published" ? 1 : 0;
    checksums.insert(racer->Json()["checksum"].get<std::string>());
    EXPECT_EQ(racer->Json()["device"], Uuid());
  }
  EXPECT_EQ(published, 1);
  EXPECT_THAT(checksums, SizeIs(1));
  ASSERT_EQ(service->Health()->weight_sets_size(), 1);
  EXPECT_EQ(OnlyShard(*service).handle_kind(), GetParam());

  // What an engine makes of the same model on the host is the same, byte for byte.
  const Finished on_host = RunProgram(
      "publish_engine", service->StubEngineFlags("m", {"--model_folder", service->ModelFolder("m"), "--engine_version",
                                                       "on_the_host", "--handle_kind", "HOST_MEMFD"}));
  ASSERT_TRUE(on_host.exit.success()) << on_host.errors;
  EXPECT_EQ(on_host.json["checksum"], *checksums.begin());
}

TEST_P(GpuPublish, OneThatIsKilledAtAnyMomentLeavesNothingAndTheNextPublishes) {
  REQUIRE_GPUS(1);
  const auto service = StartWithModel();
  const int64_t before = SettledFreeBytes();
  const auto started = std::chrono::steady_clock::now();
  const Finished whole = RunProgram("publish_engine", PublisherFlags(*service));
  const auto duration =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - started);
  ASSERT_TRUE(whole.exit.success()) << whole.errors;
  const std::string fingerprint = whole.json["fingerprint"];
  ASSERT_THAT(service->Unregister(fingerprint, /*force=*/true), IsOk());

  std::mt19937 random(TestSeed());
  std::uniform_int_distribution<int64_t> moment(0, duration.count());
  int killed = 0;
  int committed = 0;
  for (int i = 0; killed < kKills; ++i) {
    ASSERT_LT(i, 4 * kKills) << "most had ended by the time that they were to be killed";
    Program engine("publish_engine", PublisherFlags(*service));
    std::this_thread::sleep_for(std::chrono::microseconds(moment(random)));
    engine.Kill(SIGKILL);
    killed += engine.Wait().signal == SIGKILL ? 1 : 0;
    // Either nothing is left, or it had been committed, and then it is there as a whole.
    ASSERT_TRUE(Eventually([&] { return service->Health()->load_count() == 0; }));
    const auto released = service->Unregister(fingerprint, /*force=*/true);
    ASSERT_TRUE(released.ok() || HasReason(released.status(), Reason::kWeightSetUnknown)) << released.status();
    committed += released.ok() && released->weight_set().shards_size() > 0 ? 1 : 0;
    ASSERT_TRUE(Eventually([&] { return service->Loaders().empty(); })) << "after kill " << i;
    ASSERT_EQ(service->Health()->reserved_bytes(), 0) << "after kill " << i;
    ASSERT_TRUE(ComesBackTo(before)) << "before " << before << ", now " << FreeBytes() << ", after kill " << i;
  }
  RecordProperty("killed_after_commit", committed);
  printf("%d of %d were killed after they had committed\n", committed, killed);

  const Finished next = RunProgram("publish_engine", PublisherFlags(*service));
  ASSERT_TRUE(next.exit.success()) << next.errors;
  EXPECT_EQ(next.json["source"], "published");
  EXPECT_EQ(next.json["checksum"], whole.json["checksum"]);
}

TEST_P(GpuPublish, TensorsOfEveryKindComeBackExactlyWithTheirMetadata) {
  REQUIRE_GPUS(1);
  const auto service = StartWithModel();
  const Gpu gpu;
  const TensorsOfEveryKind tensors;
  const std::string large = TensorBytes("large", 5'000'001);
  const CudaIpcMemory on_gpu = gpu.Holding(large);
  const auto put_all = [&](Publisher& publisher) -> Status {
    if (const Status status = tensors.Put(publisher); !status.ok()) return status;
    return publisher.Add(Described("large", DataType::kU8, {5'000'001}),
                         reinterpret_cast<const void*>(on_gpu.address()));
  };
  ASSERT_TRUE(MakeClient(*service).AttachOrPublish(EngineSpec(), put_all, Options()).ok());

  // As another engine sees them.
  AttachOptions attach = Options().attach;
  attach.fallback = Fallback::kFail;
  const auto weights = MakeClient(*service).Attach(EngineSpec(), attach);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_EQ(weights->tensors().size(), TensorsOfEveryKind::kCount + 1);
  tensors.ExpectAll([&](const std::string& name) { return weights->Find(name); },
                    [&](const Tensor& tensor) { return gpu.Read(tensor); });
  EXPECT_EQ(gpu.Read(*weights->Find("large")), large);
}

// What the other GPU has been asked for takes a good part of a second, in a stream that waits for none and that nobody
// names.
TEST_P(GpuPublish, WhatIsCopiedFromAnotherGpuIsWhatThatGpuHadBeenAskedForBefore) {
  REQUIRE_GPUS(2);
  constexpr int64_t kSourceBytes = 64 * kMiB;
  constexpr int64_t kBusyBytes = 4096 * kMiB;
  constexpr int kBusyRounds = 300;
  const auto service = StartWithModel();
  const Gpu gpu;
  CudaDriver& cuda = **LoadCudaDriver();
  const CudaContext other = *CudaContext::Retain(cuda, 1);
  const CudaIpcMemory source = *CudaIpcMemory::Allocate(other, kSourceBytes);
  const CudaIpcMemory busy = *CudaIpcMemory::Allocate(other, kBusyBytes);
  CudaStream stream = nullptr;
  {
    const CudaScope current(other);
    ASSERT_EQ(cuda.StreamCreate(kCudaStreamNonBlocking, &stream), kCudaSuccess);
    ASSERT_EQ(cuda.MemsetD8Async(source.address(), 1, kSourceBytes, stream), kCudaSuccess);
    ASSERT_EQ(cuda.CtxSynchronize(), kCudaSuccess);
  }

  const auto weights = MakeClient(*service).AttachOrPublish(
      EngineSpec(),
      [&](Publisher& publisher) {
        {
          const CudaScope current(other);
          for (int i = 0; i < kBusyRounds; ++i) cuda.MemsetD8Async(busy.address(), 0, kBusyBytes, stream);
          EXPECT_EQ(cuda.MemsetD8Async(source.address(), 7, kSourceBytes, stream), kCudaSuccess);
        }
        return publisher.Add(Described("w", DataType::kU8, {kSourceBytes}),
                             reinterpret_cast<const void*>(source.address()));
      },
      Options());

  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_TRUE(gpu.Read(*weights->Find("w")) == std::string(kSourceBytes, '\7')) << "it was copied too early";
  const CudaScope current(other);
  cuda.StreamDestroy(stream);
}

TEST_P(GpuPublish, MemoryThatIsAllocatedIsWrittenToWithoutACopy) {
  REQUIRE_GPUS(1);
  const auto service = StartWithModel();
  const Gpu gpu;
  PublishTimes times;
  times.copied_bytes = -1;
  PublishOptions options = Options();
  options.on_published = [&](const PublishTimes& published) { times = published; };
  const auto weights = MakeClient(*service).AttachOrPublish(
      EngineSpec(),
      [&](Publisher& publisher) -> Status {
        for (int i = 0; i < 4; ++i) {  // more than one slab
          auto room = publisher.Allocate(Described("w" + std::to_string(i), DataType::kU8, {40 * kMiB}));
          if (!room.ok()) return room.status();
          gpu.Write(reinterpret_cast<CudaDevicePtr>(*room), std::string(4096, static_cast<char>(i + 1)));
        }
        return Status();
      },
      options);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(times.copied_bytes, 0);
  EXPECT_GT(OnlyShard(*service).slabs_size(), 1);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(gpu.Read(weights->Find("w" + std::to_string(i))->data, 4097),
              std::string(4096, static_cast<char>(i + 1)) + std::string(1, '\0'));
  }
  EXPECT_TRUE(weights->Verify().ok());
}

TEST_P(GpuPublish, APublishedSetIsAdoptedByTheNextBrokerAndANewEngineVerifiesIt) {
  REQUIRE_GPUS(1);
  const auto service = StartWithModel();
  const Finished first = RunProgram("publish_engine", PublisherFlags(*service));
  ASSERT_TRUE(first.exit.success()) << first.errors;
  ASSERT_TRUE(KillBroker(*service, SIGKILL));
  const Finished second = RunProgram("publish_engine", PublisherFlags(*service));
  ASSERT_TRUE(second.exit.success()) << second.errors;
  EXPECT_EQ(second.json["source"], "attached");
  EXPECT_EQ(second.json["generation"], first.json["generation"]);
  EXPECT_EQ(second.json["checksum"], first.json["checksum"]);
  EXPECT_TRUE(service->Health()->weight_sets(0).has_adopt_time());
}

TEST_P(GpuPublish, IsSaidToBeItsPublishersToWriteToUntilThatHasExited) {
  REQUIRE_GPUS(1);
  const auto service = StartWithModel();
  Program publisher("publish_engine", PublisherFlags(*service, {"--hold_seconds", "600"}));
  ASSERT_TRUE(publisher.WaitForLine("attached")) << publisher.Errors();
  EXPECT_TRUE(OnlyShard(*service).publisher_writable());
  EXPECT_EQ(OnlyShard(*service).publisher_process_id(), publisher.pid());
  ASSERT_TRUE(KillBroker(*service, SIGKILL));
  EXPECT_TRUE(OnlyShard(*service).publisher_writable()) << "the next broker does not know it";
  publisher.Kill(SIGKILL);
  publisher.Wait();
  EXPECT_TRUE(Eventually([&] { return !OnlyShard(*service).publisher_writable(); }));
  EXPECT_EQ(OnlyShard(*service).publisher_process_id(), 0);
}

TEST_P(GpuPublish, WhatIsWrittenAfterCommitIsFoundByVerifying) {
  REQUIRE_GPUS(1);
  const auto service = StartWithModel();
  const Gpu gpu;
  const std::string bytes = TensorBytes("w", 1'000'000);
  const auto weights = MakeClient(*service).AttachOrPublish(
      EngineSpec(),
      [&](Publisher& publisher) { return publisher.Add(Described("w", DataType::kU8, {1'000'000}), bytes.data()); },
      Options());
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  ASSERT_TRUE(weights->Verify().ok());

  if (GetParam() == v1::HANDLE_KIND_CUDA_IPC) {
    gpu.Write(reinterpret_cast<CudaDevicePtr>(weights->Find("w")->data) + 17, "x");
  } else {
    const auto connection = *client::Connection::Open({.socket_path = service->socket()});
    v1::ExportRequest request;
    request.set_fingerprint(weights->fingerprint());
    request.set_hold(true);
    grpc::ClientContext context;
    const auto stream = connection->service().Export(&context, request);
    v1::ExportResponse response;
    ASSERT_TRUE(stream->Read(&response));
    const auto fds =
        client::RedeemTicket(service->socket(), response.header().ticket(), 1, client::DeadlineIn(kPatience));
    ASSERT_THAT(fds, IsOk());
    const int64_t size_bytes = response.header().slabs(0).size_bytes();
    const auto memory = CudaVmmMemory::Import(gpu.context(), (*fds)[0].get(), size_bytes);
    ASSERT_THAT(memory, IsOk());
    CudaReservation range = *CudaReservation::Reserve(gpu.context(), size_bytes);
    ASSERT_THAT(range.Map(0, *memory, CudaAccess::kReadWrite), IsOk());
    gpu.Write(range.address() + 17, "x");
    context.TryCancel();
  }

  const Status verified = weights->Verify();
  EXPECT_EQ(verified.reason(), "DIGEST_MISMATCH");
  EXPECT_EQ(verified.metadata().at("tensor"), "w");
}

using GpuPublishRefusal = GpuTest;

TEST_F(GpuPublishRefusal, SaysThatTheEngineHasNoSuchGpu) {
  REQUIRE_GPUS(1);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "m");
  const Finished engine =
      RunProgram("publish_engine",
                 service->StubEngineFlags("m", {"--model_folder", service->ModelFolder("m"), "--cuda_device", "99"}));
  EXPECT_EQ(engine.exit.code, 3) << engine.errors;
  EXPECT_EQ(engine.json["reason"], "DEVICE_UNKNOWN");
}

TEST_F(GpuPublishRefusal, SaysThatTheServiceHasNoGpu) {
  REQUIRE_GPUS(1);
  const auto service = StartService({"--devices=host"});
  WriteSmallGpuModel(*service, "m");
  const Finished engine =
      RunProgram("publish_engine",
                 service->StubEngineFlags("m", {"--model_folder", service->ModelFolder("m"), "--cuda_device", "0"}));
  EXPECT_EQ(engine.exit.code, 3) << engine.errors;
  EXPECT_THAT(engine.json["reason"].get<std::string>(), ::testing::AnyOf("GPU_UNAVAILABLE", "DEVICE_UNKNOWN"));
  EXPECT_THAT(engine.json["message"].get<std::string>(), HasSubstr("GPU"));
}

TEST_F(GpuPublishRefusal, SaysThatTheRankIsOnAnotherGpuThanTheEngine) {
  REQUIRE_GPUS(2);
  const auto service = StartService();
  WriteSmallGpuModel(*service, "m");
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = service->socket();
  WeightSpec spec;
  spec.model = Service::Model("m");
  spec.layout = "engine";
  spec.engine = "test_engine";
  spec.engine_version = "7";
  PublishOptions publish;
  publish.attach.cuda_device = 0;
  publish.attach.devices = {Uuid(1)};
  publish.expected_bytes = kMiB;
  const auto weights = Client::Create(options)->AttachOrPublish(
      spec, [](Publisher&) { return Status(); }, publish);
  EXPECT_EQ(weights.status().reason(), "DEVICE_MISMATCH");
  EXPECT_THAT(weights.status().message(), HasSubstr(Uuid(0)));
  EXPECT_THAT(weights.status().message(), HasSubstr(Uuid(1)));
}

}  // namespace
}  // namespace weightbroker::testing
