// Lets as many reads go to storage at once as it answers best to: see read_depth.h.
//
//   ReadGate gate(/*first=*/2, /*most=*/32);
//   gate.Enter();                         // waits for its turn; TryEnter does not
//   ... one read ...
//   gate.Leave(read_bytes);               // 0 for one of which nothing came
//
// Thread-safe. A thread that waits in Enter must not have the turns that it waits for.
#pragma once

#include <cstdint>

#include "common/base/mutex.h"
#include "common/load/read_depth.h"

namespace weightbroker {

class ReadGate {
 public:
  // 1 <= first <= most.
  ReadGate(int first, int most) : depth_(first, most) {}

  void Enter();
  bool TryEnter();
  void Leave(int64_t bytes);

  // Whether fewer reads are let in than there may be.
  bool is_narrow() const;

  // How many reads at once were best so far.
  int settled() const;

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  ReadDepth depth_ ABSL_GUARDED_BY(mutex_);
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace weightbroker
