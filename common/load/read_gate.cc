#include "common/load/read_gate.h"

#include "common/base/clock.h"

namespace weightbroker {

void ReadGate::Enter() {
  MutexLock lock(mutex_);
  while (inside_ >= depth_.limit()) changed_.Wait(mutex_);
  ++inside_;
}

bool ReadGate::TryEnter() {
  MutexLock lock(mutex_);
  if (inside_ >= depth_.limit()) return false;
  ++inside_;
  return true;
}

void ReadGate::Leave(int64_t bytes) {
  MutexLock lock(mutex_);
  --inside_;
  const int before = depth_.limit();
  if (bytes > 0) depth_.Completed(bytes, SteadyNanoseconds());
  if (depth_.limit() > before) {
    changed_.NotifyAll();
  } else {
    changed_.NotifyOne();
  }
}

bool ReadGate::is_narrow() const {
  MutexLock lock(mutex_);
  return depth_.limit() < depth_.most();
}

int ReadGate::settled() const {
  MutexLock lock(mutex_);
  return depth_.settled();
}

}  // namespace weightbroker
