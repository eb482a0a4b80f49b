#include "client/tool/spec_flags.h"

#include <string>
#include <tuple>
#include <vector>

#include "client/tool/validators.h"

namespace weightbroker::tool {

void AddSpecFlags(CLI::App* command, v1::WeightSpec* spec) {
  using Setter = void (v1::WeightSpec::*)(int32_t);
  const std::tuple<const char*, const char*, Setter> sizes[] = {
      {"--tp", "Ranks that each weight is split over; default: 1", &v1::WeightSpec::set_tensor_parallel_size},
      {"--pp", "Stages that the layers are split over; default: 1", &v1::WeightSpec::set_pipeline_parallel_size},
      {"--ep", "Groups that the experts are split over; default: 1", &v1::WeightSpec::set_expert_parallel_size},
      {"--dp", "Replicas of everything but the experts; default: 1", &v1::WeightSpec::set_data_parallel_size}};
  for (const auto& [name, help, set] : sizes) {
    command
        ->add_option_function<int32_t>(
            name, [spec, set = set](int32_t size) { (spec->*set)(size); }, help)
        ->check(WholeNumberFrom(1));
  }
  command
      ->add_option("--layout", *spec->mutable_layout(),
                   "hf, the checkpoint's own names, or fused, as engines fuse them; default: hf")
      ->check(Utf8());
  command
      ->add_option("--quantization,--quantize", *spec->mutable_quantization(),
                   "none, fp8, or fp8_block to quantize while loading; default: what the checkpoint declares")
      ->check(Utf8());
  command
      ->add_option_function<std::vector<std::string>>(
          "--unquantized_modules",
          [spec](const std::vector<std::string>& names) {
            spec->mutable_unquantized_modules()->Assign(names.begin(), names.end());
          },
          "Modules that fp8_block leaves as they are, as lm_head,qkv_proj")
      ->delimiter(',')
      ->check(Utf8());
  command->add_option("--dtype", *spec->mutable_dtype(), "BF16, F16 or F32; default: the checkpoint's own")
      ->check(Utf8());
  command
      ->add_option("--mtp_layers", *spec->mutable_mtp_layers(),
                   "keep or drop layers for multi-token prediction; default: keep")
      ->check(Utf8());
}

}  // namespace weightbroker::tool
