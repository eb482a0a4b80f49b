// What the machine has left, for a scrape, which must not wait for a driver that hangs.
//
//   MachineFacts machine(&health_facts, &health_worker);
//   if (const auto facts = machine.Get(std::chrono::seconds(1))) ...
//
// Thread-safe.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "common/base/mutex.h"
#include "server/broker/health_facts.h"
#include "server/broker/worker_pool.h"

namespace weightbroker {

class MachineFacts {
 public:
  // Both must outlive this object; `worker` reads them.
  MachineFacts(HealthFacts* facts, WorkerPool* worker) : facts_(facts), worker_(worker) {}

  // At most a second old; nullopt, with a line in the log, if they cannot be had within `patience`. One question is
  // under way at a time, however many wait.
  std::optional<HealthFacts::Facts> Get(std::chrono::milliseconds patience);

 private:
  struct State {
    Mutex mutex;
    CondVar changed;
    bool asking ABSL_GUARDED_BY(mutex) = false;
  };

  bool Ask();

  HealthFacts* const facts_;
  WorkerPool* const worker_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();  // the worker may come to it late
};

}  // namespace weightbroker
