#include "tests/gpu/gpu_fixture.h"

#include <csignal>
#include <cstdlib>
#include <map>

#include "absl/strings/str_cat.h"
#include "client/src/attach.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {
namespace {

constexpr int64_t kDriverKeepsBytes = 16 * kMiB;

GpuInventory* Inventory() {
  static auto* const inventory = new absl::StatusOr<std::unique_ptr<GpuInventory>>(OpenNvml());
  return inventory->ok() ? (*inventory)->get() : nullptr;
}

}  // namespace

std::string GpuTest::LackOfGpus(int count) {
  if (Inventory() == nullptr) return "there is no NVIDIA driver here (libnvidia-ml.so.1 cannot be used)";
  const auto gpus = Inventory()->List();
  if (!gpus.ok()) return std::string(gpus.status().message());
  if (static_cast<int>(gpus->size()) >= count) return "";
  return absl::StrCat("the test needs ", count, " GPUs, and this machine has ", gpus->size());
}

bool GpuTest::AreRequired(int count) {
  const char* required = getenv("WEIGHTBROKER_REQUIRE_GPUS");
  return required != nullptr && atoi(required) >= count;
}

std::vector<GpuInfo> GpuTest::Gpus() { return Inventory()->List().value(); }

int64_t GpuTest::FreeBytes(int index) { return Inventory()->Memory(Uuid(index))->free_bytes; }

int64_t GpuTest::SettledFreeBytes(int index) {
  constexpr int kQuietLooks = 5;
  int64_t free_bytes = FreeBytes(index);
  int quiet = 0;
  EXPECT_TRUE(Eventually([&] {
    const int64_t now = FreeBytes(index);
    quiet = now == free_bytes && Inventory()->Processes(Uuid(index))->empty() ? quiet + 1 : 0;
    free_bytes = now;
    return quiet == kQuietLooks;
  })) << DescribeHolders(*Inventory()->Processes(Uuid(index)));
  return free_bytes;
}

bool GpuTest::ComesBackTo(int64_t free_bytes, int index) {
  return Eventually([&] { return FreeBytes(index) >= free_bytes - kDriverKeepsBytes; });
}

std::unique_ptr<Service> GpuTest::StartService(const std::vector<std::string>& flags) {
  return std::make_unique<Service>(flags);
}

pid_t GpuTest::BrokerOf(const Service& service) { return static_cast<pid_t>(service.Health()->process_id()); }

bool GpuTest::IsReplaced(const Service& service, pid_t killed) {
  return Eventually([&] {
    const auto health = service.Health();
    return health.ok() && health->process_id() != killed;
  });
}

absl::StatusOr<v1::WeightSet> GpuTest::RegisterOnGpu(const Service& service, const std::string& model,
                                                     v1::HandleKind kind, const std::vector<std::string>& devices) {
  auto connection = client::Connection::Open({.socket_path = service.socket()});
  if (!connection.ok()) return connection.status();
  v1::RegisterRequest request;
  request.mutable_spec()->set_model(Service::Model(model));
  request.mutable_spec()->set_tensor_parallel_size(static_cast<int>(std::max<size_t>(1, devices.size())));
  request.mutable_environment()->set_torch_version("any");
  request.add_handle_kinds(kind);
  for (const std::string& device : devices) request.add_devices(device);
  if (devices.empty()) request.add_devices(Uuid(0));
  request.set_wait(true);
  return client::RegisterAndWait(**connection, request, client::DeadlineIn(kPatience), nullptr);
}

std::vector<std::string> GpuTest::EngineFlags(const Service& service, const std::string& model,
                                              const std::vector<std::string>& more) {
  std::vector<std::string> flags = {"--socket", service.socket(), "--model", Service::Model(model)};
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

::testing::AssertionResult GpuTest::Verifies(Program& engine) {
  static std::map<pid_t, int> asked;
  const int count = ++asked[engine.pid()];
  engine.Kill(SIGUSR1);
  if (engine.WaitForLine(absl::StrCat("verified ", count, "\n"))) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << engine.Output() << engine.Errors();
}

void WriteSmallGpuModel(const Service& service, const std::string& model) {
  CheckpointBuilder()
      .Tensor("bias", "F32", {3})
      .Tensor("embedding", "BF16", {1000, 777})
      .Tensor("empty", "F32", {0, 4})
      .Tensor("large", "U8", {9'000'001})
      .Tensor("scalar", "I64", {})
      .Write(service.NewModel(model));
}

FilledGpu::FilledGpu(const std::string& uuid, int64_t leave_bytes)
    : context_(*CudaContext::Retain(**LoadCudaDriver(), *FindCudaDevice(**LoadCudaDriver(), uuid))) {
  const CudaScope current(context_);
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  EXPECT_EQ(context_.driver().MemGetInfo(&free_bytes, &total_bytes), kCudaSuccess);
  const size_t size_bytes = free_bytes - static_cast<size_t>(leave_bytes);
  EXPECT_EQ(context_.driver().MemAlloc(size_bytes, &taken_), kCudaSuccess);
  EXPECT_EQ(context_.driver().MemsetD8Async(taken_, 0xA5, size_bytes, nullptr), kCudaSuccess);
  EXPECT_EQ(context_.driver().CtxSynchronize(), kCudaSuccess);
}

FilledGpu::~FilledGpu() {
  const CudaScope current(context_);
  context_.driver().MemFree(taken_);
}

}  // namespace weightbroker::testing
