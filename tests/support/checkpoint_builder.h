// Writes model folders for tests, right ones and wrong ones.
//
//   CheckpointBuilder().Tensor("a", "BF16", {2, 3}).Write(dir);                               // model.safetensors
//   CheckpointBuilder().Tensor("a", "F32", {4}, "x.safetensors").WithIndex().Write(dir);      // an index and one shard
//   CheckpointBuilder().BlockFp8("l.weight", {256, 128}).Config(kBlockFp8Config).Write(dir);  // weight and its scales
//
// Values are made from the tensor's name, so that two builders give the same bytes for the same tensors. Tensors lie in
// a file in the order in which they were added.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace weightbroker::testing {

inline constexpr char kPlainConfig[] = R"({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"})";
inline constexpr char kBlockFp8Config[] =
    R"({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})";

class CheckpointBuilder {
 public:
  static constexpr char kSingle[] = "model.safetensors";

  CheckpointBuilder& Tensor(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
                            const std::string& file = kSingle);

  // An F8_E4M3 weight and, as "<name>_scale_inv", its scales in blocks of 128x128.
  CheckpointBuilder& BlockFp8(const std::string& name, const std::vector<int64_t>& shape,
                              const std::string& file = kSingle, const std::string& scale_dtype = "F32");

  // An entry of __metadata__.
  CheckpointBuilder& Metadata(const std::string& key, const std::string& value, const std::string& file = kSingle);

  // config.json; kPlainConfig without a call. An empty text writes none.
  CheckpointBuilder& Config(const std::string& text);

  // Another file, as it is.
  CheckpointBuilder& File(const std::string& name, const std::string& contents);

  // Writes an index of all tensors, with what IndexEntry and NotIndexed change in it.
  CheckpointBuilder& WithIndex();
  CheckpointBuilder& IndexEntry(const std::string& tensor, const std::string& file);
  CheckpointBuilder& NotIndexed(const std::string& tensor);

  // Leaves a shard out that the index names.
  CheckpointBuilder& WithoutShard(const std::string& file);

  // Stops the test program if the system refuses.
  void Write(const std::string& folder) const;

  // The bytes of one file, as Write would write them.
  std::string FileBytes(const std::string& file = kSingle) const;

 private:
  struct Entry {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;
  };

  std::string IndexText() const;

  std::map<std::string, std::vector<Entry>> shards_;
  std::map<std::string, std::map<std::string, std::string>> metadata_;
  std::map<std::string, std::string> files_;
  std::map<std::string, std::string> index_changes_;  // an empty file name takes the entry out
  bool has_index_ = false;
  std::string config_ = kPlainConfig;
};

// The bytes of a safetensors file with this header text and `data_bytes` of zeros.
std::string RawSafetensors(std::string_view header, size_t data_bytes = 0);

// The bytes that the builder gives a tensor.
std::string TensorBytes(const std::string& name, size_t size_bytes);

}  // namespace weightbroker::testing
