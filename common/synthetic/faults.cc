#include "common/synthetic/faults.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace weightbroker {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr auto kNothing = FaultNeeds::kNothing;
constexpr auto kTwoShards = FaultNeeds::kTwoShards;
constexpr auto kFp8 = FaultNeeds::kFp8;

ShardDraft& LastShard(CheckpointDraft& draft) { return draft.shards.back(); }
TensorDraft& LastTensor(CheckpointDraft& draft) { return draft.shards.back().tensors.back(); }

std::string FirstFp8Weight(const CheckpointDraft& draft) {
  for (const ShardDraft& shard : draft.shards) {
    for (const TensorDraft& tensor : shard.tensors) {
      if (tensor.dtype == "F8_E4M3") return tensor.name;
    }
  }
  return "";
}

void Remove(CheckpointDraft& draft, const std::string& name) {
  for (ShardDraft& shard : draft.shards) {
    std::erase_if(shard.tensors, [&](const TensorDraft& tensor) { return tensor.name == name; });
  }
  draft.weight_map.erase(name);
}

// Lets the header say something else of the last tensor of the last shard.
void EditLastEntry(CheckpointDraft& draft, void (*edit)(OrderedJson& entry)) {
  LastShard(draft).edit_header = [edit](OrderedJson& header) { edit(header.back()); };
}

void Declare(CheckpointDraft& draft, OrderedJson quantization) {
  draft.config["quantization_config"] = std::move(quantization);
}

const CheckpointFault kFaults[] = {
    // Files that are not whole, or not there.
    {"truncated_shard", Reason::kCheckpointTruncated, "the last shard lacks its last byte", kNothing,
     [](CheckpointDraft& draft) { LastShard(draft).missing_bytes = 1; }},
    {"header_beyond_the_end", Reason::kCheckpointTruncated, "a header is said to be longer than its file", kNothing,
     [](CheckpointDraft& draft) {
       LastShard(draft).stated_header_bytes = 99'000'000;
       LastShard(draft).missing_bytes = LastShard(draft).data_bytes();
     }},
    {"missing_shard", Reason::kCheckpointIncomplete, "a shard that the index names is not there", kTwoShards,
     [](CheckpointDraft& draft) { LastShard(draft).is_absent = true; }},
    {"missing_config", Reason::kCheckpointIncomplete, "there is no config.json", kNothing,
     [](CheckpointDraft& draft) { draft.files[kConfigName] = ""; }},
    {"folder_for_a_shard", Reason::kCheckpointUnreadable, "a shard's name is a folder's", kNothing,
     [](CheckpointDraft& draft) { LastShard(draft).is_folder = true; }},
    {"lfs_pointer", Reason::kCheckpointNotSafetensors, "a pointer of Git LFS lies in place of a shard", kNothing,
     [](CheckpointDraft& draft) {
       LastShard(draft).contents =
           "version https://git-lfs.github.com/spec/v1\n"
           "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4976698672\n";
     }},
    {"html_page", Reason::kCheckpointNotSafetensors, "a web page lies in place of a shard", kNothing,
     [](CheckpointDraft& draft) {
       LastShard(draft).contents = "<!DOCTYPE html>\n<html><body>401 Unauthorized</body></html>\n";
     }},
    {"only_pickle", Reason::kCheckpointNotSafetensors, "there is only a pytorch_model.bin", kNothing,
     [](CheckpointDraft& draft) {
       draft.shards.clear();
       draft.has_index = false;
       draft.files["pytorch_model.bin"] = std::string("\x80\x02}q\x00.", 6);
     }},

    // Headers.
    {"header_too_large", Reason::kCheckpointTooLarge, "a header is said to be longer than the format allows", kNothing,
     [](CheckpointDraft& draft) { LastShard(draft).stated_header_bytes = 100'000'001; }},
    {"trailing_bytes", Reason::kCheckpointMalformed, "bytes follow the last tensor", kNothing,
     [](CheckpointDraft& draft) { LastShard(draft).trailing_bytes = "left over"; }},
    {"hole", Reason::kCheckpointMalformed, "bytes of the file belong to no tensor", kNothing,
     [](CheckpointDraft& draft) {
       LastShard(draft).edit_header = [name = LastShard(draft).tensors.front().name](OrderedJson& header) {
         header.erase(name);
       };
     }},
    {"overlap", Reason::kCheckpointMalformed, "two tensors share bytes", kNothing,
     [](CheckpointDraft& draft) {
       LastShard(draft).edit_header = [](OrderedJson& header) {
         OrderedJson copy = header.back();
         header["zz.overlapping"] = std::move(copy);
       };
     }},
    {"duplicate_key", Reason::kCheckpointMalformed, "a header has one name twice", kNothing,
     [](CheckpointDraft& draft) {
       LastShard(draft).edit_header_text = [name = LastTensor(draft).name](std::string& text) {
         const std::string key = "\"" + name + "\":";
         const std::string entry = text.substr(text.find(key));
         text.insert(text.size() - 1, "," + entry.substr(0, entry.size() - 1));
       };
     }},
    {"shape_of_another_size", Reason::kCheckpointMalformed, "a tensor's shape does not give its bytes", kNothing,
     [](CheckpointDraft& draft) { EditLastEntry(draft, [](OrderedJson& entry) { entry["shape"].push_back(3); }); }},
    {"unknown_dtype", Reason::kCheckpointMalformed, "a tensor's type is none of the format's", kNothing,
     [](CheckpointDraft& draft) { EditLastEntry(draft, [](OrderedJson& entry) { entry["dtype"] = "float32"; }); }},
    {"unservable_dtype", Reason::kDtypeUnsupported, "a tensor's type is one that is not served", kNothing,
     [](CheckpointDraft& draft) {
       EditLastEntry(draft, [](OrderedJson& entry) {
         entry["dtype"] = "F8_E5M2";
         entry["shape"] = {entry["data_offsets"][1].get<int64_t>() - entry["data_offsets"][0].get<int64_t>()};
       });
     }},
    {"no_tensors", Reason::kCheckpointEmpty, "the only shard has no tensors", kNothing,
     [](CheckpointDraft& draft) {
       draft.shards.resize(1);
       draft.shards[0] = {.name = kSingleShardName};
       draft.has_index = false;
     }},

    // The index.
    {"index_of_an_absent_tensor", Reason::kCheckpointIndexMismatch, "the index has a tensor that its shard lacks",
     kTwoShards, [](CheckpointDraft& draft) { draft.weight_map["model.absent.weight"] = LastShard(draft).name; }},
    {"tensor_not_in_the_index", Reason::kCheckpointIndexMismatch, "the index lacks a tensor", kTwoShards,
     [](CheckpointDraft& draft) { draft.weight_map.erase(LastTensor(draft).name); }},
    {"index_of_another_shard", Reason::kCheckpointIndexMismatch, "the index has a tensor in another shard", kTwoShards,
     [](CheckpointDraft& draft) { draft.weight_map[LastTensor(draft).name] = draft.shards.front().name; }},
    {"tensor_in_two_shards", Reason::kCheckpointMalformed, "two shards have one tensor", kTwoShards,
     [](CheckpointDraft& draft) {
       const TensorDraft copy = draft.shards.front().tensors.front();
       LastShard(draft).tensors.push_back(copy);
     }},
    {"single_file_beside_the_index", Reason::kCheckpointIndexMismatch, "there is a model.safetensors, too", kTwoShards,
     [](CheckpointDraft& draft) {
       draft.shards.push_back({.name = kSingleShardName, .tensors = draft.shards.front().tensors});
     }},
    {"path_out_of_the_folder", Reason::kCheckpointPathUnsafe, "the index names a file outside the folder", kTwoShards,
     [](CheckpointDraft& draft) { draft.weight_map[LastTensor(draft).name] = "../" + LastShard(draft).name; }},

    // config.json.
    {"config_with_a_comma_too_many", Reason::kConfigMalformed, "config.json is no strict JSON", kNothing,
     [](CheckpointDraft& draft) { draft.files[kConfigName] = "{\"model_type\": \"llama\",}\n"; }},
    {"config_with_nan", Reason::kConfigMalformed, "config.json has a NaN", kNothing,
     [](CheckpointDraft& draft) { draft.files[kConfigName] = "{\"rope_theta\": NaN}\n"; }},
    {"config_with_a_key_twice", Reason::kConfigMalformed, "config.json has one key twice", kNothing,
     [](CheckpointDraft& draft) { draft.files[kConfigName] = "{\"hidden_size\": 1, \"hidden_size\": 2}\n"; }},

    // Quantizations whose raw bytes are not all of their meaning.
    {"gptq", Reason::kQuantizationUnsupported, "declares GPTQ", kNothing,
     [](CheckpointDraft& draft) {
       Declare(draft, {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}, {"desc_act", false}});
     }},
    {"awq", Reason::kQuantizationUnsupported, "declares AWQ", kNothing,
     [](CheckpointDraft& draft) {
       Declare(draft, {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 128}, {"version", "gemm"}});
     }},
    {"bitsandbytes", Reason::kQuantizationUnsupported, "declares bitsandbytes", kNothing,
     [](CheckpointDraft& draft) {
       Declare(draft, {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}});
     }},
    {"compressed_tensors", Reason::kQuantizationUnsupported, "declares compressed-tensors", kNothing,
     [](CheckpointDraft& draft) {
       Declare(draft, {{"quant_method", "compressed-tensors"}, {"format", "float-quantized"}});
     }},
    {"mxfp4", Reason::kQuantizationUnsupported, "declares MXFP4", kNothing,
     [](CheckpointDraft& draft) {
       Declare(draft, {{"quant_method", "mxfp4"}});
     }},
    {"fbgemm_fp8", Reason::kQuantizationUnsupported, "declares fbgemm_fp8, a scale for each row", kNothing,
     [](CheckpointDraft& draft) {
       Declare(draft, {{"quant_method", "fbgemm_fp8"}, {"activation_scale_ub", 1200.0}});
     }},
    {"modelopt_side_file", Reason::kQuantizationUnsupported, "hf_quant_config.json declares ModelOpt", kNothing,
     [](CheckpointDraft& draft) {
       draft.config.erase("quantization_config");
       draft.files["hf_quant_config.json"] =
           R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})";
     }},
    {"fp8_without_a_block", Reason::kQuantizationUnsupported, "declares FP8 without a block size", kFp8,
     [](CheckpointDraft& draft) { draft.config["quantization_config"].erase("weight_block_size"); }},
    {"fp8_with_another_block", Reason::kQuantizationUnsupported, "declares FP8 in blocks of 64x64", kFp8,
     [](CheckpointDraft& draft) {
       draft.config["quantization_config"]["weight_block_size"] = {64, 64};
     }},
    {"fp8_with_no_block", Reason::kQuantizationMalformed, "declares FP8 in blocks of 128x0", kFp8,
     [](CheckpointDraft& draft) {
       draft.config["quantization_config"]["weight_block_size"] = {128, 0};
     }},
    {"two_declarations", Reason::kQuantizationConflict, "two places declare different FP8", kFp8,
     [](CheckpointDraft& draft) {
       OrderedJson other = draft.config["quantization_config"];
       other["modules_to_not_convert"] = {"lm_head"};
       draft.config["text_config"] = {{"quantization_config", std::move(other)}};
     }},
    {"undeclared_fp8", Reason::kQuantizationContradicted, "weights are in FP8, and nothing declares it", kFp8,
     [](CheckpointDraft& draft) { draft.config.erase("quantization_config"); }},
    {"missing_scale", Reason::kQuantizationContradicted, "a weight in FP8 has no scale", kFp8,
     [](CheckpointDraft& draft) { Remove(draft, FirstFp8Weight(draft) + "_scale_inv"); }},
    {"scale_of_another_shape", Reason::kQuantizationContradicted, "a scale has a block too many", kFp8,
     [](CheckpointDraft& draft) {
       const std::string name = FirstFp8Weight(draft) + "_scale_inv";
       for (ShardDraft& shard : draft.shards) {
         for (TensorDraft& tensor : shard.tensors) {
           if (tensor.name == name) ++tensor.shape[0];
         }
       }
     }},
    {"ignored_module_in_fp8", Reason::kQuantizationContradicted, "a module that is said not to be in FP8 is", kFp8,
     [](CheckpointDraft& draft) {
       const std::string name = FirstFp8Weight(draft);
       draft.config["quantization_config"]["modules_to_not_convert"] = {name.substr(0, name.rfind('.'))};
     }},
};

}  // namespace

ModelRequest CheckpointFault::Prepare(ModelRequest request) const {
  if (needs == FaultNeeds::kTwoShards) request.shard_count = std::max<int64_t>(request.shard_count, 2);
  if (needs == FaultNeeds::kFp8) request.fp8 = true;
  return request;
}

std::span<const CheckpointFault> CheckpointFaults() { return kFaults; }

const CheckpointFault* FindFault(std::string_view name) {
  const auto found = std::find_if(std::begin(kFaults), std::end(kFaults),
                                  [&](const CheckpointFault& fault) { return fault.name == name; });
  return found == std::end(kFaults) ? nullptr : found;
}

}  // namespace weightbroker
