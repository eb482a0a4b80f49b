// What a weight set is, apart from its life in the registry. Plain values.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "common/identity/checkpoint_identity.h"
#include "common/identity/fingerprint.h"
#include "server/broker/placement.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// For whom a set is never evicted; it may be where that is nobody.
enum class PinOwner { kCaller, kDesiredState };
struct Pins {
  bool by_caller = false;         // of Register
  bool by_desired_state = false;  // the file of --desired

  bool any() const { return by_caller || by_desired_state; }
  bool& Of(PinOwner owner) { return owner == PinOwner::kCaller ? by_caller : by_desired_state; }
  bool operator==(const Pins&) const = default;
};

// All that a request for a weight set comes to.
struct NewWeightSet {
  v1::WeightSpec spec;  // completed, the model as a resolved absolute path
  v1::Environment environment;
  Fingerprint fingerprint;
  // The files that the fingerprint is over; never null.
  std::shared_ptr<const CheckpointIdentity> identity = std::make_shared<const CheckpointIdentity>();
  Placement placement = {};
  Pins pins = {};
};

// How a weight set came to be resident. The same for every broker that serves it.
struct Residency {
  int64_t generation = 0;
  std::chrono::system_clock::time_point register_time = {};
  std::chrono::system_clock::time_point resident_time = {};
  double load_seconds = 0;
  int64_t read_bytes = 0;
};

}  // namespace weightbroker
