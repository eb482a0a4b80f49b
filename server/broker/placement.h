// Which ranks of a weight set this service holds, on which device each, and as what: what a Register asks for, checked
// against the devices that there are. No part of the fingerprint: the same weights elsewhere are the same weights.
//
//   ASSIGN_OR_RETURN(const Placement placement, PlaceRanks(request, WorldSize(spec), HostOnly()));
//   for (const RankPlacement& rank : placement.ranks) ...              // by rank, each once
//
// Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "weightbroker/v1/types.pb.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

// Host memory, which takes any number of ranks. Every other device is named by its UUID.
inline constexpr char kHostDevice[] = "host";

// A device that this service can hold shards on.
struct ServedDevice {
  std::string name;
  std::vector<v1::HandleKind> handle_kinds;  // best first
  std::string fault = {};                    // why no more weights are put there; empty if they are
};
std::vector<ServedDevice> HostOnly();

struct RankPlacement {
  int32_t rank = 0;
  std::string device = kHostDevice;

  bool operator==(const RankPlacement&) const = default;
};

struct Placement {
  std::vector<RankPlacement> ranks = {RankPlacement{}};  // by rank, each once; never empty
  int32_t world_size = 1;                                // ranks of the whole set, wherever they are
  v1::HandleKind handle_kind = v1::HANDLE_KIND_HOST_MEMFD;
};

// Every rank of a set of `world_size` on the host.
Placement AllOnHost(int32_t world_size);

// Every kind that one of `devices` offers, best first.
std::vector<v1::HandleKind> HandleKindsOf(std::span<const ServedDevice> devices);

// The placement that `request` asks for. What it leaves open is filled in: all ranks; the first device's best kind; and
// for that kind the host if it offers it, else one device for each rank, in the order of `devices` (never empty, and in
// their order of preference). RANK_OUT_OF_RANGE for a rank outside the world, DEVICE_UNKNOWN, HANDLE_KIND_UNSUPPORTED
// if no device has one of the kinds asked for, INVALID_ARGUMENT for a rank twice, for more or fewer devices than ranks,
// and for more ranks than there are devices.
absl::StatusOr<Placement> PlaceRanks(const v1::RegisterRequest& request, int32_t world_size,
                                     std::span<const ServedDevice> devices);

// Whether a set that is placed like `found` does for `request`, which came to `wanted`: what the request leaves open
// may be anything. PLACEMENT_MISMATCH, or HANDLE_KIND_UNSUPPORTED, naming both.
absl::Status CheckPlacement(const v1::RegisterRequest& request, const Placement& wanted, const Placement& found);

// Whether a set that is placed like `found` is held as `request` says that it is to be: those ranks and no others,
// every rank where it names none, and on those devices if it names any. PLACEMENT_MISMATCH, or HANDLE_KIND_UNSUPPORTED,
// naming both.
absl::Status CheckHeld(const v1::RegisterRequest& request, const Placement& found);

// "0-3, 6", for people.
std::string JoinRanks(std::span<const RankPlacement> ranks);

}  // namespace weightbroker
