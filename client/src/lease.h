// The hold on a shard: an Export stream that stays open, watched by one thread of its own, and taken up again with the
// next broker when the one that granted it has gone.
//
//   ASSIGN_OR_RETURN(auto lease, Lease::Start(connection, std::move(stream), header, {60s, on_event}));
//   lease->status()                          // ok; why not, while it is interrupted and once it is lost
//
// held → interrupted → held, as often as brokers end; interrupted → lost, which is final.
//
// Thread-safe. Destruction ends the lease and waits until the stream is closed and no event is being told.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "client/src/export_stream.h"
#include "common/base/mutex.h"
#include "weightbroker/client.h"

namespace weightbroker::client {

struct LeaseOptions {
  std::chrono::milliseconds renewal_deadline;            // after an interruption; 0: a lease is not renewed
  std::function<void(const LeaseEvent&)> on_event = {};  // on the watching thread; may be empty
  std::string alias = {};                                // by which the Export named the set; empty if it did not
};

class Lease {
 public:
  // Takes over a stream whose manifest has been read, and what its header said. SYSTEM_ERROR if there is no thread to
  // be had.
  static absl::StatusOr<std::unique_ptr<Lease>> Start(std::shared_ptr<const Connection> connection,
                                                      std::unique_ptr<ExportStream> stream,
                                                      const v1::ExportHeader& header, LeaseOptions options);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Whether the service no longer counts it, and will not again.
  bool lost() const;

  // Ok while it is held. DRAINING from the moment the service says so; QUARANTINED likewise.
  absl::Status status() const;

  // Tells the service that bytes of the shard differ from their digest; it checks for itself. Best effort: an older
  // service does not know the call.
  void ReportDamage(const std::string& tensor) const;

 private:
  Lease(std::shared_ptr<const Connection> connection, std::unique_ptr<ExportStream> stream,
        const v1::ExportHeader& header, LeaseOptions options);

  void Watch();
  absl::Status ReadToTheEnd();
  void TakeEvent(const RawMessage& message);
  void TellSuperseded(const v1::ExportEvent& event);
  absl::Status Renew();
  absl::Status TryRenew(Deadline deadline);
  ExportStream* Replace(std::unique_ptr<ExportStream> stream);
  bool Pause(std::chrono::milliseconds time);
  bool stopping() const;
  void Move(LeaseEvent::Kind kind, absl::Status status);

  const std::shared_ptr<const Connection> connection_;
  const LeaseOptions options_;
  v1::ExportRequest renewal_;  // constant after construction

  mutable Mutex mutex_;
  CondVar stopped_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<ExportStream> stream_ ABSL_GUARDED_BY(mutex_);  // read by the watcher alone, who alone replaces it

  std::thread watcher_;  // last: it uses all of the above
};

}  // namespace weightbroker::client
