#include "server/config/gpu_uuid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/temp_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using ::weightbroker::testing::TempFolder;

constexpr char kFirst[] = "GPU-11111111-2222-3333-4444-555555555555";
constexpr char kSecond[] = "GPU-66666666-2222-3333-4444-555555555555";

// A /proc as the driver fills it.
class ExpandGpuUuidTest : public ::testing::Test {
 protected:
  void AddGpu(const std::string& pci_address, const std::string& uuid) {
    const std::string gpu = proc_.path() + "/driver/nvidia/gpus/" + pci_address;
    std::filesystem::create_directories(gpu);
    std::ofstream(gpu + "/information") << "Model: \t\t Fake\nIRQ:   \t\t 17\nGPU UUID: \t " << uuid << "\n";
  }

  absl::StatusOr<std::string> Expand(const std::vector<std::string>& devices) {
    return ExpandGpuUuid("/run/wb/{gpu_uuid}.sock", devices, proc_.path());
  }

  std::string WhyNot(const std::vector<std::string>& devices) {
    return std::string(Expand(devices).status().message());
  }

  const TempFolder proc_;
};

TEST_F(ExpandGpuUuidTest, LeavesTextWithoutItAlone) {
  EXPECT_EQ(*ExpandGpuUuid("/run/wb.sock", {"0", "1"}, proc_.path()), "/run/wb.sock");
}

TEST_F(ExpandGpuUuidTest, TakesAUuidAsItIsWithoutAskingAnybody) {
  EXPECT_EQ(*Expand({kFirst}), std::string("/run/wb/") + kFirst + ".sock");
}

TEST_F(ExpandGpuUuidTest, FindsTheUuidOfANumberInTheOrderOfPciAddresses) {
  AddGpu("0000:d1:00.0", kSecond);
  AddGpu("0000:0f:00.0", kFirst);
  EXPECT_EQ(*Expand({"0"}), std::string("/run/wb/") + kFirst + ".sock");
  EXPECT_EQ(*Expand({"1"}), std::string("/run/wb/") + kSecond + ".sock");
}

TEST_F(ExpandGpuUuidTest, RefusesANumberThatTheDriverDoesNotHave) {
  AddGpu("0000:0f:00.0", kFirst);
  EXPECT_THAT(WhyNot({"1"}), HasSubstr("the driver lists 1 GPUs"));
}

TEST_F(ExpandGpuUuidTest, RefusesAGpuWhoseUuidTheDriverDoesNotKnowYet) {
  AddGpu("0000:0f:00.0", "GPU-" + std::string(36, '?'));
  EXPECT_THAT(WhyNot({"0"}), HasSubstr("give the GPU's UUID"));
}

TEST_F(ExpandGpuUuidTest, RefusesMoreThanOneGpuAndNone) {
  EXPECT_THAT(WhyNot({"0", "1"}), HasSubstr("--devices names 2"));
  EXPECT_THAT(WhyNot({"all"}), HasSubstr("--devices is all"));
  EXPECT_THAT(WhyNot({"host"}), HasSubstr("--devices is host"));
}

}  // namespace
}  // namespace weightbroker
