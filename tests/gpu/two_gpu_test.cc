// Engines and weights on several GPUs: nobody gets weights over the link between two, and ranks come together or not at
// all.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Values;

// As small as a model of an architecture that can be split can be.
void WriteSmallLlama(const std::string& folder) {
  CheckpointBuilder()
      .Config(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
                  "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": false})")
      .Tensor("lm_head.weight", "BF16", {256, 64})
      .Tensor("model.embed_tokens.weight", "BF16", {256, 64})
      .Tensor("model.norm.weight", "BF16", {64})
      .Tensor("model.layers.0.input_layernorm.weight", "BF16", {64})
      .Tensor("model.layers.0.post_attention_layernorm.weight", "BF16", {64})
      .Tensor("model.layers.0.self_attn.q_proj.weight", "BF16", {64, 64})
      .Tensor("model.layers.0.self_attn.k_proj.weight", "BF16", {32, 64})
      .Tensor("model.layers.0.self_attn.v_proj.weight", "BF16", {32, 64})
      .Tensor("model.layers.0.self_attn.o_proj.weight", "BF16", {64, 64})
      .Tensor("model.layers.0.mlp.gate_proj.weight", "BF16", {128, 64})
      .Tensor("model.layers.0.mlp.up_proj.weight", "BF16", {128, 64})
      .Tensor("model.layers.0.mlp.down_proj.weight", "BF16", {64, 128})
      .Write(folder);
}

class TwoGpus : public GpuTest {
 protected:
  void SetUp() override { REQUIRE_GPUS(2); }

  static std::vector<std::string> RankFlags(const Service& service, int rank, const std::string& visible_devices,
                                            int cuda_device) {
    return EngineFlags(service, "llama",
                       {"--tp", "2", "--rank", absl::StrCat(rank), "--visible_devices", visible_devices,
                        "--cuda_device", absl::StrCat(cuda_device)});
  }
};

class TwoGpusOfAKind : public TwoGpus, public ::testing::WithParamInterface<v1::HandleKind> {};

INSTANTIATE_TEST_SUITE_P(Gpu, TwoGpusOfAKind, Values(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC),
                         [](const auto& kind) {
                           return kind.param == v1::HANDLE_KIND_CUDA_IPC ? "CudaIpc" : "CudaVmm";
                         });

TEST_F(TwoGpus, AreNotMixedUpNamingBoth) {
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small"), IsOk());

  const Finished engine = RunProgram("gpu_engine", EngineFlags(*service, "small", {"--cuda_device", "1"}));

  EXPECT_EQ(engine.exit.code, 3) << engine.output;
  EXPECT_EQ(engine.json["reason"], "DEVICE_MISMATCH");
  EXPECT_EQ(engine.json["metadata"]["device_uuid"], Uuid(0));
  EXPECT_EQ(engine.json["metadata"]["wanted_uuid"], Uuid(1));
  EXPECT_THAT(engine.json["message"].get<std::string>(), AllOf(HasSubstr(Uuid(0)), HasSubstr(Uuid(1))));
}

TEST_F(TwoGpus, AreNotMixedUpWhereTheWeightsGpuIsInvisible) {
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small"), IsOk());

  const Finished engine = RunProgram("gpu_engine", EngineFlags(*service, "small", {"--visible_devices", "1"}));

  EXPECT_EQ(engine.exit.code, 3) << engine.output;
  EXPECT_EQ(engine.json["reason"], "DEVICE_MISMATCH");
  EXPECT_EQ(engine.json["metadata"]["device_uuid"], Uuid(0));
  EXPECT_EQ(engine.json["metadata"]["wanted_uuid"], Uuid(1));
  EXPECT_THAT(engine.json["message"].get<std::string>(), HasSubstr("not visible"));
}

TEST_F(TwoGpus, AreKnownByTheirUuidsUnderAnyOrder) {
  const auto service = StartService();
  WriteSmallGpuModel(*service, "small");
  ASSERT_THAT(RegisterOnGpu(*service, "small", v1::HANDLE_KIND_CUDA_VMM_FD, {Uuid(1)}), IsOk());
  struct View {
    std::string visible_devices;
    int cuda_device;
  };
  for (const View& view : std::vector<View>{{"0,1", 1},
                                            {"1,0", 0},
                                            {"1", 0},
                                            {Uuid(1), 0},
                                            {Uuid(0) + "," + Uuid(1), 1},
                                            {Uuid(1) + "," + Uuid(0), 0}}) {
    SCOPED_TRACE(view.visible_devices);
    Program engine("gpu_engine", EngineFlags(*service, "small",
                                             {"--visible_devices", view.visible_devices, "--cuda_device",
                                              absl::StrCat(view.cuda_device)}));
    ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors() << engine.Output();
    EXPECT_EQ(engine.Json()["uuid"], Uuid(1));
    EXPECT_EQ(engine.Json()["ordinal"], view.cuda_device);
    EXPECT_TRUE(Verifies(engine));
  }
}

TEST_F(TwoGpus, HoldARankEach) {
  const auto service = StartService();
  WriteSmallLlama(service->NewModel("llama"));
  const auto set = RegisterOnGpu(*service, "llama", v1::HANDLE_KIND_CUDA_VMM_FD, {Uuid(0), Uuid(1)});
  ASSERT_THAT(set, IsOk());
  ASSERT_EQ(set->shards_size(), 2);
  EXPECT_EQ(set->shards(0).device(), Uuid(0));
  EXPECT_EQ(set->shards(1).device(), Uuid(1));

  Program first("gpu_engine", RankFlags(*service, 0, "1,0", /*cuda_device=*/1));
  Program second("gpu_engine", RankFlags(*service, 1, Uuid(1), /*cuda_device=*/0));

  ASSERT_TRUE(first.WaitForLine("attached")) << first.Errors() << first.Output();
  ASSERT_TRUE(second.WaitForLine("attached")) << second.Errors() << second.Output();
  EXPECT_TRUE(Verifies(first));
  EXPECT_TRUE(Verifies(second));
  EXPECT_EQ(first.Json()["fingerprint"], second.Json()["fingerprint"]);
}

TEST_F(TwoGpus, AreBothLeftAloneWhenOneIsNotThere) {
  const int64_t before[] = {SettledFreeBytes(0), SettledFreeBytes(1)};
  const auto service = StartService();
  WriteSmallLlama(service->NewModel("llama"));

  const auto set = RegisterOnGpu(*service, "llama", v1::HANDLE_KIND_CUDA_VMM_FD, {Uuid(0), "GPU-00000000-dead"});

  EXPECT_THAT(set, StatusIs(Reason::kDeviceUnknown));
  EXPECT_TRUE(ComesBackTo(before[0], 0));
  EXPECT_TRUE(ComesBackTo(before[1], 1));
}

TEST_P(TwoGpusOfAKind, AreBothGivenBackWhenOneHasNoRoom) {
  const auto service = StartService();
  WriteSmallLlama(service->NewModel("llama"));
  const int64_t before = SettledFreeBytes(0);
  {
    const FilledGpu filled(Uuid(1), /*leave_bytes=*/64 * kMiB);

    const auto set = RegisterOnGpu(*service, "llama", GetParam(), {Uuid(0), Uuid(1)});

    EXPECT_FALSE(set.ok());
    EXPECT_THAT(std::string(set.status().message()), HasSubstr(Uuid(1)));
    EXPECT_TRUE(Eventually([&] { return service->Loaders().empty(); }));
    EXPECT_TRUE(ComesBackTo(before, 0));
  }
  EXPECT_THAT(RegisterOnGpu(*service, "llama", GetParam(), {Uuid(0), Uuid(1)}), IsOk());
}

// One service for each GPU: the ranks' services know nothing of each other.
TEST_F(TwoGpus, WithAServiceEachAttachNoRankBeforeBothHaveTheirs) {
  const TemporaryFolder folder;
  const std::string socket_template = folder / "{gpu_uuid}.sock";
  const auto models = StartService();  // for its model folder
  WriteSmallLlama(models->NewModel("llama"));
  const auto start = [&](int index) {
    return std::make_unique<Program>(
        "weightbrokerd", std::vector<std::string>{"--socket", folder / (Uuid(index) + ".sock"), "--devices",
                                                  Uuid(index), "--model_roots", "models=" + models->ModelFolder(""),
                                                  "--metrics_address", "127.0.0.1:0"});
  };
  const auto flags = [&](int rank) {
    return std::vector<std::string>{
        "--socket",        socket_template,    "--model",   Service::Model("llama"), "--tp",       "2",
        "--rank",          absl::StrCat(rank), "--devices", Uuid(0) + "," + Uuid(1), "--register", "--cuda_device",
        absl::StrCat(rank)};
  };
  const auto first_service = start(0);
  Program first("gpu_engine", flags(0));
  // The second rank's service is not there yet: the first engine must not get its weights without it.
  const Finished alone = RunProgram("gpu_engine", flags(0));
  EXPECT_EQ(alone.exit.code, 4) << alone.output;
  EXPECT_FALSE(first.WaitForLine("attached"));

  const auto second_service = start(1);
  ASSERT_TRUE(Eventually([&] { return access((folder / (Uuid(1) + ".sock")).c_str(), F_OK) == 0; }));
  Program both[] = {Program("gpu_engine", flags(0)), Program("gpu_engine", flags(1))};

  for (Program& engine : both) {
    ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors() << engine.Output();
    EXPECT_TRUE(Verifies(engine));
  }
  EXPECT_EQ(both[0].Json()["fingerprint"], both[1].Json()["fingerprint"]);
}

}  // namespace
}  // namespace weightbroker::testing
