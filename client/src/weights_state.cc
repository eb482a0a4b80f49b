#include "client/src/weights_state.h"

#include "client/src/slab_mapping.h"
#include "common/base/error.h"

namespace weightbroker::client {

absl::Status VerifyAndReport(const WeightsState& state, int threads) {
  absl::Status status = state.memory->Verify(state.manifest.tensors, ChooseThreads(threads));
  if (state.lease != nullptr && HasReason(status, Reason::kDigestMismatch)) {
    state.lease->ReportDamage(GetErrorDetails(status).metadata["tensor"]);
  }
  return status;
}

}  // namespace weightbroker::client
