#include "client/tool/inspect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/expected_table.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::ExpectedRow;
using ::weightbroker::testing::kBlockFp8Config;
using ::weightbroker::testing::ReadExpectedTable;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

const std::string kCases = WEIGHTBROKER_TEST_DATA "/safetensors/";

class InspectedFile : public ::testing::TestWithParam<ExpectedRow> {};

TEST_P(InspectedFile, GetsTheVerdictOfTheTable) {
  const std::string path = kCases + GetParam().file + ".safetensors";
  ASSERT_TRUE(std::filesystem::exists(path)) << path;

  const InspectReport report = InspectFile(RealFileSystem(), path);

  ASSERT_TRUE(report.checkpoint.has_value());
  EXPECT_EQ(report.ok, report.reason == "OK") << report.reason;
  EXPECT_FALSE(report.message.empty());
  const std::string& expected = GetParam().expected;
  if (expected == "accept") {
    EXPECT_EQ(report.reason, "OK") << report.message;
    EXPECT_EQ(report.checkpoint->reason, "OK") << report.checkpoint->message;
  } else if (expected == "accept-container") {
    EXPECT_EQ(report.reason, "OK") << report.message;
    EXPECT_EQ(report.checkpoint->reason, "DTYPE_UNSUPPORTED");
  } else if (expected == "reject-checkpoint") {
    EXPECT_EQ(report.reason, "OK") << report.message;
    EXPECT_EQ(report.checkpoint->reason, "CHECKPOINT_EMPTY");
  } else if (expected == "reject") {
    EXPECT_FALSE(report.ok);
    EXPECT_FALSE(report.checkpoint->ok);
    EXPECT_THAT(report.reason, HasSubstr("CHECKPOINT_"));
    EXPECT_THAT(report.message, HasSubstr(GetParam().file));
  } else {
    EXPECT_EQ(expected, "either");
  }
}

INSTANTIATE_TEST_SUITE_P(Table, InspectedFile, ::testing::ValuesIn(ReadExpectedTable(kCases + "EXPECTED.tsv")),
                         [](const auto& row) { return row.param.file; });

TEST(Inspect, CountsTensorsAndBytes) {
  const TemporaryFolder dir;
  CheckpointBuilder().Tensor("a", "BF16", {2, 3}).Tensor("b", "F32", {1}).Write(dir.path());

  const InspectReport folder = InspectFolder(RealFileSystem(), dir.path());
  EXPECT_TRUE(folder.ok) << folder.message;
  EXPECT_EQ(folder.quantization, "none");
  EXPECT_EQ(folder.tensors, 2);
  EXPECT_EQ(folder.bytes, 16);
  const InspectReport file = InspectFile(RealFileSystem(), dir / "model.safetensors");
  EXPECT_TRUE(file.ok);
  EXPECT_EQ(file.quantization, "");
  EXPECT_EQ(file.tensors, 2);
  EXPECT_EQ(file.bytes, 16);
}

TEST(Inspect, NamesTheQuantizationOfAFolder) {
  const TemporaryFolder dir;
  CheckpointBuilder().BlockFp8("l.weight", {130, 128}).Config(kBlockFp8Config).Write(dir.path());
  EXPECT_EQ(InspectFolder(RealFileSystem(), dir.path()).quantization, "fp8");
}

TEST(Inspect, NamesTheMethodThatItRefusesAndStillCounts) {
  const TemporaryFolder dir;
  CheckpointBuilder()
      .Tensor("a", "BF16", {2})
      .Config(R"({"quantization_config": {"quant_method": "awq"}})")
      .Write(dir.path());

  const InspectReport report = InspectFolder(RealFileSystem(), dir.path());
  EXPECT_EQ(report.reason, "QUANTIZATION_UNSUPPORTED");
  EXPECT_EQ(report.quantization, "awq");
  EXPECT_EQ(report.tensors, 1);
}

TEST(Inspect, RefusesAFileThatIsNotThere) {
  EXPECT_EQ(InspectFile(RealFileSystem(), "/nonexistent/x").reason, "CHECKPOINT_UNREADABLE");
  EXPECT_EQ(InspectFolder(RealFileSystem(), "/nonexistent").reason, "MODEL_NOT_FOUND");
}

TEST(Inspect, WritesJsonThatProgramsRead) {
  const InspectReport report = InspectFile(RealFileSystem(), kCases + "D107_dtype_C64.safetensors");

  const auto json = nlohmann::json::parse(InspectJson(report));

  EXPECT_EQ(json["ok"], true);
  EXPECT_EQ(json["reason"], "OK");
  EXPECT_EQ(json["tensors"], 1);
  EXPECT_EQ(json["bytes"], 8);
  EXPECT_EQ(json["checkpoint_ok"], false);
  EXPECT_EQ(json["checkpoint_reason"], "DTYPE_UNSUPPORTED");
}

TEST(Inspect, WritesJsonAlsoForAPathThatIsNotUtf8) {
  const TemporaryFolder dir;
  WriteFile(dir / "\xff.safetensors", "x");
  EXPECT_TRUE(nlohmann::json::accept(InspectJson(InspectFile(RealFileSystem(), dir / "\xff.safetensors"))));
}

TEST(Inspect, WritesATableForPeople) {
  const std::string table = InspectTable(InspectFile(RealFileSystem(), kCases + "D01_valid_min.safetensors"));
  EXPECT_THAT(table, HasSubstr("ok                  yes\n"));
  EXPECT_THAT(table, HasSubstr("checkpoint_ok       yes\n"));
}

}  // namespace
}  // namespace weightbroker
