#include "common/plan/architecture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/plan/architecture_parser.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/plan/headers_only.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

constexpr char kNovel[] = R"({
  "architectures": ["NovelForCausalLM"],
  "numbers": {"layers": "depth", "heads": "n_heads", "head_size": ["d_head", "width / n_heads"]},
  "tensors": {
    "embed": {"split": "vocab", "stage": "first"},
    "blocks.{layer}.{q,k,v}": {"split": "column", "count": "heads", "size": "head_size", "quantize": true},
    "blocks.{layer}.out": {"split": "row", "count": "heads", "size": "head_size", "quantize": true},
    "blocks.{layer}.norm": "replicated"
  },
  "fused": {"blocks.{layer}.qkv.{parameter}": ["blocks.{layer}.q", "blocks.{layer}.k", "blocks.{layer}.v"]}
})";

TEST(Architectures, HaveAllThatAreBuiltIn) {
  const auto names = ArchitectureSet::Embedded().Names();
  for (const char* name : {"LlamaForCausalLM",      "MistralForCausalLM",    "Qwen2ForCausalLM",
                           "Qwen3ForCausalLM",      "Qwen3MoeForCausalLM",   "DeepseekV2ForCausalLM",
                           "DeepseekV3ForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
                           "Gemma2ForCausalLM",     "Gemma3ForCausalLM",     "Gemma3ForConditionalGeneration",
                           "MixtralForCausalLM",    "Phi3ForCausalLM",       "Glm4ForCausalLM",
                           "Glm4MoeForCausalLM",    "GptOssForCausalLM",     "Olmo2ForCausalLM",
                           "MiniMaxM2ForCausalLM",  "FalconForCausalLM",     "BertModel"}) {
    EXPECT_THAT(names, Contains(name));
  }
}

TEST(Architectures, AreExplainedWithAFileThatTheTestsAdd) {
  const std::string shown = testing::ReadFile(std::string(WEIGHTBROKER_TEST_DATA) + "/../../docs/architectures.md");
  const std::string file = testing::ReadFile(std::string(WEIGHTBROKER_TEST_DATA) + "/architectures/novel.json");
  EXPECT_THAT(shown, HasSubstr("```json\n" + file + "```"));
  EXPECT_THAT(ParseArchitecture("novel.json", file), IsOk());
}

TEST(Architectures, AreAddedByAFile) {
  const TemporaryFolder folder;
  WriteFile(folder / "novel.json", kNovel);
  WriteFile(folder / "notes.txt", "not read");
  const auto texts = ReadArchitectureFolder(RealFileSystem(), folder.path());
  ASSERT_THAT(texts, IsOk());
  const auto architectures = ArchitectureSet::WithFiles(*texts);
  ASSERT_THAT(architectures, IsOk());
  HeadersOnly builder("NovelForCausalLM", {{"depth", 1}, {"n_heads", 4}, {"width", 512}});
  for (const char* name : {"blocks.0.q.weight", "blocks.0.k.weight", "blocks.0.v.weight", "blocks.0.out.weight"}) {
    builder.Tensor(name, "BF16", {512, 512});
  }
  builder.Tensor("embed.weight", "BF16", {100, 512}).Tensor("blocks.0.norm.weight", "BF16", {512});

  const auto plan = PlanAll(builder.Build(), SpecFor({.tensor = 4}, "fused", "fp8_block"), *architectures);

  ASSERT_THAT(plan, IsOk());
  const TensorPlacement* const qkv = FindTensor(plan->shards[3], "blocks.0.qkv.weight");
  ASSERT_NE(qkv, nullptr);
  EXPECT_THAT(qkv->shape, ::testing::ElementsAre(384, 512));
  EXPECT_EQ(qkv->dtype->name, "F8_E4M3");
  EXPECT_EQ(qkv->pieces[1].source_offset, 384 * 512);
  const TensorPlacement* const scales = FindTensor(plan->shards[3], "blocks.0.qkv.weight_scale_inv");
  ASSERT_NE(scales, nullptr);
  EXPECT_THAT(scales->shape, ::testing::ElementsAre(3, 4));
  EXPECT_EQ(&plan->shards[3].tensors[static_cast<size_t>(qkv->scale_tensor)], scales);
  EXPECT_THAT(FindTensor(plan->shards[3], "embed.weight")->shape, ::testing::ElementsAre(32, 512));
}

TEST(Architectures, TakeTheFileOfTheFolderForOneThatIsBuiltIn) {
  const auto architectures = ArchitectureSet::WithFiles(
      {{"mine.json", R"({"architectures": ["LlamaForCausalLM"], "tensors": {"x": "replicated"}})"}});
  ASSERT_THAT(architectures, IsOk());
  const Checkpoint checkpoint = HeadersOnly("LlamaForCausalLM", {}).Tensor("x", "BF16", {4}).Build();
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2}), *architectures), IsOk());
  EXPECT_THAT(PlanAll(checkpoint, SpecFor({.tensor = 2})), StatusIs(Reason::kArchitectureMismatch));
}

TEST(Architectures, RefuseTwoFilesThatNameTheSameOne) {
  EXPECT_THAT(ArchitectureSet::WithFiles({{"a.json", kNovel}, {"b.json", kNovel}}),
              AllOf(StatusIs(Reason::kArchitectureInvalid, HasSubstr("NovelForCausalLM")),
                    HasMetadata("file", "b.json"), HasMetadata("other", "a.json")));
}

TEST(Architectures, RefuseAFileWhoseNameIsNotUtf8) {
  const TemporaryFolder folder;
  WriteFile(folder / "\xFF.json", "{}");
  EXPECT_THAT(ReadArchitectureFolder(RealFileSystem(), folder.path()),
              StatusIs(Reason::kArchitectureInvalid, HasSubstr("not UTF-8")));
}

TEST(Architectures, RefuseAFolderThatIsNotThere) {
  EXPECT_THAT(ReadArchitectureFolder(RealFileSystem(), "/nowhere"),
              AllOf(StatusIs(Reason::kArchitectureInvalid), HasMetadata("folder", "/nowhere")));
}

struct BadFile {
  const char* text;
  const char* key;
  const char* said;
};

class BadFileTest : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadFileTest, IsRefusedNamingFileKeyAndWhatIsAllowed) {
  EXPECT_THAT(ParseArchitecture("x.json", GetParam().text),
              AllOf(StatusIs(Reason::kArchitectureInvalid, HasSubstr(GetParam().said)), HasMetadata("file", "x.json"),
                    HasMetadata("key", GetParam().key)));
}

INSTANTIATE_TEST_SUITE_P(
    Each, BadFileTest,
    ::testing::Values(
        BadFile{"{", "", "docs/architectures.md"}, BadFile{"[]", "", "no object"},
        BadFile{R"({"architectures": "A", "tensors": {}, "tenors": {}})", "", "tenors"},
        BadFile{R"({"tensors": {}})", "architectures", "missing"},
        BadFile{R"({"architectures": [], "tensors": {}})", "architectures", "list of strings"},
        BadFile{R"({"architectures": "A"})", "tensors", "missing"},
        BadFile{R"({"architectures": "A", "tensors": {"x": "diagonal"}})", "tensors: x", "column"},
        BadFile{R"({"architectures": "A", "tensors": {"x": {"quantize": true}}})", "tensors: x", "no split"},
        BadFile{R"({"architectures": "A", "tensors": {"x": {"split": "row", "stage": "middle"}}})", "tensors: x",
                "first"},
        BadFile{R"({"architectures": "A", "tensors": {"x": {"split": "row", "axis": 3}}})", "tensors: x", "axis"},
        BadFile{R"({"architectures": "A", "tensors": {"x": {"split": "column", "count": "a - b"}}})", "tensors: x",
                "no expression"},
        BadFile{R"({"architectures": "A", "tensors": {"x": {"split": "column", "size": "a"}}})", "tensors: x",
                "size and no count"},
        BadFile{R"({"architectures": "A", "tensors": {"x": {"split": "row", "parts": [{"count": "a"}]}}})",
                "tensors: x", "column split"},
        BadFile{R"({"architectures": "A", "tensors": {"x": {"split": "column", "parts": [{}]}}})", "tensors: x",
                "no count"},
        BadFile{R"({"architectures": "A", "tensors": {"{x,y": "row"}})", "tensors: {x,y", "braces"},
        BadFile{R"({"architectures": "A", "tensors": {"{x,y}": "row", "x": "row"}})", "tensors: {x,y}", "twice"},
        BadFile{R"({"architectures": "A", "tensors": {"x": "row"}, "fused": {"z": ["y"]}})", "fused: z",
                "not among tensors"},
        BadFile{
            R"({"architectures": "A", "tensors": {"x": "row", "e.{expert}.y": "row"}, "fused": {"z": ["x", "e.{expert}.y"]}})",
            "fused: z", "some are not"},
        BadFile{R"({"architectures": "A", "tensors": {}, "numbers": {"a": "("}})", "numbers: a", "no expression"},
        BadFile{R"({"architectures": "A", "tensors": {}, "refuse": [{"key": "a"}]})", "refuse", "because"},
        BadFile{R"({"architectures": "A", "tensors": {}, "max_tensor_parallel_size": 0})", "max_tensor_parallel_size",
                "positive"},
        BadFile{R"({"architectures": "A", "architectures": "A", "tensors": {}})", "", "docs/architectures.md"}));

}  // namespace
}  // namespace weightbroker
