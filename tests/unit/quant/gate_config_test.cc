// Configs and side files alone. The table of real configs is run by gate_table_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "common/base/json.h"
#include "common/quant/gate.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

using SideFiles = std::map<std::string, std::string>;

absl::StatusOr<Quantization> Judge(const std::string& config, const SideFiles& side_files = {}) {
  std::map<std::string, nlohmann::json> parsed;
  for (const auto& [name, text] : side_files) parsed[name] = *ParseStrictJson(text);
  return ReadQuantizationConfig(*ParseStrictJson(config), parsed);
}

std::string BlockFp8With(const std::string& more) {
  return absl::StrCat(R"({"quant_method": "fp8", "weight_block_size": [128, 128])", more.empty() ? "" : ", ", more,
                      "}");
}

absl::StatusOr<Quantization> JudgeFp8(const std::string& more) {
  return Judge(absl::StrCat(R"({"quantization_config": )", BlockFp8With(more), "}"));
}

TEST(GateConfig, TakesAConfigThatSaysNothingForNone) {
  for (const char* config : {"{}", R"({"quantization_config": null, "text_config": {"quantization_config": null}})",
                             R"({"torch_dtype": "bfloat16", "hidden_size": 8})"}) {
    const auto quantization = Judge(config);
    ASSERT_THAT(quantization, IsOk()) << config;
    EXPECT_EQ(quantization->method, "none");
  }
}

TEST(GateConfig, ReadsBlockFp8) {
  const auto quantization = JudgeFp8(R"("modules_to_not_convert": ["lm_head", "a.b", "lm_head"], "fmt": "e4m3")");

  ASSERT_THAT(quantization, IsOk());
  EXPECT_EQ(quantization->method, "fp8");
  EXPECT_THAT(quantization->block_size, ElementsAre(128, 128));
  EXPECT_THAT(quantization->ignored_modules, ElementsAre("a.b", "lm_head"));
}

TEST(GateConfig, AcceptsWhatPublishedBlockFp8ModelsSay) {
  for (const char* more :
       {"", R"("activation_scheme": "dynamic")", R"("fmt": "float8_e4m3fn")", R"("scale_fmt": "ue8m0")",
        R"("weight_per_tensor": false, "act_per_tensor": false)", R"("modules_to_not_convert": null)",
        R"("modules_to_not_convert": [])", R"("ignored_layers": ["gate"])", R"("kv_cache_scheme": null)",
        R"("config_groups": {}, "ignore": [])",
        R"("ignored_layers": ["b", "a"], "modules_to_not_convert": ["a", "b"])"}) {
    EXPECT_THAT(JudgeFp8(more), IsOk()) << more;
  }
}

TEST(GateConfig, RefusesWhatChangesTheMeaningOfBlockFp8) {
  for (const char* more :
       {R"("activation_scheme": "static")", R"("activation_scheme": 1)", R"("fmt": "e5m2")", R"("scale_fmt": "e8m0x")",
        R"("weight_per_tensor": true)", R"("dequantize": true)", R"("is_checkpoint_fp8_serialized": false)",
        R"("store_dtype": "mxfp4")", R"("routed_experts_quant_method": "mxfp4")", R"("expert_dtype": "fp4")",
        R"("kv_cache_scheme": {"num_bits": 8})", R"("kv_cache_quant_algo": "FP8")", R"("bits": 8)",
        R"("unheard_of": false)"}) {
    const auto quantization = JudgeFp8(more);
    EXPECT_THAT(quantization, StatusIs(Reason::kQuantizationUnsupported, HasSubstr("config.json: quantization_config")))
        << more;
    EXPECT_THAT(quantization, HasMetadata("method", "fp8"));
  }
}

TEST(GateConfig, RefusesFp8WithoutABlockSizeBecauseEnginesReadItDifferently) {
  for (const char* config : {R"({"quantization_config": {"quant_method": "fp8"}})",
                             R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": null}})"}) {
    EXPECT_THAT(Judge(config), StatusIs(Reason::kQuantizationUnsupported, HasSubstr("per-tensor to some engines")))
        << config;
  }
}

TEST(GateConfig, RefusesABlockSizeThatIsNone) {
  for (const char* size : {"[128]", "[128,128,128]", "[128,0]", "[-128,128]", "[128.0,128]", "\"128x128\"", "128", "{}",
                           "[]", "[\"128\",128]", "[true,128]", "[18446744073709551615,1]"}) {
    EXPECT_THAT(
        Judge(absl::StrCat(R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": )", size, "}}")),
        StatusIs(Reason::kQuantizationMalformed, HasSubstr("two positive integers")))
        << size;
  }
}

TEST(GateConfig, RefusesOtherBlockSizesThan128NamingThem) {
  EXPECT_THAT(Judge(R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}})"),
              StatusIs(Reason::kQuantizationUnsupported, HasSubstr("[64,64], not [128, 128]")));
}

TEST(GateConfig, RefusesAnIgnoreListThatIsNone) {
  for (const char* list :
       {"\"lm_head\"", "{\"a\": 1}", "[1]", "[null]", "[\"\"]", "[\"re:.*gate\"]", "[\"*proj\"]", "true"}) {
    EXPECT_THAT(JudgeFp8(absl::StrCat("\"modules_to_not_convert\": ", list)), StatusIs(Reason::kQuantizationMalformed))
        << list;
  }
}

TEST(GateConfig, RefusesTwoIgnoreListsThatDiffer) {
  EXPECT_THAT(JudgeFp8(R"("ignored_layers": ["a"], "modules_to_not_convert": ["b"])"),
              StatusIs(Reason::kQuantizationConflict));
}

TEST(GateConfig, FoldsTheCaseOfTheMethodOnly) {
  EXPECT_EQ(Judge(R"({"quantization_config": {"quant_method": "FP8", "weight_block_size": [128, 128]}})")->method,
            "fp8");
  for (const char* method : {"fp8 ", "fp-8", "Fp8_e4m3"}) {
    EXPECT_THAT(Judge(absl::StrCat(R"({"quantization_config": {"weight_block_size": [128, 128], "quant_method": ")",
                                   method, "\"}}")),
                StatusIs(Reason::kQuantizationUnsupported))
        << method;
  }
  EXPECT_THAT(Judge(R"({"quantization_config": {"QUANT_METHOD": "fp8", "weight_block_size": [128, 128]}})"),
              StatusIs(Reason::kQuantizationUnsupported));
}

TEST(GateConfig, NeverReadsAMissingMethodAsNone) {
  const std::pair<const char*, const char*> expected[] = {
      {"{}", "unnamed"},
      {R"({"quant_method": null})", "unnamed"},
      {R"({"quant_method": ""})", "unnamed"},
      {R"({"quant_method": 8})", "unnamed"},
      {R"({"quant_method": "none"})", "none"},
      {R"({"quant_algo": "FP8"})", "modelopt (FP8)"},
      {R"({"bits": 4, "is_marlin_format": true})", "unnamed (is_marlin_format: marlin)"},
      {R"({"load_in_8bit": true})", "unnamed (load_in_8bit: bitsandbytes)"},
      {R"({"config_groups": {"g": {}}})", "unnamed (config_groups: compressed-tensors)"},
      {R"({"weight_block_size": [128, 128]})", "unnamed (weight_block_size: fp8)"},
      {R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})", "modelopt (NVFP4)"},
  };
  for (const auto& [declaration, method] : expected) {
    const auto quantization = Judge(absl::StrCat(R"({"quantization_config": )", declaration, "}"));
    EXPECT_THAT(quantization, StatusIs(Reason::kQuantizationUnsupported, HasSubstr(method))) << declaration;
    EXPECT_THAT(quantization, HasMetadata("method", method));
  }
}

TEST(GateConfig, RefusesADeclarationThatIsNoObject) {
  for (const char* value : {"[]", "\"fp8\"", "8", "false", "true"}) {
    EXPECT_THAT(Judge(absl::StrCat("{\"quantization_config\": ", value, "}")), StatusIs(Reason::kQuantizationMalformed))
        << value;
  }
}

TEST(GateConfig, LooksInEveryPlaceAndNamesIt) {
  const std::pair<const char*, const char*> places[] = {
      {R"({"quantization_config": {"quant_method": "awq"}})", "config.json: quantization_config"},
      {R"({"compression_config": {"quant_method": "awq"}})", "config.json: compression_config"},
      {R"({"quantization": {"quant_method": "awq"}})", "config.json: quantization"},
      {R"({"quant_config": {"quant_method": "awq"}})", "config.json: quant_config"},
      {R"({"Quantization_Config": {"quant_method": "awq"}})", "config.json: Quantization_Config"},
      {R"({"text_config": {"quantization_config": {"quant_method": "awq"}}})",
       "config.json: text_config.quantization_config"},
      {R"({"llm_config": {"compression_config": {"quant_method": "awq"}}})",
       "config.json: llm_config.compression_config"},
      {R"({"thinker_config": {"text_config": {"quantization": {"quant_method": "awq"}}}})",
       "config.json: thinker_config.text_config.quantization"},
      {R"({"parts": [{}, {"quantization_config": {"quant_method": "awq"}}]})",
       "config.json: parts[1].quantization_config"},
  };
  for (const auto& [config, where] : places) {
    const auto quantization = Judge(config);
    EXPECT_THAT(quantization,
                StatusIs(Reason::kQuantizationUnsupported, AllOf(HasSubstr(where), HasSubstr("\"awq\""))));
    EXPECT_THAT(quantization, HasMetadata("where", where));
  }
}

TEST(GateConfig, TakesBlockFp8FromANestedConfigToo) {
  EXPECT_EQ(Judge(absl::StrCat(R"({"text_config": {"quantization_config": )", BlockFp8With(""), "}}"))->method, "fp8");
}

TEST(GateConfig, RefusesSideFilesByName) {
  const std::pair<const char*, const char*> expected[] = {
      {R"({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})", "modelopt (FP8)"},
      {R"({"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}})",
       "unnamed (kv_cache_quant_algo: modelopt)"},
      {R"({"bits": 4, "group_size": 128, "desc_act": false})", "unnamed (bits: gptq, awq or mlx)"},
      {"{}", "unnamed"},
  };
  for (const auto& [text, method] : expected) {
    EXPECT_THAT(
        Judge("{}", {{"hf_quant_config.json", text}}),
        StatusIs(Reason::kQuantizationUnsupported, AllOf(HasSubstr("hf_quant_config.json: "), HasSubstr(method))))
        << text;
  }
  EXPECT_THAT(Judge("{}", {{"quantize_config.json", "[]"}}), StatusIs(Reason::kQuantizationMalformed));
}

TEST(GateConfig, RefusesTwoPlacesThatDisagreeNamingBoth) {
  const std::string block_fp8 = BlockFp8With("");
  const auto methods = Judge(absl::StrCat(R"({"quantization_config": )", block_fp8, "}"),
                             {{"hf_quant_config.json", R"({"quantization": {"quant_algo": "NVFP4"}})"}});
  EXPECT_THAT(methods,
              StatusIs(Reason::kQuantizationConflict, AllOf(HasSubstr("config.json: quantization_config (fp8)"),
                                                            HasSubstr("hf_quant_config.json (modelopt (NVFP4))"))));
  EXPECT_THAT(methods, HasMetadata("other_where", "hf_quant_config.json"));
  EXPECT_THAT(
      Judge(absl::StrCat(R"({"quantization_config": )", block_fp8, R"(, "text_config": {"quantization_config": )",
                         BlockFp8With(R"("ignored_layers": ["a"])"), "}}")),
      StatusIs(Reason::kQuantizationConflict));
}

TEST(GateConfig, AcceptsTwoPlacesThatAgree) {
  EXPECT_THAT(Judge(absl::StrCat(R"({"quantization_config": )", BlockFp8With(R"("fmt": "e4m3")"),
                                 R"(, "text_config": {"quantization_config": )", BlockFp8With(""), "}}")),
              IsOk());
}

TEST(GateConfig, RefusesMarksOfQuantizationOutsideADeclaration) {
  const std::pair<const char*, const char*> marks[] = {
      {R"({"expert_dtype": "fp4"})", "config.json: expert_dtype"},
      {R"({"torch_dtype": "float8_e4m3fn"})", "config.json: torch_dtype"},
      {R"({"torch_dtype": {"text_config": "int8"}})", "config.json: torch_dtype.text_config"},
      {R"({"text_config": {"moe_dtype": "mxfp4"}})", "config.json: text_config.moe_dtype"},
      {R"({"expert_dtype": ["bfloat16", "fp4"]})", "config.json: expert_dtype[1]"},
      {R"({"dtype": {"experts": {"weights": "fp4"}}})", "config.json: dtype.experts.weights"},
      {R"({"quant_method": "gptq"})", "config.json: quant_method"},
      {R"({"quant_algo": "FP8"})", "config.json: quant_algo"},
      {R"({"kv_cache_quant_algo": "FP8"})", "config.json: kv_cache_quant_algo"},
      {R"({"is_marlin_format": true})", "config.json: is_marlin_format"},
      {R"({"load_in_4bit": true})", "config.json: load_in_4bit"},
      {R"({"moe_quantization": {"bits": 4}})", "config.json: moe_quantization"},
      {R"({"weight_block_size": [128, 128]})", "config.json: weight_block_size"},
      {R"({"weight_bits": 1})", "config.json: weight_bits"},
      {R"({"llm_config": {"use_FP8": true}})", "config.json: llm_config.use_FP8"},
      {R"({"quantizer": "bnb"})", "config.json: quantizer"},
      {R"({"sparsity_config": {"format": "sparse-24-bitmask"}})", "config.json: sparsity_config"},
  };
  for (const auto& [config, where] : marks) {
    const auto quantization = Judge(config);
    EXPECT_THAT(quantization, StatusIs(Reason::kQuantizationUnsupported, HasSubstr(where))) << config;
    EXPECT_THAT(quantization, HasMetadata("where", where));
  }
}

TEST(GateConfig, RefusesAMarkThatADeclarationDoesNotExplain) {
  const std::string declaration = absl::StrCat(R"("quantization_config": )", BlockFp8With(""));
  EXPECT_THAT(Judge(absl::StrCat("{", declaration, R"(, "expert_dtype": "fp4"})")),
              StatusIs(Reason::kQuantizationUnsupported, AllOf(HasSubstr("expert_dtype"), HasSubstr("fp4"))));
  EXPECT_THAT(Judge(absl::StrCat("{", declaration, R"(, "kv_cache_dtype": "fp8"})")),
              StatusIs(Reason::kQuantizationUnsupported));
  EXPECT_THAT(Judge(absl::StrCat("{", declaration, R"(, "expert_dtype": "fp8"})")), IsOk());
}

TEST(GateConfig, IsNotAlarmedByWhatUnquantizedModelsSay) {
  for (
      const char* config :
      {R"({"torch_dtype": "torch.float16", "dtype": "bfloat16", "mamba_ssm_dtype": "float32", "router_dtype": "fp32"})",
       R"({"num_quantizers": 8, "feat_quantizer_dropout": 0.1, "vector_quantization_hidden_dimension": 256})",
       R"({"quant_mode": false, "load_in_8bit": false, "quantization_config": null, "sparsity_config": {}})",
       R"({"quant_noise": 0.1, "quant_noise_block_size": 8, "temporal_compression_ratio": 4})",
       R"({"label2id": {"quantum physics": 3, "fp8": 1}, "id2label": {"0": "int8"}})",
       R"({"architectures": ["QuantLM"], "model_type": "quant", "group_size": 4})"}) {
    EXPECT_THAT(Judge(config), IsOk()) << config;
  }
}

TEST(GateConfig, KeepsErrorsShortWhateverTheConfigHolds) {
  const auto quantization =
      JudgeFp8(absl::StrCat("\"", std::string(100'000, 'k'), "\": \"", std::string(100'000, 'v'), "\""));
  EXPECT_LT(quantization.status().message().size(), 1200u);
}

}  // namespace
}  // namespace weightbroker
