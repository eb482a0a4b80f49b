#include "common/desired/desired_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr char kFile[] = "sets.json";

DesiredSet SetNamed(const std::string& name) {
  DesiredSet set;
  set.name = name;
  set.model = "models:m";
  set.torch_version = "any";
  return set;
}

TEST(DesiredRequests, SayWhatTheFileSays) {
  DesiredSet set = SetNamed("a");
  set.tensor_parallel_size = 2;
  set.pipeline_parallel_size = 2;
  set.data_parallel_size = 3;
  set.expert_parallel_size = 6;
  set.quantization = "fp8_block";
  set.unquantized_modules = {"lm_head"};
  set.dtype = "F16";
  set.layout = "fused";
  set.mtp_layers = "drop";
  set.ranks = {0, 11};
  set.devices = {"host", "host"};
  set.handle_kinds = {"CUDA_IPC", "HOST_MEMFD"};
  const auto requests = ToRegisterRequests({.sets = {set}, .aliases = {}}, kFile);
  ASSERT_THAT(requests, IsOk());
  ASSERT_THAT(*requests, SizeIs(1));
  const v1::RegisterRequest& request = requests->front();
  EXPECT_EQ(request.spec().model(), "models:m");
  EXPECT_EQ(request.spec().tensor_parallel_size(), 2);
  EXPECT_EQ(request.spec().pipeline_parallel_size(), 2);
  EXPECT_EQ(request.spec().data_parallel_size(), 3);
  EXPECT_EQ(request.spec().expert_parallel_size(), 6);
  EXPECT_EQ(request.spec().quantization(), "fp8_block");
  EXPECT_THAT(request.spec().unquantized_modules(), ElementsAre("lm_head"));
  EXPECT_EQ(request.spec().dtype(), "F16");
  EXPECT_EQ(request.spec().layout(), "fused");
  EXPECT_EQ(request.spec().mtp_layers(), "drop");
  EXPECT_EQ(request.environment().torch_version(), "any");
  EXPECT_THAT(request.ranks(), ElementsAre(0, 11));
  EXPECT_THAT(request.devices(), ElementsAre("host", "host"));
  EXPECT_THAT(request.handle_kinds(), ElementsAre(v1::HANDLE_KIND_CUDA_IPC, v1::HANDLE_KIND_HOST_MEMFD));
}

TEST(DesiredRequests, RefuseASpecThatNoModelCouldMakeSenseOf) {
  DesiredSet set = SetNamed("b");
  set.tensor_parallel_size = 2;
  set.expert_parallel_size = 3;
  EXPECT_THAT(ToRegisterRequests({.sets = {SetNamed("a"), set}, .aliases = {}}, kFile),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("sets.json: /sets/1: ")));
}

TEST(DesiredRequests, RefuseRanksThatTheSpecDoesNotHaveAndDevicesThatAreTooFew) {
  DesiredSet set = SetNamed("a");
  set.tensor_parallel_size = 2;
  set.ranks = {1, 2};
  const auto wrong = ToRegisterRequests({.sets = {set}, .aliases = {}}, kFile);
  EXPECT_THAT(wrong, StatusIs(Reason::kConfigurationInvalid, HasSubstr("is 2, and the set's ranks are 0 to 1")));
  EXPECT_THAT(wrong, HasMetadata("pointer", std::string("/sets/0/ranks/1")));
  set.ranks = {};
  set.devices = {"host"};
  EXPECT_THAT(ToRegisterRequests({.sets = {set}, .aliases = {}}, kFile),
              HasMetadata("pointer", std::string("/sets/0/devices")));
}

TEST(DesiredRequests, RefuseASetThatIsTheSameAsAnother) {
  DesiredSet same = SetNamed("b");
  same.tensor_parallel_size = 1;  // what nothing said comes to
  EXPECT_THAT(
      ToRegisterRequests({.sets = {SetNamed("a"), same}, .aliases = {}}, kFile),
      StatusIs(Reason::kConfigurationInvalid, HasSubstr("/sets/1: \"b\" is the same weights as \"a\" at /sets/0")));
  same.torch_version = "2.11.0";
  EXPECT_THAT(ToRegisterRequests({.sets = {SetNamed("a"), same}, .aliases = {}}, kFile), IsOk());
}

TEST(DesiredRequests, RefuseTwoSetsThatDifferOnlyInWhatOfThemIsHeldWhere) {
  DesiredSet first = SetNamed("a");
  first.tensor_parallel_size = 2;
  const auto check = [&](const DesiredSet& second) {
    return ToRegisterRequests({.sets = {first, second}, .aliases = {}}, kFile);
  };
  DesiredSet second = first;
  second.name = "b";
  second.ranks = {1};
  EXPECT_THAT(check(second), StatusIs(Reason::kConfigurationInvalid, HasSubstr("\"b\" is the same weights as \"a\"")));
  first.devices = {"GPU-a", "GPU-b"};
  second.devices = {"GPU-c"};
  EXPECT_THAT(check(second), StatusIs(Reason::kConfigurationInvalid));
  second.ranks = {};
  second.devices = {"host", "host"};
  EXPECT_THAT(check(second), IsOk()) << "what is on GPUs is another weight set";
}

TEST(DesiredRequests, RefuseBesideASetOneThatMayComeToLieOnTheSameKindOfDevices) {
  const auto check = [](const std::vector<std::string>& first_kinds, const std::vector<std::string>& second_kinds) {
    DesiredSet first = SetNamed("a");
    first.handle_kinds = first_kinds;
    DesiredSet second = SetNamed("b");
    second.handle_kinds = second_kinds;
    return ToRegisterRequests({.sets = {first, second}, .aliases = {}}, kFile);
  };
  const auto refused = StatusIs(Reason::kConfigurationInvalid, HasSubstr("is the same weights as \"a\""));
  EXPECT_THAT(check({"HOST_MEMFD"}, {"CUDA_IPC"}), IsOk());
  EXPECT_THAT(check({}, {"HOST_MEMFD"}), refused);
  EXPECT_THAT(check({"CUDA_IPC"}, {}), refused);
  EXPECT_THAT(check({"CUDA_IPC"}, {"CUDA_VMM_FD", "HOST_MEMFD"}), refused);
}

TEST(DesiredRequests, RefuseASetWhoseModelIsTheSameWrittenOtherwise) {
  const auto check = [](const std::string& first_model, const std::string& second_model) {
    DesiredSet first = SetNamed("a");
    first.model = first_model;
    DesiredSet second = SetNamed("b");
    second.model = second_model;
    return ToRegisterRequests({.sets = {first, second}, .aliases = {}}, kFile);
  };
  for (const char* const model : {"models:./a/b", "models:a//b", "models:a/b/", "models:/a/./b/."}) {
    EXPECT_THAT(check("models:a/b", model), StatusIs(Reason::kConfigurationInvalid)) << model;
  }
  EXPECT_THAT(check("/srv/a", "//srv/./a/"), StatusIs(Reason::kConfigurationInvalid));
  for (const char* const model : {"others:a/b", "models:a", "models:c/../a/b", "/a/b"}) {
    EXPECT_THAT(check("models:a/b", model), IsOk()) << model;
  }
}

}  // namespace
}  // namespace weightbroker
