// A driver that lacks what is needed, as a library of its name.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/device/cuda_driver.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::StatusIs;

TEST(LoadCudaDriver, RefusesADriverThatIsTooOldNamingTheCallAndTheVersion) {
  EXPECT_THAT(LoadCudaDriver(), AllOf(StatusIs(Reason::kDriverTooOld, HasSubstr("is for CUDA 10.1 and has no cuInit")),
                                      HasMetadata("call", "cuInit"), HasMetadata("driver_version", "10.1")));
}

}  // namespace
}  // namespace weightbroker
