// The end of a loader's conversation with the broker: one rank's finished slabs and their manifest.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "common/memory/host_slab.h"
#include "server/loader/load_memory.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

struct ShardFacts {
  int32_t rank = 0;
  int64_t tensor_count = 0;
  int64_t read_bytes = 0;
  double digest_seconds = 0;                         // of a publication
  const internal::v1::LoadReport* report = nullptr;  // of a load
};

// A sealed memfd, as it is handed over.
FinishedSlab FromSealed(SealedSlab slab);

// Sends LoadSealed with the slabs' descriptors, where they have any, and the manifest's. SERVICE_UNAVAILABLE if the
// broker has gone.
absl::Status SendShard(int control_fd, const ShardFacts& facts, std::span<const FinishedSlab> slabs,
                       const std::string& manifest);

// Returns once nobody holds the other end of the control socket any more: for a process whose memory goes with it.
void WaitForTheEnd(int control_fd);

}  // namespace weightbroker
