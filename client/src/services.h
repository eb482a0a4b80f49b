// The services of this node: one for all of it, or one for each GPU, whose sockets' paths differ in the GPU's UUID.
//
//   ASSIGN_OR_RETURN(auto services, Services::Open({.socket_path = "/run/weightbroker/{gpu_uuid}.sock"}));
//   ASSIGN_OR_RETURN(auto connection, services->For("GPU-..."));
//
// Thread-safe.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "common/base/mutex.h"

namespace weightbroker::client {

inline constexpr char kGpuUuidPlaceholder[] = "{gpu_uuid}";

class Services {
 public:
  // Begins to connect where there is one service. Fails as Connection::Open. A service that is started for a GPU gets
  // that GPU alone.
  static absl::StatusOr<std::shared_ptr<Services>> Open(const ConnectionOptions& options);

  // Whether there is one for each GPU.
  bool per_gpu() const { return per_gpu_; }

  // Until the one service is reached. Ok at once where there are several: which of them is meant is Attach's to say.
  absl::Status WaitUntilConnected(Deadline deadline) const;

  // The service that has what lies on a GPU, or on the host ("host"): always the same where there is one.
  // INVALID_ARGUMENT for the host where there is one for each GPU, and for what is no UUID.
  absl::StatusOr<std::shared_ptr<const Connection>> For(const std::string& device) const;

 private:
  Services(ConnectionOptions options, bool per_gpu) : options_(std::move(options)), per_gpu_(per_gpu) {}
  absl::StatusOr<std::shared_ptr<const Connection>> Connect(const std::string& key,
                                                            const ConnectionOptions& options) const;

  const ConnectionOptions options_;
  const bool per_gpu_;

  mutable Mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<const Connection>> connections_ ABSL_GUARDED_BY(mutex_);
};

// A wait for the ranks of all services.
struct RanksWait {
  v1::FingerprintRequest request;
  // When the engine's attach began. A load that was registered before it and failed may be one of an earlier start,
  // which its engine is about to register anew.
  std::chrono::system_clock::time_point begin = std::chrono::system_clock::now();
  std::chrono::milliseconds patience_with_old_failures{30'000};
  Deadline deadline = DeadlineIn(std::chrono::milliseconds(0));
};

// Waits until the services of all `devices` (of each rank, in their order), each by itself, hold weights of one
// fingerprint, and returns it. FINGERPRINT_MISMATCH, with every service's, once they are all resident and differ;
// NOT_RESIDENT, naming rank, service and cause, as soon as one's load has failed, or naming those that are not resident
// by the deadline; or what a service answered.
absl::StatusOr<std::string> WaitForOneFingerprint(const Services& services, const std::vector<std::string>& devices,
                                                  const RanksWait& wait);

}  // namespace weightbroker::client
