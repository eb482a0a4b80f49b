// Several ranks at once, with everything that can be done to a weight on the way, against the plan applied piece by
// piece to the files' bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/load/host_destination.h"
#include "common/load/load_engine.h"
#include "common/plan/architecture.h"
#include "common/quant/convert.h"
#include "common/quant/fp8_block.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::FaultyFileSystem;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::TensorBytes;

// A made-up architecture that needs all there is; "odd" puts what lies behind it at an odd offset.
constexpr char kArchitecture[] = R"({
  "architectures": ["MadeUp"],
  "numbers": {"layers": "layers", "experts": "experts"},
  "tensors": {
    "odd": "replicated",
    "embed": {"split": "vocab"},
    "l.{layer}.{a,b}": {"split": "column", "quantize": true},
    "l.{layer}.out": {"split": "row", "quantize": true},
    "l.{layer}.narrow": {"split": "row"},
    "l.{layer}.stack": {"split": "column", "stacked": true, "axis": 2},
    "l.{layer}.kept": {"split": "replicated", "keep_dtype": true}
  },
  "fused": {
    "l.{layer}.ab.{parameter}": ["l.{layer}.a", "l.{layer}.b"],
    "l.{layer}.turned": {"of": ["l.{layer}.stack"], "transpose": true}
  }
})";
constexpr char kConfig[] = R"({"architectures": ["MadeUp"], "layers": 1, "experts": 2})";

CheckpointBuilder Weights() {
  CheckpointBuilder builder;
  builder.Tensor("odd", "U8", {3});
  builder.Tensor("embed.weight", "F16", {100, 30});
  builder.Tensor("l.0.a.weight", "I16", {256, 200}).Tensor("l.0.b.weight", "I16", {256, 200});
  builder.Tensor("l.0.a.bias", "F16", {256}).Tensor("l.0.b.bias", "F16", {256});
  builder.Tensor("l.0.out.weight", "I16", {70, 512});
  builder.Tensor("l.0.narrow.weight", "F16", {41, 6});
  builder.Tensor("l.0.stack", "F16", {2, 37, 22});
  builder.Tensor("l.0.kept.weight", "F16", {9});
  return builder.Config(kConfig);
}

class NodeLoadTest : public ::testing::Test {
 protected:
  // The builder fills tensors with any bytes; those that are to be quantized are taken for BF16 with the exponent of
  // ordinary numbers.
  void Write(const CheckpointBuilder& builder, const std::string& not_finite = "") {
    builder.Write(folder_.path());
    MakeFinite("l.0.a.weight");
    MakeFinite("l.0.b.weight");
    MakeFinite("l.0.out.weight");
    if (!not_finite.empty()) Patch(not_finite, (130 * 200 + 7) * 2, {'\x80', '\x7F'});
    identity_ = *ReadCheckpointIdentity(RealFileSystem(), folder_.path());
    checkpoint_ = *OpenCheckpoint(RealFileSystem(), folder_.path());
  }

  void Plan(v1::WeightSpec wanted) {
    spec_ = *CompleteSpec(wanted);
    const auto architectures = ArchitectureSet::WithFiles({{"made_up.json", kArchitecture}});
    ASSERT_THAT(architectures, IsOk());
    auto plan = PlanNode({.checkpoint = checkpoint_,
                          .spec = spec_,
                          .quantization = {},
                          .architectures = *architectures,
                          .ranks = AllRanks(spec_)});
    ASSERT_THAT(plan, IsOk());
    plan_ = *std::move(plan);
  }

  absl::StatusOr<std::vector<std::vector<Digest>>> Load(const LoadOptions& options, FillMethod method) {
    slabs_.clear();
    std::vector<std::unique_ptr<Destination>> destinations;
    for (const ShardPlan& shard : plan_.shards) slabs_.emplace_back().push_back(*HostSlab::Create(shard.slab_bytes[0]));
    for (size_t i = 0; i < slabs_.size(); ++i) {
      destinations.push_back(MakeHostDestination(plan_.shards[i], slabs_[i], method));
    }
    return LoadNode({RealFileSystem(), checkpoint_, identity_, plan_}, destinations, options,
                    [](int64_t) { return absl::OkStatus(); });
  }

  void ExpectWhatThePlanSays(const std::vector<std::vector<Digest>>& digests) {
    for (size_t s = 0; s < plan_.shards.size(); ++s) {
      const ShardPlan& shard = plan_.shards[s];
      for (size_t t = 0; t < shard.tensors.size(); ++t) {
        const TensorPlacement& tensor = shard.tensors[t];
        if (tensor.is_scale) continue;
        const std::string loaded = Loaded(s, tensor);
        ASSERT_EQ(digests[s][t], ComputeDigest(std::as_bytes(std::span(loaded)))) << tensor.name;
        if (tensor.transform == Transform::kQuantizeFp8Block) {
          ExpectQuantized(s, tensor);
        } else {
          ASSERT_EQ(loaded, Expected(tensor)) << tensor.name << " of shard " << s;
        }
      }
    }
  }

  TemporaryFolder folder_;
  CheckpointIdentity identity_;
  Checkpoint checkpoint_;
  v1::WeightSpec spec_;
  NodePlan plan_;
  std::vector<std::vector<HostSlab>> slabs_;

 private:
  std::string file() const { return folder_ / "model.safetensors"; }

  void Patch(const std::string& name, int64_t offset, const std::string& bytes) {
    std::string contents = testing::ReadFile(file());
    const Checkpoint checkpoint = *OpenCheckpoint(RealFileSystem(), folder_.path());
    for (const CheckpointTensor& tensor : checkpoint.tensors) {
      if (tensor.name == name) contents.replace(static_cast<size_t>(tensor.offset_bytes + offset), bytes.size(), bytes);
    }
    testing::WriteFile(file(), contents);
  }

  void MakeFinite(const std::string& name) {
    std::string contents = testing::ReadFile(file());
    const size_t type = contents.find("\"I16\"", contents.find("\"" + name + "\""));
    contents.replace(type, 5, "\"F16\"");  // as long
    testing::WriteFile(file(), contents);
    const Checkpoint checkpoint = *OpenCheckpoint(RealFileSystem(), folder_.path());
    for (const CheckpointTensor& tensor : checkpoint.tensors) {
      if (tensor.name != name) continue;
      for (int64_t i = tensor.offset_bytes + 1; i < tensor.offset_bytes + tensor.size_bytes; i += 2) {
        contents[static_cast<size_t>(i)] = static_cast<char>(contents[static_cast<size_t>(i)] & '\xBB');
      }
    }
    testing::WriteFile(file(), contents);
  }

  std::string Loaded(size_t shard, const TensorPlacement& tensor) {
    const auto bytes = slabs_[shard][0].writable_bytes().subspan(static_cast<size_t>(tensor.slab_offset_bytes),
                                                                 static_cast<size_t>(tensor.size_bytes));
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  std::string Contents(const CheckpointTensor& source) {
    return testing::ReadFile(file()).substr(static_cast<size_t>(source.offset_bytes),
                                            static_cast<size_t>(source.size_bytes));
  }

  // Element by element.
  std::string Expected(const TensorPlacement& tensor) {
    const int64_t size = tensor.dtype->bits / 8;
    std::string expected(static_cast<size_t>(tensor.size_bytes), '\0');
    for (const Piece& piece : tensor.pieces) {
      const CheckpointTensor& source = checkpoint_.tensors[static_cast<size_t>(piece.source)];
      const std::string contents = Contents(source);
      const int64_t source_size = source.dtype->bits / 8;
      for (int64_t run = 0; run < piece.run_count; ++run) {
        for (int64_t e = 0; e < piece.run_elements; ++e) {
          const auto* from = reinterpret_cast<const std::byte*>(contents.data()) +
                             (piece.source_offset + run * piece.source_stride + e) * source_size;
          auto* to = reinterpret_cast<std::byte*>(expected.data()) +
                     (piece.offset + run * piece.stride + e * piece.element_stride) * size;
          if (source.dtype == tensor.dtype) {
            std::memcpy(to, from, static_cast<size_t>(size));
          } else {
            ConvertElements(*source.dtype, from, *tensor.dtype, to, 1);
          }
        }
      }
    }
    return expected;
  }

  void ExpectQuantized(size_t shard, const TensorPlacement& tensor) {
    const TensorPlacement& scales = plan_.shards[shard].tensors[static_cast<size_t>(tensor.scale_tensor)];
    std::string codes(static_cast<size_t>(tensor.size_bytes), '\0');
    std::vector<float> expected_scales(static_cast<size_t>(scales.size_bytes) / sizeof(float));
    for (const Piece& piece : tensor.pieces) {
      const CheckpointTensor& source = checkpoint_.tensors[static_cast<size_t>(piece.source)];
      const std::string contents = Contents(source);
      ASSERT_FALSE(QuantizeFp8BlockPortably(
                       {.dtype = source.dtype,
                        .data = reinterpret_cast<const std::byte*>(contents.data()) + piece.source_offset * 2,
                        .row_bytes = piece.source_stride * 2},
                       piece.run_count, piece.run_elements,
                       {.data = reinterpret_cast<std::byte*>(codes.data()) + piece.offset,
                        .row_elements = piece.stride,
                        .scales = expected_scales.data() + piece.scale_offset,
                        .scale_stride = piece.scale_stride})
                       .has_value());
    }
    ASSERT_EQ(Loaded(shard, tensor), codes) << tensor.name;
    ASSERT_EQ(std::memcmp(Loaded(shard, scales).data(), expected_scales.data(), static_cast<size_t>(scales.size_bytes)),
              0)
        << scales.name;
  }
};

v1::WeightSpec Spec(int ranks, const std::string& layout, const std::string& quantization, const std::string& dtype) {
  v1::WeightSpec spec;
  spec.set_tensor_parallel_size(ranks);
  spec.set_layout(layout);
  spec.set_quantization(quantization);
  spec.set_dtype(dtype);
  return spec;
}

TEST_F(NodeLoadTest, DoesWhatThePlanSaysForAnyChunkNumberOfThreadsAndWayOfFilling) {
  Write(Weights());
  for (const v1::WeightSpec& spec :
       {Spec(2, "hf", "", ""), Spec(2, "fused", "", ""), Spec(2, "fused", "", "F32"), Spec(2, "hf", "", "BF16"),
        Spec(1, "fused", "fp8_block", ""), Spec(2, "fused", "fp8_block", "BF16")}) {
    ASSERT_NO_FATAL_FAILURE(Plan(spec));
    for (const FillMethod method : {FillMethod::kWrite, FillMethod::kCopy}) {
      for (const int64_t chunk_bytes : {8192, 12'288, 1 << 20}) {
        const auto digests = Load({.reader_threads = 3, .chunk_bytes = chunk_bytes}, method);
        ASSERT_THAT(digests, IsOk());
        ASSERT_NO_FATAL_FAILURE(ExpectWhatThePlanSays(*digests)) << spec.DebugString() << chunk_bytes << " a chunk";
      }
    }
  }
}

TEST_F(NodeLoadTest, NamesTensorRowAndColumnOfAWeightThatIsNotFinite) {
  Write(Weights(), "l.0.b.weight");
  ASSERT_NO_FATAL_FAILURE(Plan(Spec(2, "hf", "fp8_block", "")));
  EXPECT_THAT(Load({}, FillMethod::kBest), AllOf(StatusIs(Reason::kWeightNotFinite, HasSubstr("\"l.0.b.weight\"")),
                                                 HasMetadata("row", "2"), HasMetadata("column", "7")));
}

TEST_F(NodeLoadTest, KeepsTheTypeOfWhatIsNotToBeConverted) {
  Write(Weights());
  ASSERT_NO_FATAL_FAILURE(Plan(Spec(2, "hf", "", "F32")));
  for (const TensorPlacement& tensor : plan_.shards[0].tensors) {
    EXPECT_EQ(tensor.dtype->name, tensor.name == "l.0.kept.weight" ? "F16"
                                  : tensor.name == "odd"           ? "U8"
                                                                   : "F32")
        << tensor.name;
  }
}

// Counts how often its buffers are released and refuses to be used after.
class CountingBuffers : public BufferSource {
 public:
  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override {
    const MutexLock lock(mutex_);
    ++allocated;
    buffers_.emplace_back(
        static_cast<std::byte*>(::operator new (static_cast<size_t>(size_bytes), std::align_val_t{4096})));
    return std::span(buffers_.back().get(), static_cast<size_t>(size_bytes));
  }
  int chunks_in_flight() const override { return 1; }

  int allocated = 0;

 private:
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete (bytes, std::align_val_t{4096}); }
  };
  Mutex mutex_;
  std::vector<std::unique_ptr<std::byte, Free>> buffers_;
};

TEST_F(NodeLoadTest, ReadsIntoTheBuffersThatItIsGiven) {
  Write(Weights());
  ASSERT_NO_FATAL_FAILURE(Plan(Spec(2, "hf", "", "")));
  CountingBuffers buffers;
  const auto digests =
      Load({.read_method = ReadMethod::kPread, .reader_threads = 1, .chunk_bytes = 8192, .buffers = &buffers},
           FillMethod::kBest);
  ASSERT_THAT(digests, IsOk());
  ExpectWhatThePlanSays(*digests);
  EXPECT_EQ(buffers.allocated, 2);
}

TEST_F(NodeLoadTest, NeverUsesMoreBuffersThanThreadsMayHave) {
  Write(Weights());
  ASSERT_NO_FATAL_FAILURE(Plan(Spec(2, "hf", "", "")));
  for (const ReadMethod method : {ReadMethod::kAuto, ReadMethod::kPread}) {
    CountingBuffers buffers;
    const auto digests = Load(
        {.read_method = method, .reader_threads = 3, .reads_per_thread = 4, .chunk_bytes = 8192, .buffers = &buffers},
        FillMethod::kBest);
    ASSERT_THAT(digests, IsOk());
    ExpectWhatThePlanSays(*digests);
    EXPECT_LE(buffers.allocated, 3 * (4 + 1));
  }
}

}  // namespace
}  // namespace weightbroker
