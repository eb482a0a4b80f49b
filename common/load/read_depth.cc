#include "common/load/read_depth.h"

#include <algorithm>

namespace weightbroker {
namespace {

// More reads must bring something: they take memory from caches, and noise must not drive the limit up.
constexpr double kGainOfMore = 1.10;
constexpr double kGainOfFewer = 1.03;
constexpr int64_t kTurnsOfWindow = 8;
constexpr int64_t kFewestReadsOfWindow = 16;
constexpr int kWindowsBetweenTries = 12;

// Of the rate at the settled limit, which drifts with what else the storage has to do.
constexpr double kWeightOfNewRate = 0.3;

}  // namespace

int64_t ReadDepth::ReadsOfWindow() const { return std::max(kFewestReadsOfWindow, kTurnsOfWindow * limit_); }

void ReadDepth::Completed(int64_t bytes, int64_t now_ns) {
  if (is_first_read_) {
    is_first_read_ = false;
    start_ns_ = now_ns;
    return;
  }
  bytes_ += bytes;
  if (++reads_ < ReadsOfWindow() || now_ns <= start_ns_) return;
  EndWindow(static_cast<double>(bytes_) / static_cast<double>(now_ns - start_ns_));
  start_ns_ = now_ns;
  bytes_ = 0;
  reads_ = 0;
}

void ReadDepth::EndWindow(double rate) {
  if (limit_ == settled_) {
    settled_rate_ = settled_rate_ == 0 ? rate : settled_rate_ + kWeightOfNewRate * (rate - settled_rate_);
    if (is_growing_) return Try(2 * settled_);
    if (--windows_until_try_ > 0) return;
    tried_more_ = !tried_more_;
    return Try(tried_more_ ? 2 * settled_ : settled_ / 2);
  }
  const bool is_better = rate > settled_rate_ * (limit_ > settled_ ? kGainOfMore : kGainOfFewer);
  if (!is_better) {
    limit_ = settled_;
    return Settle();
  }
  settled_ = limit_;
  settled_rate_ = rate;
  if (is_growing_) return Try(2 * settled_);
  Settle();
}

void ReadDepth::Try(int limit) {
  limit = std::clamp(limit, fewest_, most_);
  if (limit == settled_) return Settle();
  limit_ = limit;
  is_first_read_ = true;  // the first is only for the clock
}

void ReadDepth::Settle() {
  is_growing_ = false;
  windows_until_try_ = kWindowsBetweenTries;
  is_first_read_ = true;
}

}  // namespace weightbroker
