// The hold on a shard: an Export stream that stays open, watched by one thread of its own.
//
//   Lease lease(std::move(stream));          // takes over a stream whose manifest has been read
//   lease.status()                           // ok; DRAINING once the service says so; why, once it is lost
//
// Thread-safe. Destruction ends the lease and waits until the stream is closed.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "client/src/export_stream.h"
#include "common/base/mutex.h"

namespace weightbroker::client {

class Lease {
 public:
  explicit Lease(std::unique_ptr<ExportStream> stream);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Whether the stream has ended, for whatever reason.
  bool lost() const;

  absl::Status status() const;

 private:
  void Watch();
  void TakeEvent(const RawMessage& message);

  const std::unique_ptr<ExportStream> stream_;

  mutable Mutex mutex_;
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);

  std::thread watcher_;  // last: it uses all of the above
};

}  // namespace weightbroker::client
