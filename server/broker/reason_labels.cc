#include "server/broker/reason_labels.h"

#include <algorithm>

#include "common/base/reason.h"

namespace weightbroker {
namespace {

constexpr char kOtherReason[] = "OTHER";

}  // namespace

const std::vector<std::string>& ReasonLabels() {
  static const auto* const labels = new std::vector<std::string>{
#define WEIGHTBROKER_REASON_NAME(enumerator, name, code) name,
      WEIGHTBROKER_REASONS(WEIGHTBROKER_REASON_NAME)
#undef WEIGHTBROKER_REASON_NAME
          kOtherReason};
  return *labels;
}

std::string ReasonLabel(const std::string& reason) {
  const std::vector<std::string>& known = ReasonLabels();
  return std::find(known.begin(), known.end(), reason) != known.end() ? reason : kOtherReason;
}

}  // namespace weightbroker
