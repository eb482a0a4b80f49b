// Every config of tests/data/quant_configs, beside weights that fit it, through the whole inspector.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/tool/inspect.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/expected_table.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::ExpectedRow;
using ::weightbroker::testing::ReadExpectedTable;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

const std::string kConfigs = WEIGHTBROKER_TEST_DATA "/quant_configs/";
constexpr char kSideFile[] = ".hf_quant_config.json";

CheckpointBuilder PlainWeights() {
  return CheckpointBuilder()
      .Tensor("model.embed_tokens.weight", "BF16", {16, 8})
      .Tensor("model.layers.0.mlp.up_proj.weight", "BF16", {8, 8});
}

// FP8 where a real model has it, and BF16 in what the configs of the table except.
CheckpointBuilder BlockFp8Weights() {
  CheckpointBuilder builder;
  builder.Tensor("model.embed_tokens.weight", "BF16", {16, 8}).Tensor("lm_head.weight", "BF16", {16, 8});
  for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
    builder.BlockFp8(absl::StrCat(layer, "self_attn.q_proj.weight"), {256, 130})
        .BlockFp8(absl::StrCat(layer, "mlp.gate_up_proj.weight"), {128, 129})
        .Tensor(absl::StrCat(layer, "mlp.gate.weight"), "BF16", {4, 8})
        .Tensor(absl::StrCat(layer, "input_layernorm.weight"), "BF16", {8});
  }
  return builder.Tensor("model.language_model.layers.0.linear_attn.in_proj_a.weight", "BF16", {4, 8});
}

bool NeedsFp8Weights(const ExpectedRow& row) {
  return absl::StrContains(row.expected, "block-fp8") || absl::StrContains(row.expected, "fp8 tensors");
}

class InspectedConfig : public ::testing::TestWithParam<ExpectedRow> {};

TEST_P(InspectedConfig, GetsTheVerdictOfTheTable) {
  const std::string path = kConfigs + GetParam().file;
  ASSERT_TRUE(std::filesystem::exists(path)) << path;
  const TemporaryFolder dir;
  (NeedsFp8Weights(GetParam()) ? BlockFp8Weights() : PlainWeights()).Config(ReadFile(path)).Write(dir.path());
  const std::string side_file = path.substr(0, path.size() - 5) + kSideFile;
  if (std::filesystem::exists(side_file)) WriteFile(dir / "hf_quant_config.json", ReadFile(side_file));

  const InspectReport report = InspectFolder(RealFileSystem(), dir.path());

  const std::string& expected = GetParam().expected;
  if (absl::StartsWith(expected, "ACCEPT")) {
    EXPECT_EQ(report.reason, "OK") << report.message;
    EXPECT_EQ(report.quantization, absl::StartsWith(expected, "ACCEPT none") ? "none" : "fp8");
  } else {
    // POLICY rows too: docs/checkpoint-rules.md says why they are refused.
    EXPECT_THAT(report.reason, HasSubstr("QUANTIZATION_")) << report.message;
    EXPECT_NE(report.quantization, "");
  }
}

std::vector<ExpectedRow> ConfigRows() {
  std::vector<ExpectedRow> rows;
  for (const ExpectedRow& row : ReadExpectedTable(kConfigs + "EXPECTED.tsv")) {
    if (!absl::StartsWith(row.expected, "SIDE FILE")) rows.push_back(row);
  }
  return rows;
}

INSTANTIATE_TEST_SUITE_P(Table, InspectedConfig, ::testing::ValuesIn(ConfigRows()),
                         [](const auto& row) { return row.param.file.substr(0, row.param.file.find('.')); });

TEST(GateTable, HasARowForEveryFile) {
  std::set<std::string> rows;
  for (const ExpectedRow& row : ReadExpectedTable(kConfigs + "EXPECTED.tsv")) rows.insert(row.file);
  for (const auto& entry : std::filesystem::directory_iterator(kConfigs)) {
    const std::string name = entry.path().filename().string();
    if (name == "EXPECTED.tsv") continue;
    EXPECT_EQ(rows.count(name), 1u) << name;
  }
}

}  // namespace
}  // namespace weightbroker
