#include "common/desired/desired_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;
using ::testing::StartsWith;
using testing::StatusIs;
using testing::TemporaryFolder;
using testing::WriteFile;
using Json = nlohmann::json;

constexpr char kFile[] = "/etc/weightbroker/sets.json";

Json SetNamed(const std::string& name) { return {{"name", name}, {"model", "models:m"}, {"torch_version", "any"}}; }

Json Document(const Json& set) { return {{"version", 1}, {"sets", Json::array({set})}}; }

absl::StatusOr<DesiredState> Parse(const Json& json) { return ParseDesiredState(json.dump(), kFile); }

// A set with one more key.
absl::StatusOr<DesiredState> ParseWith(const std::string& key, const Json& value) {
  Json set = SetNamed("a");
  set[key] = value;
  return Parse(Document(set));
}

// Wrong, there, naming what was found and what is allowed.
auto WrongAt(const std::string& pointer, const std::string& found, const std::string& allowed) {
  return AllOf(StatusIs(Reason::kConfigurationInvalid, HasSubstr(std::string(kFile) + ": " + pointer)),
               HasMetadata("source", std::string(kFile)), HasMetadata("pointer", pointer), HasMetadata("found", found),
               HasMetadata("allowed", allowed));
}

TEST(DesiredStateFile, SaysAllThatARegisterCan) {
  const auto desired = ParseDesiredState(R"({
    "version": 1,
    "sets": [
      {"name": "llama", "model": "models:llama", "torch_version": "2.11.0", "tensor_parallel_size": 2,
       "pipeline_parallel_size": 3, "expert_parallel_size": 4, "data_parallel_size": 5, "quantization": "fp8_block",
       "unquantized_modules": ["lm_head"], "dtype": "BF16", "layout": "fused", "mtp_layers": "drop", "ranks": [0, 3],
       "devices": ["host", "host"], "handle_kinds": ["HOST_MEMFD"]},
      {"name": "small", "model": "/srv/models/small", "torch_version": "any"}
    ],
    "aliases": {"llama@live": "llama", "llama@next": "llama"}
  })",
                                         kFile);
  ASSERT_THAT(desired, IsOk());
  ASSERT_THAT(desired->sets, SizeIs(2));
  const DesiredSet& set = desired->sets[0];
  EXPECT_EQ(set.name, "llama");
  EXPECT_EQ(set.model, "models:llama");
  EXPECT_EQ(set.torch_version, "2.11.0");
  EXPECT_EQ(set.tensor_parallel_size, 2);
  EXPECT_EQ(set.pipeline_parallel_size, 3);
  EXPECT_EQ(set.expert_parallel_size, 4);
  EXPECT_EQ(set.data_parallel_size, 5);
  EXPECT_EQ(set.quantization, "fp8_block");
  EXPECT_THAT(set.unquantized_modules, ElementsAre("lm_head"));
  EXPECT_EQ(set.dtype, "BF16");
  EXPECT_EQ(set.layout, "fused");
  EXPECT_EQ(set.mtp_layers, "drop");
  EXPECT_THAT(set.ranks, ElementsAre(0, 3));
  EXPECT_THAT(set.devices, ElementsAre("host", "host"));
  EXPECT_THAT(set.handle_kinds, ElementsAre("HOST_MEMFD"));
  EXPECT_EQ(desired->sets[1].tensor_parallel_size, 0);
  EXPECT_THAT(desired->aliases, ElementsAre(Pair("llama@live", "llama"), Pair("llama@next", "llama")));
}

TEST(DesiredStateFile, MayAskForNothing) {
  const auto desired = ParseDesiredState(R"({"version": 1, "sets": []})", kFile);
  ASSERT_THAT(desired, IsOk());
  EXPECT_THAT(desired->sets, SizeIs(0));
}

TEST(DesiredStateFile, ThatIsTheExampleIsValid) {
  EXPECT_THAT(ReadDesiredFile(RealFileSystem(), WEIGHTBROKER_SOURCE "/deploy/desired/sets.json.example"), IsOk());
}

TEST(DesiredStateFile, RefusesWhatIsNoJsonOrHasAKeyTwice) {
  EXPECT_THAT(ParseDesiredState("{", kFile), StatusIs(Reason::kConfigurationInvalid, HasSubstr(kFile)));
  EXPECT_THAT(ParseDesiredState(R"({"version": 1, "version": 1, "sets": []})", kFile),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("the key \"version\" is there twice")));
  EXPECT_THAT(ParseDesiredState(R"({"version": 1, "sets": [], "aliases": {"a@b": "c", "a@b": "d"}})", kFile),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("\"a@b\" is there twice")));
  EXPECT_THAT(ParseDesiredState("[]", kFile), WrongAt("", "array", "an object"));
}

TEST(DesiredStateFile, RefusesAnotherVersionOrNone) {
  EXPECT_THAT(Parse({{"version", 2}, {"sets", Json::array()}}), WrongAt("/version", "2", "1"));
  EXPECT_THAT(Parse({{"version", "1"}, {"sets", Json::array()}}), WrongAt("/version", "\"1\"", "1"));
  EXPECT_THAT(Parse({{"sets", Json::array()}}), WrongAt("", "nothing", "version"));
}

TEST(DesiredStateFile, RefusesAnUnknownKeyNamingTheNearest) {
  const auto wrong = ParseWith("dtpye", "BF16");
  EXPECT_THAT(wrong, StatusIs(Reason::kConfigurationInvalid,
                              HasSubstr("/sets/0/dtpye: there is no such key; the nearest is \"dtype\"")));
  EXPECT_THAT(wrong, HasMetadata("pointer", std::string("/sets/0/dtpye")));
  EXPECT_THAT(
      Parse({{"version", 1}, {"sets", Json::array()}, {"set", 1}}),
      StatusIs(Reason::kConfigurationInvalid, HasSubstr("/set: there is no such key; the nearest is \"sets\"")));
}

TEST(DesiredStateFile, RefusesASetWithoutNameModelOrTorchVersion) {
  for (const char* const key : {"name", "model", "torch_version"}) {
    Json set = SetNamed("a");
    set.erase(key);
    EXPECT_THAT(Parse(Document(set)), WrongAt("/sets/0", "nothing", key));
  }
  EXPECT_THAT(Parse({{"version", 1}}), WrongAt("", "nothing", "sets"));
}

TEST(DesiredStateFile, RefusesValuesOfAnotherType) {
  EXPECT_THAT(ParseWith("model", 1), WrongAt("/sets/0/model", "number", "a string"));
  EXPECT_THAT(ParseWith("tensor_parallel_size", "2"),
              WrongAt("/sets/0/tensor_parallel_size", "string", "a whole number from 1 to 1048576"));
  EXPECT_THAT(ParseWith("tensor_parallel_size", 2.5),
              WrongAt("/sets/0/tensor_parallel_size", "number", "a whole number from 1 to 1048576"));
  EXPECT_THAT(ParseWith("devices", "host"), WrongAt("/sets/0/devices", "string", "an array of at least one value"));
  EXPECT_THAT(ParseWith("ranks", Json::array()), WrongAt("/sets/0/ranks", "array", "an array of at least one value"));
  EXPECT_THAT(ParseWith("ranks", {"0"}), WrongAt("/sets/0/ranks/0", "string", "a whole number from 0 to 1048576"));
  EXPECT_THAT(Parse({{"version", 1}, {"sets", Json::array({1})}}), WrongAt("/sets/0", "number", "an object"));
  EXPECT_THAT(Parse({{"version", 1}, {"sets", Json::object()}}), WrongAt("/sets", "object", "an array"));
}

TEST(DesiredStateFile, RefusesValuesOutOfTheirRange) {
  const std::string numbers = "a whole number from 1 to 1048576";
  EXPECT_THAT(ParseWith("tensor_parallel_size", 0), WrongAt("/sets/0/tensor_parallel_size", "0", numbers));
  EXPECT_THAT(ParseWith("tensor_parallel_size", -1), WrongAt("/sets/0/tensor_parallel_size", "-1", numbers));
  EXPECT_THAT(ParseWith("data_parallel_size", 4294967297),
              WrongAt("/sets/0/data_parallel_size", "4294967297", numbers));
  EXPECT_THAT(ParseWith("dtype", "bf16"), WrongAt("/sets/0/dtype", "bf16", "auto, BF16, F16, F32"));
  EXPECT_THAT(ParseWith("layout", "engine"), WrongAt("/sets/0/layout", "engine", "hf, fused"));
  EXPECT_THAT(ParseWith("handle_kinds", {"MEMFD"}),
              WrongAt("/sets/0/handle_kinds/0", "MEMFD", "HOST_MEMFD, CUDA_VMM_FD, CUDA_IPC"));
  EXPECT_THAT(ParseWith("quantization", ""), WrongAt("/sets/0/quantization", "", "auto, none, fp8, fp8_block"));
  EXPECT_THAT(ParseWith("model", ""), WrongAt("/sets/0/model", "", "a text"));
  EXPECT_THAT(ParseWith("name", "a b"), StatusIs(Reason::kConfigurationInvalid, HasSubstr("/sets/0/name: \"a b\"")));
}

TEST(DesiredStateFile, RefusesADeviceThatIsNeitherTheHostNorAGpuByItsUuid) {
  const std::string uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6";
  EXPECT_THAT(ParseWith("devices", {"host", uuid}), IsOk());
  const std::string allowed = "\"host\", or a GPU's UUID as nvidia-smi -L shows it";
  for (const std::string& device :
       {std::string("cpu"), std::string("Host"), std::string("0"), std::string("cuda:0"), std::string("GPU-a"),
        uuid + "0", "GPU-8932F937" + uuid.substr(12), "MIG-" + uuid.substr(4)}) {
    EXPECT_THAT(ParseWith("devices", {"host", device}), WrongAt("/sets/0/devices/1", device, allowed));
  }
}

TEST(DesiredStateFile, RefusesWhatIsThereTwice) {
  EXPECT_THAT(Parse({{"version", 1}, {"sets", {SetNamed("a"), SetNamed("a")}}}),
              WrongAt("/sets/1/name", "a", "a name for each set"));
  EXPECT_THAT(ParseWith("ranks", {0, 1, 0}), WrongAt("/sets/0/ranks/2", "0", "each value once"));
  EXPECT_THAT(ParseWith("devices", {"host", "host"}), IsOk());
}

TEST(DesiredStateFile, RefusesAnAliasThatIsNoneOrOfASetThatIsNotThere) {
  Json document = Document(SetNamed("llama"));
  document["aliases"] = {{"llama@live", "lama"}};
  const auto wrong = Parse(document);
  EXPECT_THAT(wrong, WrongAt("/aliases/llama@live", "lama", "llama"));
  EXPECT_THAT(wrong, StatusIs(Reason::kConfigurationInvalid, HasSubstr("the nearest is \"llama\"")));
  document["aliases"] = {{"llama", "llama"}};
  EXPECT_THAT(Parse(document), WrongAt("/aliases/llama", "llama", "NAME@TAG"));
  document["aliases"] = {{"llama@live", 1}};
  EXPECT_THAT(Parse(document), WrongAt("/aliases/llama@live", "number", "a string"));
}

TEST(DesiredStateFile, IsPointedIntoAsRfc6901HasIt) {
  EXPECT_THAT(ParseWith("a/b~c", 1), HasMetadata("pointer", std::string("/sets/0/a~1b~0c")));
}

TEST(DesiredStateFile, MustBeReadableAndOfAReasonableSize) {
  const TemporaryFolder folder;
  EXPECT_THAT(ReadDesiredFile(RealFileSystem(), folder / "none.json"),
              StatusIs(Reason::kConfigurationInvalid,
                       AllOf(StartsWith((folder / "none.json") + ": cannot be read: No such file"),
                             Not(HasSubstr("none.json: " + (folder / "none.json"))))));
  WriteFile(folder / "large.json", std::string((1 << 20) + 1, ' '));
  EXPECT_THAT(ReadDesiredFile(RealFileSystem(), folder / "large.json"), StatusIs(Reason::kConfigurationInvalid));
}

}  // namespace
}  // namespace weightbroker
