// Tests on real GPUs: a service that puts weights on them, engines in processes of their own, and what NVML says.
//
//   TEST_F(GpuTest, ...) {
//     REQUIRE_GPUS(1);
//     const Service service = StartService();
//     ...
//   }
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/device/cuda_context.h"
#include "common/device/cuda_driver.h"
#include "common/device/gpu_inventory.h"
#include "tests/integration/program.h"
#include "tests/integration/service.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::testing {

inline constexpr int64_t kMiB = 1 << 20;

// Skips the test, saying why, where there are fewer; fails it where WEIGHTBROKER_REQUIRE_GPUS says that there are as
// many.
#define REQUIRE_GPUS(count)                                          \
  do {                                                               \
    if (const std::string lack = LackOfGpus(count); !lack.empty()) { \
      if (AreRequired(count)) FAIL() << lack;                        \
      GTEST_SKIP() << lack;                                          \
    }                                                                \
  } while (false)

class GpuTest : public ::testing::Test {
 protected:
  // Empty if this machine has `count` GPUs that can be used; else why not.
  static std::string LackOfGpus(int count);
  static bool AreRequired(int count);

  // By PCI address, as engines of these tests count, too.
  static std::vector<GpuInfo> Gpus();
  static std::string Uuid(int index = 0) { return Gpus().at(static_cast<size_t>(index)).uuid; }
  static int64_t FreeBytes(int index = 0);
  // Once what the tests before this one held has gone: contexts go later than their processes.
  static int64_t SettledFreeBytes(int index = 0);
  // Whether that much of the GPU is free again before patience ends; the driver may keep some MiB.
  static bool ComesBackTo(int64_t free_bytes, int index = 0);

  // A service that may use every GPU.
  static std::unique_ptr<Service> StartService(const std::vector<std::string>& flags = {});

  // The broker that answers.
  static pid_t BrokerOf(const Service& service);
  // Whether another broker than `killed` answers, in time.
  static bool IsReplaced(const Service& service, pid_t killed);

  // Registers, and waits until it is resident. Empty `devices`: the first GPU.
  static absl::StatusOr<v1::WeightSet> RegisterOnGpu(const Service& service, const std::string& model,
                                                     v1::HandleKind kind = v1::HANDLE_KIND_CUDA_VMM_FD,
                                                     const std::vector<std::string>& devices = {});

  // Flags for a gpu_engine on the first GPU.
  static std::vector<std::string> EngineFlags(const Service& service, const std::string& model,
                                              const std::vector<std::string>& more = {});

  // Has an engine verify its weights; whether it says that they are right.
  static ::testing::AssertionResult Verifies(Program& engine);
};

// A few tensors of different types, shapes and sizes.
void WriteSmallGpuModel(const Service& service, const std::string& model);

// Takes all of a GPU's free memory but `leave_bytes`, until it goes, and writes to every byte of it: what is read of
// memory that has been given back is wrong then.
class FilledGpu {
 public:
  FilledGpu(const std::string& uuid, int64_t leave_bytes);
  ~FilledGpu();
  FilledGpu(const FilledGpu&) = delete;
  FilledGpu& operator=(const FilledGpu&) = delete;

 private:
  const CudaContext context_;
  CudaDevicePtr taken_ = 0;
};

}  // namespace weightbroker::testing
