// Every fault that can be planted is refused with the reason that its row says, and nothing without one is.

#include "common/synthetic/faults.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "client/tool/inspect.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::SizeIs;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::TemporaryFolder;

InspectReport InspectWith(const CheckpointFault& fault, const ModelRequest& request, const std::string& folder) {
  auto draft = DraftModel(fault.Prepare(request));
  EXPECT_THAT(draft, IsOk());
  fault.plant(*draft);
  EXPECT_THAT(WriteCheckpoint(*draft, folder, {}), IsOk());
  return InspectFolder(RealFileSystem(), folder);
}

class FaultTest : public ::testing::TestWithParam<CheckpointFault> {};

TEST_P(FaultTest, IsRefusedWithItsReason) {
  const TemporaryFolder dir;
  const InspectReport report = InspectWith(GetParam(), {.model = "llama"}, dir / "model");
  EXPECT_EQ(report.reason, ReasonName(GetParam().reason)) << report.message;
  EXPECT_FALSE(report.ok);
}

TEST_P(FaultTest, IsTheOnlyOneInItsCheckpoint) {
  const TemporaryFolder dir;
  const auto draft = DraftModel(GetParam().Prepare({.model = "llama"}));
  ASSERT_THAT(draft, IsOk());
  ASSERT_THAT(WriteCheckpoint(*draft, dir / "model", {}), IsOk());
  EXPECT_EQ(InspectFolder(RealFileSystem(), dir / "model").reason, "OK");
}

TEST_P(FaultTest, IsRefusedInAModelOfSeveralFilesToo) {
  const TemporaryFolder dir;
  const ModelRequest request{.model = "qwen3_moe", .fp8 = true, .shard_count = 4};
  EXPECT_EQ(InspectWith(GetParam(), request, dir / "model").reason, ReasonName(GetParam().reason));
}

INSTANTIATE_TEST_SUITE_P(Faults, FaultTest, ::testing::ValuesIn(CheckpointFaults().begin(), CheckpointFaults().end()),
                         [](const auto& fault) { return std::string(fault.param.name); });

TEST(CheckpointFaults, CoverEveryReasonForWhichACheckpointIsRefusedByItsHeaders) {
  std::set<Reason> reasons;
  for (const CheckpointFault& fault : CheckpointFaults()) reasons.insert(fault.reason);
  for (const Reason reason :
       {Reason::kCheckpointIncomplete, Reason::kCheckpointUnreadable, Reason::kCheckpointTruncated,
        Reason::kCheckpointMalformed, Reason::kCheckpointNotSafetensors, Reason::kCheckpointTooLarge,
        Reason::kCheckpointEmpty, Reason::kCheckpointIndexMismatch, Reason::kCheckpointPathUnsafe,
        Reason::kDtypeUnsupported, Reason::kConfigMalformed, Reason::kQuantizationUnsupported,
        Reason::kQuantizationMalformed, Reason::kQuantizationConflict, Reason::kQuantizationContradicted}) {
    EXPECT_TRUE(reasons.contains(reason)) << ReasonName(reason);
  }
}

TEST(CheckpointFaults, HaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const CheckpointFault& fault : CheckpointFaults()) names.insert(fault.name);
  EXPECT_THAT(names, SizeIs(CheckpointFaults().size()));
  EXPECT_EQ(FindFault("no such fault"), nullptr);
  EXPECT_THAT(FindFault("hole"), ::testing::NotNull());
}

}  // namespace
}  // namespace weightbroker
