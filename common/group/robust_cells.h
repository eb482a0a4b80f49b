// The cells of one seat, as the kernel's list of what the calling thread holds: when the thread ends, the kernel marks
// each that has its id and wakes whoever waits for it.
//
//   RobustCells cells;
//   cells.List(&seat);                     // from here on an end of this thread is told
//   if (seat.owner.word.compare_exchange_strong(...)) ...
//   cells.Unlist();                        // before the object goes, in the same thread
//
// The list lies in this process's own memory; the page has nothing that the kernel or the C library would follow. That
// is why these are not pthread mutexes, whose list of robust ones goes through the mutexes themselves. The thread must
// hold no robust pthread mutex meanwhile: it has one list. Not thread-safe.
#pragma once

#include <linux/futex.h>

#include <array>
#include <cstddef>

#include "absl/status/status.h"
#include "common/group/page.h"

namespace weightbroker::group {

class RobustCells {
 public:
  RobustCells() = default;
  RobustCells(const RobustCells&) = delete;
  RobustCells& operator=(const RobustCells&) = delete;

  // Lists the cells of `seat` in place of what was listed. SYSTEM_ERROR where the kernel has no such lists.
  absl::Status List(Seat* seat);

  // Puts the thread's own list, the C library's, back.
  void Unlist();

 private:
  static constexpr size_t kCellCount = 1 + kSeatCount;  // owner and watched, one behind the other

  robust_list_head head_ = {};
  std::array<robust_list, kCellCount> entries_ = {};
  robust_list_head* before_ = nullptr;
  size_t before_size_ = 0;
};

// Waits until `cell` is no longer `expected`, or is woken, or until `until_ns` on CLOCK_MONOTONIC.
void WaitOn(const Cell& cell, uint32_t expected, int64_t until_ns);

// Wakes who waits on it.
void WakeOn(const Cell& cell);

}  // namespace weightbroker::group
