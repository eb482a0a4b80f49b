#include "common/load/read_depth.h"

#include <algorithm>

namespace weightbroker {
namespace {

// More reads must bring something: they take memory from caches, and noise must not drive the limit up.
constexpr double kGainOfMore = 1.10;
constexpr double kGainOfFewer = 1.03;
constexpr int64_t kTurnsOfWindow = 8;
constexpr int64_t kFewestReadsOfWindow = 16;
constexpr int kFirstWindowsBetweenTries = 12;
constexpr int kMostWindowsBetweenTries = 768;
constexpr int kWinsNeeded = 2;

// After so many windows that are so much slower storage is another, and may like fewer.
constexpr double kLossOfChange = 0.5;
constexpr int kLossesOfChange = 2;

// Of the rate at the settled limit, which drifts with what else the storage has to do.
constexpr double kWeightOfNewRate = 0.3;

}  // namespace

ReadDepth::ReadDepth(int first, int most)
    : fewest_(first),
      most_(most),
      limit_(first),
      settled_(first),
      tried_(first),
      windows_between_tries_(kFirstWindowsBetweenTries) {}

int64_t ReadDepth::ReadsOfWindow() const { return std::max(kFewestReadsOfWindow, kTurnsOfWindow * limit_); }

void ReadDepth::Completed(int64_t bytes, int64_t now_ns) {
  if (is_first_read_) {
    is_first_read_ = false;
    start_ns_ = now_ns;
    return;
  }
  bytes_ += bytes;
  if (++reads_ < ReadsOfWindow() || now_ns <= start_ns_) return;
  const double rate = static_cast<double>(bytes_) / static_cast<double>(now_ns - start_ns_);
  start_ns_ = now_ns;
  bytes_ = 0;
  reads_ = 0;
  EndWindow(rate);
}

void ReadDepth::EndWindow(double rate) {
  if (limit_ == settled_) return EndSettledWindow(rate);
  const bool is_win = rate > settled_rate_ * (limit_ > settled_ ? kGainOfMore : kGainOfFewer);
  if (!is_win) {
    windows_between_tries_ = std::min(2 * windows_between_tries_, kMostWindowsBetweenTries);
    return EndTrial();
  }
  if (++wins_ < kWinsNeeded) return MoveTo(settled_);
  settled_ = tried_;
  settled_rate_ = rate;
  windows_between_tries_ = kFirstWindowsBetweenTries;
  if (!is_growing_) return EndTrial();
  StartTrial(2 * settled_);
}

void ReadDepth::EndSettledWindow(double rate) {
  if (rate < kLossOfChange * settled_rate_) {
    if (++losses_ < kLossesOfChange) return;
    settled_rate_ = rate;
    is_growing_ = false;
    tried_more_ = false;
    windows_between_tries_ = kFirstWindowsBetweenTries;
    return StartTrial(settled_ / 2);
  }
  losses_ = 0;
  settled_rate_ = settled_rate_ == 0 ? rate : settled_rate_ + kWeightOfNewRate * (rate - settled_rate_);
  if (wins_ > 0) return MoveTo(tried_);
  if (is_growing_) return StartTrial(2 * settled_);
  if (--windows_until_try_ > 0) return;
  tried_more_ = !tried_more_ || settled_ == fewest_;
  StartTrial(tried_more_ ? 2 * settled_ : settled_ / 2);
}

void ReadDepth::StartTrial(int limit) {
  tried_ = std::clamp(limit, fewest_, most_);
  wins_ = 0;
  losses_ = 0;
  if (tried_ == settled_) return EndTrial();
  MoveTo(tried_);
}

void ReadDepth::EndTrial() {
  is_growing_ = false;
  tried_ = settled_;
  wins_ = 0;
  windows_until_try_ = windows_between_tries_;
  MoveTo(settled_);
}

void ReadDepth::MoveTo(int limit) {
  limit_ = limit;
  is_first_read_ = true;  // only for the clock: what it took began before the limit was this
}

}  // namespace weightbroker
