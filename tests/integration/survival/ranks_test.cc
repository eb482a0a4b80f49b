// Tensor parallel ranks of one weight set, from the real service through the client library: every byte compared with a
// slice of the checkpoint that is cut here, by rules of its own.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kRanks = 4;

// A Llama whose numbers let four ranks cut it at blocks of 128.
constexpr char kLlamaConfig[] = R"({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2,
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 320)";
constexpr char kFp8Part[] =
    R"(, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}})";

enum class Cut { kRows, kColumns, kWhole };

struct Weight {
  std::vector<int64_t> shape;
  int element_bytes = 2;
  Cut cut = Cut::kWhole;
};
using Weights = std::map<std::string, Weight>;  // by name

// A projection of a layer: in BF16, or in FP8 with scales that are cut in the same way.
void AddProjection(const std::string& name, int64_t rows, int64_t columns, Cut cut, bool fp8,
                   CheckpointBuilder& checkpoint, Weights& weights) {
  if (!fp8) {
    checkpoint.Tensor(name, "BF16", {rows, columns});
    weights[name] = {{rows, columns}, 2, cut};
    return;
  }
  checkpoint.BlockFp8(name, {rows, columns});
  weights[name] = {{rows, columns}, 1, cut};
  weights[name + "_scale_inv"] = {{rows / 128, columns / 128}, 4, cut};
}

Weights WriteLlama(const std::string& folder, bool fp8) {
  CheckpointBuilder checkpoint;
  Weights weights;
  const auto plain = [&](const std::string& name, std::vector<int64_t> shape, Cut cut) {
    checkpoint.Tensor(name, "BF16", shape);
    weights[name] = {std::move(shape), 2, cut};
  };
  plain("model.embed_tokens.weight", {320, 512}, Cut::kRows);
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    AddProjection(layer + "self_attn.q_proj.weight", 1024, 512, Cut::kRows, fp8, checkpoint, weights);
    AddProjection(layer + "self_attn.k_proj.weight", 512, 512, Cut::kRows, fp8, checkpoint, weights);
    AddProjection(layer + "self_attn.v_proj.weight", 512, 512, Cut::kRows, fp8, checkpoint, weights);
    AddProjection(layer + "self_attn.o_proj.weight", 512, 1024, Cut::kColumns, fp8, checkpoint, weights);
    AddProjection(layer + "mlp.gate_proj.weight", 1024, 512, Cut::kRows, fp8, checkpoint, weights);
    AddProjection(layer + "mlp.up_proj.weight", 1024, 512, Cut::kRows, fp8, checkpoint, weights);
    AddProjection(layer + "mlp.down_proj.weight", 512, 1024, Cut::kColumns, fp8, checkpoint, weights);
    plain(layer + "input_layernorm.weight", {512}, Cut::kWhole);
    plain(layer + "post_attention_layernorm.weight", {512}, Cut::kWhole);
  }
  plain("model.norm.weight", {512}, Cut::kWhole);
  plain("lm_head.weight", {320, 512}, Cut::kRows);
  checkpoint.Config(std::string(kLlamaConfig) + (fp8 ? kFp8Part : "}")).Write(folder);
  return weights;
}

int64_t BytesOf(const Weight& weight) {
  int64_t bytes = weight.element_bytes;
  for (const int64_t size : weight.shape) bytes *= size;
  return bytes;
}

std::string SliceOf(const std::string& name, const Weight& weight, int rank) {
  const std::string all = TensorBytes(name, static_cast<size_t>(BytesOf(weight)));
  if (weight.cut == Cut::kWhole) return all;
  if (weight.cut == Cut::kRows) return all.substr(all.size() / kRanks * static_cast<size_t>(rank), all.size() / kRanks);
  const size_t row_bytes = all.size() / static_cast<size_t>(weight.shape[0]);
  std::string slice;
  for (size_t row = 0; row < all.size(); row += row_bytes) {
    slice += all.substr(row + row_bytes / kRanks * static_cast<size_t>(rank), row_bytes / kRanks);
  }
  return slice;
}

std::vector<int64_t> ShapeOf(const Weight& weight) {
  std::vector<int64_t> shape = weight.shape;
  if (weight.cut == Cut::kRows) shape[0] /= kRanks;
  if (weight.cut == Cut::kColumns) shape[1] /= kRanks;
  return shape;
}

v1::RegisterRequest RequestFor(const std::string& model) {
  v1::RegisterRequest request;
  request.mutable_spec()->set_model(Service::Model(model));
  request.mutable_spec()->set_tensor_parallel_size(kRanks);
  return request;
}

WeightSpec SpecFor(const std::string& model) {
  WeightSpec spec;
  spec.model = Service::Model(model);
  spec.tensor_parallel_size = kRanks;
  return spec;
}

// Attaches, over as many brokers as it takes.
Result<MappedWeights> AttachInTheEnd(const Service& service, const std::string& model, int rank) {
  auto weights = service.AttachRank(SpecFor(model), rank);
  Eventually([&] {
    if (!weights.ok()) weights = service.AttachRank(SpecFor(model), rank);
    return weights.ok();
  });
  return weights;
}

void ExpectIsSliceOf(const Weights& checkpoint, int rank, const MappedWeights& mapped) {
  EXPECT_TRUE(mapped.Verify().ok());
  ASSERT_EQ(mapped.tensors().size(), checkpoint.size());
  for (const auto& [name, weight] : checkpoint) {
    const Tensor* const tensor = mapped.Find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(std::vector<int64_t>(tensor->shape.begin(), tensor->shape.end()), ShapeOf(weight)) << name;
    const std::string wanted = SliceOf(name, weight, rank);
    ASSERT_EQ(tensor->size_bytes, static_cast<int64_t>(wanted.size())) << name;
    EXPECT_EQ(memcmp(tensor->data, wanted.data(), wanted.size()), 0) << name << " of rank " << rank;
  }
}

class RanksTest : public ::testing::TestWithParam<bool> {
 protected:
  const Service service_;
};

TEST_P(RanksTest, GetTheirSlicesOfTheCheckpointOfWhichEveryByteIsReadOnce) {
  const Weights checkpoint = WriteLlama(service_.NewModel("llama"), /*fp8=*/GetParam());
  const auto set = service_.Register(RequestFor("llama"));
  ASSERT_THAT(set, IsOk());
  int64_t checkpoint_bytes = 0;
  for (const auto& [name, weight] : checkpoint) checkpoint_bytes += BytesOf(weight);
  EXPECT_EQ(set->read_bytes(), checkpoint_bytes);
  ASSERT_THAT(set->shards(), SizeIs(kRanks));
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(set->shards(rank).rank(), rank);
    EXPECT_EQ(set->shards(rank).device(), "host");
    const auto weights = service_.AttachRank(SpecFor("llama"), rank);
    ASSERT_TRUE(weights.ok()) << weights.status().ToString();
    EXPECT_EQ(weights->fingerprint(), set->fingerprint());  // the set's, whichever the rank
    ExpectIsSliceOf(checkpoint, rank, *weights);
  }
}

TEST_P(RanksTest, AreAllAdoptedByTheNextBroker) {
  const Weights checkpoint = WriteLlama(service_.NewModel("llama"), /*fp8=*/GetParam());
  const auto set = service_.Register(RequestFor("llama"));
  ASSERT_THAT(set, IsOk());
  const auto held = service_.AttachRank(SpecFor("llama"), 2);
  ASSERT_TRUE(held.ok());

  ASSERT_TRUE(KillBroker(service_, SIGKILL));

  ExpectIsSliceOf(checkpoint, 2, *held);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto weights = AttachInTheEnd(service_, "llama", rank);
    ASSERT_TRUE(weights.ok()) << weights.status().ToString();
    EXPECT_EQ(weights->generation(), set->generation());
    ExpectIsSliceOf(checkpoint, rank, *weights);
  }
  const auto health = service_.Health();
  ASSERT_THAT(health, IsOk());
  ASSERT_THAT(health->weight_sets(), SizeIs(1));
  EXPECT_TRUE(health->weight_sets(0).has_adopt_time());
  EXPECT_THAT(health->weight_sets(0).shards(), SizeIs(kRanks));
}

std::string NameOf(const ::testing::TestParamInfo<bool>& param) { return param.param ? "BlockFp8" : "BF16"; }
INSTANTIATE_TEST_SUITE_P(Ranks, RanksTest, ::testing::Bool(), NameOf);

TEST(SomeRanks, AreHeldByOneServiceAndOthersByAnother) {
  const Service first;
  const Service second;
  const Weights checkpoint = WriteLlama(first.NewModel("llama"), /*fp8=*/false);
  std::filesystem::create_hard_link(first.ModelFolder("llama") + "/model.safetensors",
                                    second.NewModel("llama") + "/model.safetensors");
  std::filesystem::copy(first.ModelFolder("llama") + "/config.json", second.ModelFolder("llama") + "/config.json");
  v1::RegisterRequest lower = RequestFor("llama");
  lower.add_ranks(0);
  lower.add_ranks(1);
  v1::RegisterRequest upper = RequestFor("llama");
  upper.add_ranks(2);
  upper.add_ranks(3);

  const auto in_first = first.Register(lower);
  const auto in_second = second.Register(upper);

  ASSERT_THAT(in_first, IsOk());
  ASSERT_THAT(in_second, IsOk());
  EXPECT_EQ(in_first->fingerprint(), in_second->fingerprint());
  EXPECT_THAT(in_first->shards(), SizeIs(2));
  const auto elsewhere = first.AttachRank(SpecFor("llama"), 3);
  ASSERT_FALSE(elsewhere.ok());
  EXPECT_EQ(elsewhere.status().reason(), "RANK_NOT_HERE");
  EXPECT_THAT(elsewhere.status().message(), HasSubstr("holds 0-1 of 4"));
  const auto weights = second.AttachRank(SpecFor("llama"), 3);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  ExpectIsSliceOf(checkpoint, 3, *weights);
  EXPECT_THAT(first.Register(upper), StatusIs(Reason::kPlacementMismatch));
  EXPECT_THAT(first.Register(RequestFor("llama")), IsOk());  // leaves the ranks open
}

TEST(SomeRanks, AreNamedByEnginesAndShownByTheTool) {
  const Service service;
  WriteLlama(service.NewModel("llama"), /*fp8=*/false);
  const Finished registered = RunProgram(
      "weightbroker", service.ToolFlags("register", {"models:llama", "--torch_version", "any", "--tp", "4"}));
  ASSERT_EQ(registered.exit.code, 0) << registered.errors;
  EXPECT_THAT(registered.output, AllOf(HasSubstr("RANK"), HasSubstr("HOST_MEMFD")));
  const Finished engine = RunProgram("engine", service.EngineFlags("llama", {"--tp", "4", "--rank", "3", "--verify"}));
  ASSERT_TRUE(engine.exit.success()) << engine.errors;
  const Finished stub_engine =
      RunProgram("stub_engine", service.StubEngineFlags("llama", {"--tp", "4", "--rank", "3"}));
  ASSERT_TRUE(stub_engine.exit.success()) << stub_engine.errors;
  EXPECT_EQ(stub_engine.json["checksum"], engine.json["checksum"]);
}

// ---- Loads that fail.

// 1 GiB of zeros in two tensors that are split, at once: the file has holes.
void WriteLargeLlama(const std::string& folder) {
  constexpr int64_t kBytes = int64_t{512} << 20;
  nlohmann::json header;
  header["model.embed_tokens.weight"] = {
      {"dtype", "BF16"}, {"shape", {kBytes / 1024, 512}}, {"data_offsets", {0, kBytes}}};
  header["lm_head.weight"] = {
      {"dtype", "BF16"}, {"shape", {kBytes / 1024, 512}}, {"data_offsets", {kBytes, 2 * kBytes}}};
  const std::string start = RawSafetensors(header.dump());
  WriteFile(folder + "/config.json", std::string(kLlamaConfig) + "}");
  WriteFile(folder + "/model.safetensors", start);
  std::filesystem::resize_file(folder + "/model.safetensors", start.size() + static_cast<uintmax_t>(2 * kBytes));
}

TEST(RanksThatFail, ReleaseAllWhenTheirLoaderIsKilled) {
  const Service service;
  const int memfds_before = service.CountMemfds();
  WriteLargeLlama(service.NewModel("large"));
  bool killed = false;
  const auto set = service.Register(RequestFor("large"), [&](const LoadProgress& progress) {
    if (progress.done_bytes == 0 || killed) return;
    for (const pid_t loader : service.Loaders()) killed = kill(loader, SIGKILL) == 0;
  });
  ASSERT_TRUE(killed);
  EXPECT_THAT(set, StatusIs(Reason::kLoaderFailed));
  EXPECT_EQ(service.Health()->reserved_bytes(), 0);
  EXPECT_TRUE(Eventually([&] { return service.CountMemfds() == memfds_before; }));
  EXPECT_THAT(service.Loaders(), IsEmpty());
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(service.AttachRank(SpecFor("large"), rank).status().reason(), "NOT_RESIDENT");
  }
}

TEST(RanksThatFail, AreRefusedTogetherIfTheirSumIsMoreThanTheMemoryLimit) {
  const Service service({"--memory_limit", "768MiB"});  // three of the four would fit
  WriteLargeLlama(service.NewModel("large"));
  EXPECT_THAT(service.Register(RequestFor("large")), StatusIs(Reason::kMemoryExhausted));
  EXPECT_EQ(service.Health()->reserved_bytes(), 0);
  v1::RegisterRequest three = RequestFor("large");
  for (int rank = 0; rank < 3; ++rank) three.add_ranks(rank);
  const auto set = service.Register(three);
  ASSERT_THAT(set, IsOk());
  EXPECT_THAT(set->shards(), SizeIs(3));
}

TEST(RanksThatFail, AreRefusedWithoutMemoryIfOneOfThemCannotBeCut) {
  const Service service;
  WriteLlama(service.NewModel("llama"), /*fp8=*/true);
  v1::RegisterRequest request = RequestFor("llama");
  request.mutable_spec()->set_tensor_parallel_size(16);
  EXPECT_THAT(service.Register(request), StatusIs(Reason::kSplitImpossible));
  EXPECT_EQ(service.Health()->reserved_bytes(), 0);
}

}  // namespace
}  // namespace weightbroker::testing
