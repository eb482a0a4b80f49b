#include "common/plan/engine_layout.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr size_t kMaxBytes = 128;

absl::Status CheckField(const std::string& field, const std::string& value, bool wanted) {
  if (!wanted && value.empty()) return absl::OkStatus();
  if (!wanted) {
    return MakeError(
        Reason::kInvalidArgument,
        absl::StrCat("spec.", field, " is ", Quote(value), ", which only goes with layout ", kEngineLayout),
        {{"field", absl::StrCat("spec.", field)}, {"found", Printable(value)}});
  }
  const bool is_fine = !value.empty() && value.size() <= kMaxBytes &&
                       std::all_of(value.begin(), value.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (is_fine) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("spec.", field, " is ", Quote(value), "; layout ", kEngineLayout, " needs 1 to ",
                                kMaxBytes, " bytes of printable ASCII without spaces there"),
                   {{"field", absl::StrCat("spec.", field)}, {"found", Printable(value)}});
}

}  // namespace

absl::Status CheckEngineFields(const v1::WeightSpec& spec) {
  RETURN_IF_ERROR(CheckField("engine", spec.engine(), IsEngineLayout(spec)));
  return CheckField("engine_version", spec.engine_version(), IsEngineLayout(spec));
}

absl::Status CheckEngineQuantization(const v1::WeightSpec& spec) {
  return CheckField("quantization", spec.quantization(), true);
}

}  // namespace weightbroker
