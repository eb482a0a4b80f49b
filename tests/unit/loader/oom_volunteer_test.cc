#include "server/loader/oom_volunteer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

constexpr char kOwnScore[] = "/proc/self/oom_score_adj";

std::string Read(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

TEST(OomVolunteer, IsTheFirstChoiceUntilItWithdrawsAndThenWhatItWasBefore) {
  const TemporaryFolder folder;
  WriteFile(folder / "oom_score_adj", "-250\n");
  OomVolunteer volunteer(folder / "oom_score_adj");
  EXPECT_EQ(Read(folder / "oom_score_adj"), "1000");

  EXPECT_THAT(volunteer.Withdraw(), IsOk());

  EXPECT_EQ(Read(folder / "oom_score_adj"), "-250");
}

// Of this test's own process.
TEST(OomVolunteer, IsAllowedToDoBothByTheKernel) {
  const std::string before = Read(kOwnScore);
  OomVolunteer volunteer;
  EXPECT_EQ(Read(kOwnScore), "1000");

  EXPECT_THAT(volunteer.Withdraw(), IsOk());

  EXPECT_EQ(Read(kOwnScore), before);
}

TEST(OomVolunteer, SaysWhereItCannotWithdraw) {
  const TemporaryFolder folder;
  OomVolunteer volunteer(folder / "none/oom_score_adj");

  EXPECT_THAT(volunteer.Withdraw(), StatusIs(Reason::kSystemError, HasSubstr("none/oom_score_adj")));
}

}  // namespace
}  // namespace weightbroker
