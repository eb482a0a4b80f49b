// Well-known ways in which a checkpoint is wrong, each of which is refused before any memory is taken, with the reason
// that stands beside it.
//
//   const CheckpointFault* const fault = FindFault("truncated_shard");                // null: there is no such fault
//   ASSIGN_OR_RETURN(CheckpointDraft draft, DraftModel(fault->Prepare(request)));
//   fault->plant(draft);
//
// Thread-safe: pure functions.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "common/base/reason.h"
#include "common/synthetic/checkpoint_draft.h"
#include "common/synthetic/model.h"

namespace weightbroker {

// What a draft must have for a fault to be planted in it.
enum class FaultNeeds {
  kNothing,
  kTwoShards,  // and so an index
  kFp8,        // block-wise FP8
};

struct CheckpointFault {
  const char* name;
  Reason reason;     // for which it is refused
  const char* what;  // for people
  FaultNeeds needs;
  void (*plant)(CheckpointDraft&);

  // `request` with what the fault needs.
  ModelRequest Prepare(ModelRequest request) const;
};

std::span<const CheckpointFault> CheckpointFaults();
const CheckpointFault* FindFault(std::string_view name);

}  // namespace weightbroker
