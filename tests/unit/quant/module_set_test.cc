#include "common/quant/module_set.h"

#include <gtest/gtest.h>

namespace weightbroker {
namespace {

TEST(ModuleSet, CoversWhatLiesInAModule) {
  const ModuleSet set({"model.layers.0.mlp"});
  EXPECT_TRUE(set.Covers("model.layers.0.mlp.up_proj.weight"));
  EXPECT_TRUE(set.Covers("model.layers.0.mlp"));
  EXPECT_FALSE(set.Covers("model.layers.0"));
}

TEST(ModuleSet, MatchesAtDotsSoThatGateIsNotGateUpProj) {
  const ModuleSet set({"model.layers.0.mlp.gate", "mlp.gate", "gate"});
  EXPECT_TRUE(set.Covers("model.layers.0.mlp.gate.weight"));
  EXPECT_FALSE(set.Covers("model.layers.0.mlp.gate_up_proj.weight"));
  EXPECT_FALSE(set.Covers("model.layers.0.mlp.experts.3.gate_proj.weight"));
}

TEST(ModuleSet, TakesFusedAndSplitSpellingsForTheSame) {
  EXPECT_TRUE(ModuleSet({"model.layers.0.self_attn.qkv_proj"}).Covers("model.layers.0.self_attn.k_proj.weight"));
  EXPECT_TRUE(ModuleSet({"gate_up_proj"}).Covers("model.layers.0.mlp.up_proj.weight"));
  EXPECT_FALSE(ModuleSet({"model.layers.0.self_attn.qkv_proj"}).Covers("model.layers.0.self_attn.o_proj.weight"));
  EXPECT_FALSE(ModuleSet({"model.layers.0.self_attn.qkv_proj"}).Covers("model.layers.1.self_attn.k_proj.weight"));
  EXPECT_TRUE(ModuleSet({"q_proj", "k_proj", "v_proj"}).Covers("model.layers.0.self_attn.qkv_proj.weight"));
  EXPECT_FALSE(ModuleSet({"q_proj", "k_proj"}).Covers("model.layers.0.self_attn.qkv_proj.weight")) << "not all of it";
}

TEST(ModuleSet, DoesNotTakeLayer80ForLayer8) {
  EXPECT_FALSE(ModuleSet({"model.layers.8"}).Covers("model.layers.80.mlp.up_proj.weight"));
}

TEST(ModuleSet, SeesThroughTheWrappersOfMultiModalModels) {
  for (const char* name : {"model.language_model.layers.0.a", "language_model.model.layers.0.a", "model.layers.0.a"}) {
    const ModuleSet set({name});
    EXPECT_TRUE(set.Covers("model.language_model.layers.0.a.weight")) << name;
    EXPECT_TRUE(set.Covers("language_model.model.layers.0.a.weight")) << name;
    EXPECT_TRUE(set.Covers("model.layers.0.a.weight")) << name;
    EXPECT_FALSE(set.Covers("model.visual.layers.0.a.weight")) << name;
  }
}

TEST(ModuleSet, FindsANameWithoutAPathAnywhere) {
  const ModuleSet set({"lm_head", "visual", "block_sparse_moe.gate", "head.weight"});
  EXPECT_TRUE(set.Covers("lm_head.weight"));
  EXPECT_TRUE(set.Covers("language_model.lm_head.weight"));
  EXPECT_TRUE(set.Covers("model.visual.blocks.0.attn.qkv.weight"));
  EXPECT_TRUE(set.Covers("model.layers.3.block_sparse_moe.gate.weight"));
  EXPECT_TRUE(set.Covers("mtp.head.weight"));
  EXPECT_FALSE(set.Covers("model.layers.3.block_sparse_moe.experts.0.w1.weight"));
}

TEST(ModuleSet, CoversNothingIfItIsEmpty) { EXPECT_FALSE(ModuleSet({}).Covers("a.b")); }

TEST(ModuleSet, TellsNamesFromPatterns) {
  for (const char* name : {"lm_head", "model.layers.0.mlp-gate", "a"})
    EXPECT_TRUE(ModuleSet::IsPlainName(name)) << name;
  for (const char* name : {"", ".", "a.", ".a", "a..b", "re:.*gate$", "*down_proj", "a b", "a[0]"}) {
    EXPECT_FALSE(ModuleSet::IsPlainName(name)) << name;
  }
}

}  // namespace
}  // namespace weightbroker
