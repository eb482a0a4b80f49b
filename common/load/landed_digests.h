// The digests of a shard's tensors in GPU memory, each taken as soon as the tensor has landed whole, behind the copies
// of others: at the end hardly any is left to take.
//
//   ASSIGN_OR_RETURN(auto digests, LandedDigests::Create(plan, places, digester));
//   RETURN_IF_ERROR(digests->Landed(arrivals));                  // for all that lands, on any thread
//   ASSIGN_OR_RETURN(const std::vector<Digest> all, digests->Finish());   // once everything has
//
// Landed is thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/device/gpu_digest.h"
#include "common/plan/plan.h"

namespace weightbroker {

class LandedDigests {
 public:
  // Elements of a tensor, none of which have been told before.
  struct Arrival {
    int32_t tensor = 0;  // into ShardPlan::tensors
    int64_t elements = 0;
  };

  // A launch for 1 GiB takes the GPU 0.3 ms, and hides behind 20 ms of copies.
  static constexpr int64_t kBatchBytes = 1 << 30;

  // `places` are those of the plan's tensors; plan and digester outlive the object. What has landed is digested as soon
  // as it comes to `batch_bytes`. CUDA_ERROR, MEMORY_EXHAUSTED.
  static absl::StatusOr<std::unique_ptr<LandedDigests>> Create(const ShardPlan& plan, std::vector<GpuRange> places,
                                                               const GpuDigester& digester,
                                                               int64_t batch_bytes = kBatchBytes);

  // These are in place, and stay as they are. Starts digests, and waits for none. CUDA_ERROR.
  absl::Status Landed(std::span<const Arrival> arrivals);

  // Takes the digests that are left, waits for all, and returns them in the plan's order, an alias's being that of its
  // target. Nothing lands after it. CUDA_ERROR.
  absl::StatusOr<std::vector<Digest>> Finish();

 private:
  LandedDigests(const ShardPlan& plan, std::vector<GpuRange> places, GpuDigestRun run, int64_t batch_bytes);

  absl::Status Start() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ShardPlan& plan_;
  const std::vector<GpuRange> places_;
  const int64_t batch_bytes_;

  Mutex mutex_;
  GpuDigestRun run_ ABSL_GUARDED_BY(mutex_);
  // Elements of each tensor that are still to come; kNotCounted where that is not known.
  std::vector<int64_t> missing_ ABSL_GUARDED_BY(mutex_);
  std::vector<size_t> whole_ ABSL_GUARDED_BY(mutex_);  // tensors in the order in which they were whole
  size_t started_ ABSL_GUARDED_BY(mutex_) = 0;         // so many of whole_ are being digested
  int64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the others
};

}  // namespace weightbroker
