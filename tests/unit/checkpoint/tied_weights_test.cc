#include "common/checkpoint/tied_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

using Metadata = std::vector<std::map<std::string, std::string>>;

std::vector<CheckpointTensor> Tensors(const std::vector<std::string>& sorted_names) {
  std::vector<CheckpointTensor> tensors(sorted_names.size());
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].name = sorted_names[i];
  return tensors;
}

absl::StatusOr<std::map<std::string, std::string>> Find(const std::vector<std::string>& sorted_names,
                                                        const Metadata& metadata, const char* config = "{}") {
  return FindTiedWeights(Tensors(sorted_names), metadata, nlohmann::json::parse(config));
}

TEST(TiedWeights, BelievesWhatSaveModelWrites) {
  EXPECT_THAT(*Find({"kept"}, {{{"removed", "kept"}, {"format", "pt"}}}), ElementsAre(Pair("removed", "kept")));
}

TEST(TiedWeights, TakesOtherMetadataForWhatItIs) {
  EXPECT_THAT(*Find({"pt", "x"}, {{{"format", "pt"}, {"author", "someone"}}}), IsEmpty());
}

TEST(TiedWeights, NeverAliasesANameThatTheFilesHave) { EXPECT_THAT(*Find({"a", "b"}, {{{"a", "b"}}}), IsEmpty()); }

TEST(TiedWeights, RefusesFilesThatDisagree) {
  EXPECT_THAT(Find({"a", "b"}, {{{"x", "a"}}, {{"x", "b"}}}),
              StatusIs(Reason::kCheckpointMalformed, HasSubstr("\"x\"")));
  EXPECT_THAT(Find({"a", "b"}, {{{"x", "a"}}, {{"x", "a"}}}), IsOk());
}

TEST(TiedWeights, TiesTheHeadWhereTheConfigSaysSoAndItIsNotThere) {
  const char* tied = R"({"tie_word_embeddings": true})";
  EXPECT_THAT(*Find({"model.embed_tokens.weight"}, {}, tied),
              ElementsAre(Pair("lm_head.weight", "model.embed_tokens.weight")));
  EXPECT_THAT(*Find({"gpt_neox.embed_in.weight"}, {}, tied),
              ElementsAre(Pair("embed_out.weight", "gpt_neox.embed_in.weight")));
  EXPECT_THAT(*Find({"lm_head.weight", "model.embed_tokens.weight"}, {}, tied), IsEmpty());
  EXPECT_THAT(*Find({"embeddings.word_embeddings.weight"}, {}, tied), IsEmpty());
}

TEST(TiedWeights, DoesNotGuessWhereTheConfigIsSilent) {
  for (const char* config : {"{}", R"({"tie_word_embeddings": false})", R"({"tie_word_embeddings": null})"}) {
    EXPECT_THAT(*Find({"model.embed_tokens.weight"}, {}, config), IsEmpty()) << config;
  }
}

TEST(TiedWeights, LooksIntoTheTextConfigOnlyIfTheTopIsSilent) {
  EXPECT_THAT(
      *Find({"model.language_model.embed_tokens.weight"}, {}, R"({"text_config": {"tie_word_embeddings": true}})"),
      ElementsAre(Pair("lm_head.weight", "model.language_model.embed_tokens.weight")));
  EXPECT_THAT(*Find({"model.language_model.embed_tokens.weight"}, {},
                    R"({"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}})"),
              IsEmpty());
}

TEST(TiedWeights, RefusesAFlagThatIsNoBoolean) {
  EXPECT_THAT(Find({"a"}, {}, R"({"tie_word_embeddings": "yes"})"), StatusIs(Reason::kConfigMalformed));
}

}  // namespace
}  // namespace weightbroker
