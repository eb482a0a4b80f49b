#include "common/desired/desired_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TemporaryFolder;

constexpr char kFile[] = "sets.json";

DesiredState StateOf(const std::vector<std::string>& models) {
  DesiredState state;
  for (const std::string& model : models) state.sets.emplace_back().model = model;
  return state;
}

TEST(CheckModelRoots, TakesThoseOfTheServiceAndAbsolutePaths) {
  EXPECT_THAT(CheckModelRoots(StateOf({"a:m", "b:m/n:o", "/srv/c:m"}), {"a", "b"}, kFile), IsOk());
}

TEST(CheckModelRoots, RefusesARootThatIsNotThereWithThoseThatAre) {
  EXPECT_THAT(
      CheckModelRoots(StateOf({"a:m", "c:m"}), {"a", "b"}, kFile),
      AllOf(StatusIs(Reason::kConfigurationInvalid,
                     HasSubstr("sets.json: /sets/1/model: there is no model root \"c\"; there are: a, b")),
            HasMetadata("pointer", "/sets/1/model"), HasMetadata("found", "c"), HasMetadata("allowed", "a, b")));
  EXPECT_THAT(CheckModelRoots(StateOf({"c:m"}), {}, kFile),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("there are: none (--model_roots)")));
}

TEST(CheckModelNames, RefuseWhatIsNeitherUnderARootNorAPath) {
  for (const char* model : {"m", ":m", "m/n"}) {
    EXPECT_THAT(CheckModelNames(StateOf({model}), kFile),
                StatusIs(Reason::kConfigurationInvalid, HasSubstr("is neither root:relative/path nor")))
        << model;
  }
  EXPECT_THAT(CheckModelNames(StateOf({"any:m"}), kFile), IsOk());
}

TEST(CheckDesiredFile, FindsWhatEachOfItsChecksFinds) {
  const TemporaryFolder folder;
  const std::string file = folder / kFile;
  const auto check = [&](const std::string& text) {
    testing::WriteFile(file, text);
    return CheckDesiredFile(RealFileSystem(), file, {"a"});
  };
  const std::string set = R"({"model": "a:m", "torch_version": "any", "name": )";
  EXPECT_THAT(check(R"({"version": 1, "sets": [)" + set + R"("x"}]})"), IsOk());
  EXPECT_THAT(check("{"), StatusIs(Reason::kConfigurationInvalid));
  EXPECT_THAT(check(R"({"version": 1, "sets": [)" + set + R"("x"}, )" + set + R"("y"}]})"),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("/sets/1: \"y\" is the same weights as \"x\"")));
  EXPECT_THAT(check(R"({"version": 1, "sets": [{"model": "b:m", "torch_version": "any", "name": "x"}]})"),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("there is no model root \"b\"")));
}

}  // namespace
}  // namespace weightbroker
