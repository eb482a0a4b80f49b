#include "common/checkpoint/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::FaultyFileSystem;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::RawSafetensors;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::TensorBytes;
using ::weightbroker::testing::WriteFile;

constexpr char kFirst[] = "model-00001-of-00002.safetensors";
constexpr char kSecond[] = "model-00002-of-00002.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

class CheckpointTest : public ::testing::Test {
 protected:
  static CheckpointBuilder TwoShards() {
    return CheckpointBuilder().Tensor("b", "BF16", {2, 3}, kFirst).Tensor("a", "F32", {4}, kSecond).WithIndex();
  }
  absl::StatusOr<Checkpoint> Open(const CheckpointBuilder& builder) {
    builder.Write(dir_.path());
    return OpenCheckpoint(files_, dir_.path());
  }
  absl::StatusOr<Checkpoint> OpenWithIndex(const std::string& text) {
    return Open(CheckpointBuilder().Tensor("a", "F32", {4}, kFirst).File(kIndex, text));
  }

  const TemporaryFolder dir_;
  FaultyFileSystem files_{RealFileSystem()};
};

TEST_F(CheckpointTest, OpensASingleFile) {
  const auto checkpoint =
      Open(CheckpointBuilder().Tensor("b", "BF16", {2, 3}).Tensor("a", "F32", {}).Tensor("e", "I8", {0, 5}));

  ASSERT_THAT(checkpoint, IsOk());
  EXPECT_EQ(checkpoint->files.folder, dir_.path());
  EXPECT_EQ(checkpoint->files.index_name, "");
  EXPECT_THAT(checkpoint->files.shard_names, ElementsAre("model.safetensors"));
  ASSERT_EQ(checkpoint->tensors.size(), 3u);
  EXPECT_EQ(checkpoint->tensors[0].name, "a");
  EXPECT_EQ(checkpoint->tensors[1].name, "b");
  EXPECT_EQ(checkpoint->tensors[2].size_bytes, 0);
  EXPECT_EQ(checkpoint->total_bytes, 16);
  EXPECT_EQ(checkpoint->config["torch_dtype"], "bfloat16");
}

TEST_F(CheckpointTest, GivesOffsetsFromTheStartOfTheFile) {
  const auto checkpoint = Open(CheckpointBuilder().Tensor("x", "U8", {3}).Tensor("w", "F32", {4}));

  ASSERT_THAT(checkpoint, IsOk());
  const CheckpointTensor& w = checkpoint->tensors[0];
  const std::string file = ReadFile(dir_ / "model.safetensors");
  EXPECT_EQ(file.substr(static_cast<size_t>(w.offset_bytes), static_cast<size_t>(w.size_bytes)), TensorBytes("w", 16));
}

TEST_F(CheckpointTest, OpensAnIndexWithItsShards) {
  const auto checkpoint = Open(TwoShards());

  ASSERT_THAT(checkpoint, IsOk());
  EXPECT_EQ(checkpoint->files.index_name, kIndex);
  EXPECT_THAT(checkpoint->files.shard_names, ElementsAre(kFirst, kSecond));
  EXPECT_EQ(checkpoint->tensors[0].name, "a");
  EXPECT_EQ(checkpoint->tensors[0].file_index, 1);
  EXPECT_EQ(checkpoint->tensors[1].file_index, 0);
}

TEST_F(CheckpointTest, FollowsTheSymbolicLinksOfAHubCache) {
  const std::string blobs = dir_ / "blobs";
  const std::string snapshot = dir_ / "snapshots/rev";
  CheckpointBuilder().Tensor("a", "F32", {4}).Write(blobs);
  std::filesystem::create_directories(snapshot);
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(std::string("../../blobs/") + name, snapshot + "/" + name);
  }
  std::filesystem::create_symlink("snapshots/rev", dir_ / "link");

  const auto checkpoint = OpenCheckpoint(files_, dir_ / "link");

  ASSERT_THAT(checkpoint, IsOk());
  EXPECT_EQ(checkpoint->files.folder, snapshot);
  EXPECT_EQ(checkpoint->tensors.size(), 1u);
}

TEST_F(CheckpointTest, NamesAFolderThatIsNotThere) {
  EXPECT_THAT(OpenCheckpoint(files_, dir_ / "none"), StatusIs(Reason::kModelNotFound, HasSubstr("none")));
  WriteFile(dir_ / "file", "");
  EXPECT_THAT(OpenCheckpoint(files_, dir_ / "file"), StatusIs(Reason::kModelNotFound, HasSubstr("is not a folder")));
}

TEST_F(CheckpointTest, NamesAMissingConfig) {
  EXPECT_THAT(Open(CheckpointBuilder().Tensor("a", "F32", {4}).Config("")),
              StatusIs(Reason::kCheckpointIncomplete, HasSubstr("config.json")));
}

TEST_F(CheckpointTest, RefusesAConfigThatIsNoStrictJsonObject) {
  for (const char* config : {"{", "[]", "null", R"({"a": 1, "a": 2})", R"({"x": NaN})"}) {
    EXPECT_THAT(Open(CheckpointBuilder().Tensor("a", "F32", {4}).Config(config)),
                StatusIs(Reason::kConfigMalformed, HasSubstr("config.json")))
        << config;
  }
}

TEST_F(CheckpointTest, SaysThatInfinityIsPythonsNotJsons) {
  EXPECT_THAT(Open(CheckpointBuilder().Tensor("a", "F32", {4}).Config(R"({"time_step_limit": [0.0, Infinity]})")),
              StatusIs(Reason::kConfigMalformed, HasSubstr("Python writes Infinity")));
}

TEST_F(CheckpointTest, RefusesASideFileThatIsNoJsonNamingIt) {
  EXPECT_THAT(Open(CheckpointBuilder().Tensor("a", "F32", {4}).File("hf_quant_config.json", "{")),
              StatusIs(Reason::kConfigMalformed, HasSubstr("hf_quant_config.json")));
}

TEST_F(CheckpointTest, ReadsTheSideFilesThatAreThere) {
  const auto checkpoint =
      Open(CheckpointBuilder().Tensor("a", "F32", {4}).File("quantize_config.json", "{\"bits\": 4}"));
  ASSERT_THAT(checkpoint, IsOk());
  EXPECT_THAT(checkpoint->files.side_names, ElementsAre("quantize_config.json"));
  EXPECT_EQ(checkpoint->side_files.at("quantize_config.json")["bits"], 4);
}

TEST_F(CheckpointTest, NamesAMissingShard) {
  const auto checkpoint = Open(TwoShards().WithoutShard(kSecond));
  EXPECT_THAT(checkpoint, StatusIs(Reason::kCheckpointIncomplete, HasSubstr(kSecond)));
  EXPECT_THAT(checkpoint, HasMetadata("file", kSecond));
}

TEST_F(CheckpointTest, NamesAShardWhoseLinkLeadsNowhere) {
  TwoShards().WithoutShard(kSecond).Write(dir_.path());
  std::filesystem::create_symlink("../blobs/gone", dir_ / kSecond);
  EXPECT_THAT(OpenCheckpoint(files_, dir_.path()),
              StatusIs(Reason::kCheckpointIncomplete, HasSubstr("link to a file that is gone")));
}

TEST_F(CheckpointTest, NamesATensorThatItsShardLacks) {
  const auto checkpoint = Open(TwoShards().IndexEntry("c", kFirst));
  EXPECT_THAT(checkpoint,
              StatusIs(Reason::kCheckpointIndexMismatch, AllOf(HasSubstr(kFirst), HasSubstr("lacks tensor \"c\""))));
  EXPECT_THAT(checkpoint, HasMetadata("tensor", "c"));
}

TEST_F(CheckpointTest, NamesATensorThatTheIndexLacks) {
  const auto checkpoint = Open(TwoShards().NotIndexed("b").Tensor("c", "F32", {1}, kFirst));
  EXPECT_THAT(checkpoint, StatusIs(Reason::kCheckpointIndexMismatch, AllOf(HasSubstr(kFirst), HasSubstr("\"b\""))));
}

TEST_F(CheckpointTest, NamesATensorThatIsInAnotherShardThanTheIndexSays) {
  const auto checkpoint = Open(TwoShards().IndexEntry("a", kFirst).Tensor("d", "F32", {1}, kSecond));
  EXPECT_THAT(checkpoint, StatusIs(Reason::kCheckpointIndexMismatch));
  EXPECT_THAT(checkpoint, HasMetadata("expected_file", kFirst));
  EXPECT_THAT(checkpoint, HasMetadata("found_file", kSecond));
}

TEST_F(CheckpointTest, RefusesATensorInTwoShardsNamingBoth) {
  const auto checkpoint = Open(TwoShards().Tensor("a", "F32", {4}, kFirst));
  EXPECT_THAT(checkpoint,
              StatusIs(Reason::kCheckpointMalformed, AllOf(HasSubstr("\"a\""), HasSubstr(kFirst), HasSubstr(kSecond))));
}

TEST_F(CheckpointTest, RefusesShardNamesThatLeadOutOfTheFolder) {
  for (const char* name :
       {"../x.safetensors", "/etc/passwd", "", ".", "..", "a/../b", "a//b", "a/", "./a", "a\\\\b", "a\\u0000b"}) {
    const auto checkpoint = OpenWithIndex(std::string(R"({"weight_map": {"a": ")") + name + "\"}}");
    EXPECT_THAT(checkpoint, StatusIs(Reason::kCheckpointPathUnsafe, HasSubstr("\"a\""))) << name;
  }
}

TEST_F(CheckpointTest, RefusesAnIndexThatIsNone) {
  for (const char* text : {"", "[]", "{}", R"({"weight_map": []})", R"({"weight_map": {"a": 1}})",
                           R"({"weight_map": {"a": "x", "a": "y"}})"}) {
    EXPECT_THAT(OpenWithIndex(text), StatusIs(Reason::kCheckpointMalformed, HasSubstr(kIndex))) << text;
  }
  EXPECT_THAT(OpenWithIndex(R"({"weight_map": {}})"), StatusIs(Reason::kCheckpointEmpty));
}

TEST_F(CheckpointTest, TakesAnIndexBesideASingleFileOnlyWhereItNamesThatFile) {
  EXPECT_THAT(Open(CheckpointBuilder().Tensor("a", "F32", {4}).WithIndex()), IsOk());
  EXPECT_THAT(Open(TwoShards().Tensor("z", "F32", {4}).NotIndexed("z")),
              StatusIs(Reason::kCheckpointIndexMismatch, HasSubstr("remove one")));
}

TEST_F(CheckpointTest, IgnoresFilesThatTheIndexDoesNotName) {
  EXPECT_THAT(Open(TwoShards().File("consolidated.safetensors", "whatever")), IsOk());
}

TEST_F(CheckpointTest, TellsAFolderOfPicklesToConvert) {
  EXPECT_THAT(Open(CheckpointBuilder().File("pytorch_model.bin", "PK")),
              StatusIs(Reason::kCheckpointNotSafetensors, AllOf(HasSubstr("pytorch_model.bin"), HasSubstr("convert"))));
}

TEST_F(CheckpointTest, SaysWhatAFolderWithoutWeightsHasInTheirPlace) {
  EXPECT_THAT(Open(CheckpointBuilder()), StatusIs(Reason::kCheckpointIncomplete, HasSubstr("no weights")));
  EXPECT_THAT(Open(CheckpointBuilder().File("weights.safetensors", "")),
              StatusIs(Reason::kCheckpointIncomplete, HasSubstr("name it model.safetensors")));
  EXPECT_THAT(Open(CheckpointBuilder().File(kFirst, "")),
              StatusIs(Reason::kCheckpointIncomplete, HasSubstr("index is missing")));
}

TEST_F(CheckpointTest, RefusesACheckpointWithoutTensors) {
  EXPECT_THAT(Open(CheckpointBuilder().File("model.safetensors", CheckpointBuilder().FileBytes())),
              StatusIs(Reason::kCheckpointEmpty, HasSubstr("nothing to serve")));
}

TEST_F(CheckpointTest, NamesTheShardThatIsDamaged) {
  TwoShards().Write(dir_.path());
  std::filesystem::resize_file(dir_ / kSecond, std::filesystem::file_size(dir_ / kSecond) - 1);
  EXPECT_THAT(OpenCheckpoint(files_, dir_.path()), StatusIs(Reason::kCheckpointTruncated, HasSubstr(kSecond)));
}

TEST_F(CheckpointTest, RefusesSizesThatAddUpPastWhatCanBeCounted) {
  constexpr int64_t kHuge = (int64_t{1} << 60) - 1;
  CheckpointBuilder builder;
  for (int i = 0; i < 9; ++i) {
    const std::string tensor = absl::StrCat("t", i);
    const std::string shard = absl::StrCat("s", i, ".safetensors");
    const std::string bytes =
        RawSafetensors(absl::StrCat("{\"", tensor, R"(":{"dtype":"U8","shape":[)", kHuge, R"(],"data_offsets":[0,)",
                                    kHuge, "]}}", std::string(500, ' ')));
    builder.File(shard, bytes).IndexEntry(tensor, shard);
    files_.PretendSize(shard, static_cast<int64_t>(bytes.size()) + kHuge);
  }
  EXPECT_THAT(Open(builder), StatusIs(Reason::kCheckpointTooLarge, HasSubstr("s8.safetensors")));
}

TEST_F(CheckpointTest, PassesErrorsOfTheFileSystemOn) {
  files_.FailRead(kSecond, 1);
  EXPECT_THAT(Open(TwoShards()), StatusIs(Reason::kSystemError, HasSubstr(kSecond)));
  files_.FailOpen(kFirst);
  EXPECT_THAT(Open(TwoShards()), StatusIs(Reason::kCheckpointUnreadable, HasSubstr(kFirst)));
}

TEST_F(CheckpointTest, HasNoAliasesUnlessSomethingSaysSo) { EXPECT_THAT(Open(TwoShards())->aliases, IsEmpty()); }

TEST_F(CheckpointTest, FindsTiedWeightsAcrossShards) {
  const auto checkpoint = Open(TwoShards().Metadata("head", "a", kFirst).Metadata("format", "pt", kFirst));
  ASSERT_THAT(checkpoint, IsOk());
  EXPECT_THAT(checkpoint->aliases, ElementsAre(::testing::Pair("head", "a")));
}

}  // namespace
}  // namespace weightbroker
