#include "common/group/robust_cells.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/base/error.h"

namespace weightbroker::group {
namespace {

constexpr int64_t kNanoseconds = 1'000'000'000;

uint32_t* WordOf(const Cell& cell) {
  return const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(&cell.word));  // the kernel's own atomics
}

}  // namespace

static_assert(sizeof(robust_list) == sizeof(Cell), "one offset leads from every entry to its cell");

absl::Status RobustCells::List(Seat* seat) {
  if (before_ == nullptr && syscall(SYS_get_robust_list, 0, &before_, &before_size_) != 0) {
    return SystemError("get_robust_list", errno);
  }
  for (size_t i = 0; i < kCellCount; ++i) {
    entries_[i].next = i + 1 < kCellCount ? &entries_[i + 1] : &head_.list;
  }
  head_.list.next = &entries_[0];
  head_.futex_offset = reinterpret_cast<intptr_t>(&seat->owner) - reinterpret_cast<intptr_t>(entries_.data());
  head_.list_op_pending = nullptr;
  if (syscall(SYS_set_robust_list, &head_, sizeof(head_)) != 0) return SystemError("set_robust_list", errno);
  return absl::OkStatus();
}

void RobustCells::Unlist() {
  if (before_ != nullptr) syscall(SYS_set_robust_list, before_, before_size_);
}

void WaitOn(const Cell& cell, uint32_t expected, int64_t until_ns) {
  const int64_t until = std::max<int64_t>(until_ns, 0);
  const timespec deadline = {until / kNanoseconds, until % kNanoseconds};
  syscall(SYS_futex, WordOf(cell), FUTEX_WAIT_BITSET, expected, &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void WakeOn(const Cell& cell) { syscall(SYS_futex, WordOf(cell), FUTEX_WAKE, 1, nullptr, nullptr, 0); }

}  // namespace weightbroker::group
