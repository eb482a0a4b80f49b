#include "common/load/landed_digests.h"

#include <map>
#include <string_view>
#include <utility>

#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

// Of scales, which come with what they scale, and of a tensor in which nothing lands: they are taken at the end. Nor of
// an alias, which has no bytes of its own.
constexpr int64_t kNotCounted = -1;

std::vector<int64_t> CountElements(const ShardPlan& plan) {
  std::vector<int64_t> missing;
  for (const TensorPlacement& tensor : plan.tensors) {
    int64_t elements = 0;
    for (const Piece& piece : tensor.pieces) elements += piece.run_count * piece.run_elements;
    missing.push_back(elements > 0 ? elements : kNotCounted);
  }
  return missing;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LandedDigests>> LandedDigests::Create(const ShardPlan& plan,
                                                                     std::vector<GpuRange> places,
                                                                     const GpuDigester& digester, int64_t batch_bytes) {
  ASSIGN_OR_RETURN(GpuDigestRun run, digester.Begin(places.size()));
  return std::unique_ptr<LandedDigests>(new LandedDigests(plan, std::move(places), std::move(run), batch_bytes));
}

LandedDigests::LandedDigests(const ShardPlan& plan, std::vector<GpuRange> places, GpuDigestRun run, int64_t batch_bytes)
    : plan_(plan),
      places_(std::move(places)),
      batch_bytes_(batch_bytes),
      run_(std::move(run)),
      missing_(CountElements(plan)) {}

absl::Status LandedDigests::Landed(std::span<const Arrival> arrivals) {
  MutexLock lock(mutex_);
  for (const Arrival& arrival : arrivals) {
    const auto tensor = static_cast<size_t>(arrival.tensor);
    if (missing_[tensor] == kNotCounted) continue;
    missing_[tensor] -= arrival.elements;
    if (missing_[tensor] != 0) continue;
    whole_.push_back(tensor);
    waiting_bytes_ += places_[tensor].size_bytes;
  }
  return waiting_bytes_ >= batch_bytes_ ? Start() : absl::OkStatus();
}

absl::Status LandedDigests::Start() {
  std::vector<GpuRange> ranges;
  for (size_t i = started_; i < whole_.size(); ++i) ranges.push_back(places_[whole_[i]]);
  started_ = whole_.size();
  waiting_bytes_ = 0;
  return run_.Add(ranges);
}

absl::StatusOr<std::vector<Digest>> LandedDigests::Finish() {
  MutexLock lock(mutex_);
  std::map<std::string_view, size_t> by_name;
  for (size_t i = 0; i < plan_.tensors.size(); ++i) {
    by_name[plan_.tensors[i].name] = i;
    if (missing_[i] != 0 && plan_.tensors[i].alias_of.empty()) whole_.push_back(i);
  }
  RETURN_IF_ERROR(Start());
  ASSIGN_OR_RETURN(const std::vector<Digest> in_order, run_.Finish());
  if (in_order.size() != whole_.size()) return absl::InternalError("digests that could not be started are missing");
  std::vector<Digest> digests(plan_.tensors.size());
  for (size_t i = 0; i < whole_.size(); ++i) digests[whole_[i]] = in_order[i];
  for (size_t i = 0; i < digests.size(); ++i) {
    const std::string& target = plan_.tensors[i].alias_of;
    if (!target.empty()) digests[i] = digests[by_name.at(target)];
  }
  return digests;
}

}  // namespace weightbroker
