#include "server/broker/publish_gate.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/plan/plan.h"

namespace weightbroker {
namespace {

constexpr const char* kAlwaysAllowed[] = {kSpecAuto, "none", "fp8", "fp8_block"};

}  // namespace

absl::Status CheckPublishQuantization(const v1::WeightSpec& spec, const PublishQuantizations& allowed) {
  const std::string& method = spec.quantization();
  const bool is_known =
      std::find(std::begin(kAlwaysAllowed), std::end(kAlwaysAllowed), method) != std::end(kAlwaysAllowed);
  if (is_known || allowed.count({spec.engine(), spec.engine_version(), method}) > 0) return absl::OkStatus();
  const std::string entry = absl::StrCat(spec.engine(), "/", spec.engine_version(), "/", method);
  return MakeError(Reason::kQuantizationUnsupported,
                   absl::StrCat("spec.quantization is ", method,
                                ", and an engine may publish none and block-wise FP8 only, unless the service was "
                                "started with --publish_quantizations=",
                                entry),
                   {{"method", method},
                    {"source", "spec.quantization"},
                    {"engine", spec.engine()},
                    {"engine_version", spec.engine_version()}});
}

}  // namespace weightbroker
