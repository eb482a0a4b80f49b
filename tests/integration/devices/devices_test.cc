// Real processes on a machine with two GPUs, one of them partitioned, that NVML knows and CUDA does not: the loader
// finds that out, and nobody else is harmed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/device/cuda_driver.h"
#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kFirst[] = "GPU-00000001-0000-0000-0000-000000000000";
constexpr char kSecond[] = "GPU-00000002-0000-0000-0000-000000000000";

class DevicesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (LoadCudaDriver().ok()) GTEST_SKIP() << "this machine has a GPU of its own";
  }

  static absl::StatusOr<v1::WeightSet> RegisterAs(const Service& service, v1::HandleKind kind) {
    v1::RegisterRequest request;
    request.mutable_spec()->set_model(Service::Model("m"));
    request.mutable_environment()->set_torch_version("any");
    request.add_handle_kinds(kind);
    return service.Register(request);
  }
};

TEST_F(DevicesTest, AreListedWithWhatIsOfferedOnThemAndWhyOneIsLeftOut) {
  const Service service;
  const auto health = service.Health();
  ASSERT_THAT(health, IsOk());
  ASSERT_THAT(health->devices(), SizeIs(2));
  EXPECT_EQ(health->devices(0).uuid(), kFirst);
  EXPECT_EQ(health->devices(0).compute_capability(), "9.0");
  EXPECT_THAT(health->devices(0).refusal(), IsEmpty());
  EXPECT_THAT(health->devices(1).refusal(), HasSubstr("MIG"));
  EXPECT_EQ(health->driver_version(), "580.00.1");
  EXPECT_THAT(health->handle_kinds(),
              ElementsAre(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC, v1::HANDLE_KIND_HOST_MEMFD));
  const Finished tool = RunProgram("weightbroker", service.ToolFlags("health"));
  EXPECT_THAT(tool.output, AllOf(HasSubstr(kFirst), HasSubstr("8.0 GiB"), HasSubstr("partitioned")));
}

TEST_F(DevicesTest, FailALoadAloneWhereThereIsNoCudaSayingWhatTheSystemSaid) {
  const Service service;
  CheckpointBuilder().Tensor("a", "BF16", {4, 4}).Write(service.NewModel("m"));
  EXPECT_THAT(RegisterAs(service, v1::HANDLE_KIND_CUDA_VMM_FD),
              StatusIs(Reason::kGpuUnavailable, HasSubstr("libcuda.so.1")));
  EXPECT_THAT(RegisterAs(service, v1::HANDLE_KIND_CUDA_IPC),
              StatusIs(Reason::kGpuUnavailable, HasSubstr("libcuda.so.1")));
  EXPECT_EQ(service.Health()->reserved_bytes(), 0);
  EXPECT_THAT(RegisterAs(service, v1::HANDLE_KIND_HOST_MEMFD), IsOk());
}

TEST_F(DevicesTest, ThatAreNamedAndCannotBeUsedKeepTheServiceFromStarting) {
  const TemporaryFolder folder;
  const auto start = [&](const std::string& device) {
    return RunProgram("weightbrokerd", {"--socket", folder / "s.sock", "--metrics_address=", "--devices", device});
  };
  const Finished partitioned = start(kSecond);
  EXPECT_EQ(partitioned.exit.code, 1);
  EXPECT_THAT(partitioned.errors, AllOf(HasSubstr(kSecond), HasSubstr("MIG")));
  const Finished missing = start("7");
  EXPECT_EQ(missing.exit.code, 1);
  EXPECT_THAT(missing.errors, AllOf(HasSubstr("the GPU 7"), HasSubstr(kFirst)));
}

}  // namespace
}  // namespace weightbroker::testing
