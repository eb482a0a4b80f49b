// Which quantization an engine may say that its published weights have. Thread-safe: pure.
#pragma once

#include <compare>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// One that the operator has allowed, for exactly one version of one engine.
struct PublishQuantization {
  std::string engine;
  std::string version;
  std::string method;

  auto operator<=>(const PublishQuantization&) const = default;
};
using PublishQuantizations = std::set<PublishQuantization>;

// Ok for none, for block-wise FP8 however it came about, for the checkpoint's own (which the loader checks), and for
// what is `allowed`. QUANTIZATION_UNSUPPORTED naming engine, version and method otherwise: raw bytes are not all that
// other methods mean.
absl::Status CheckPublishQuantization(const v1::WeightSpec& spec, const PublishQuantizations& allowed);

}  // namespace weightbroker
