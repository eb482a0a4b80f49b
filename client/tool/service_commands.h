// The subcommands that ask a running service. Each prints its result or error and returns the exit code.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "client/tool/output.h"
#include "weightbroker/v1/types.pb.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::tool {

// What all of them are told.
struct ServiceFlags {
  std::string socket;  // empty: the default
  bool json = false;
  std::chrono::milliseconds timeout{10'000};
};

// A connection to it. A person who waits should read soon that a socket is all that is left of a service, so it is
// waited for no longer than a service takes that is being restarted. Fails as Connection::Open.
absl::StatusOr<std::shared_ptr<client::Connection>> Connect(const ServiceFlags& service);

struct RegisterFlags {
  std::string model;
  std::string torch_version;
  v1::WeightSpec spec;                    // but for its model
  std::vector<int> ranks;                 // empty: all of them
  std::vector<std::string> devices;       // of each; empty: the service chooses
  std::vector<std::string> handle_kinds;  // "CUDA_IPC", best first; empty: the service chooses
  bool pinned = false;
  bool dry_run = false;
  bool wait = true;
  std::chrono::milliseconds load_timeout{3'600'000};
};

struct UnregisterFlags {
  std::string fingerprint;
  bool force = false;
};

ExitCode RunRegister(const ServiceFlags& service, const RegisterFlags& flags);
ExitCode RunUnregister(const ServiceFlags& service, const UnregisterFlags& flags);
ExitCode RunList(const ServiceFlags& service);
ExitCode RunHealth(const ServiceFlags& service);

// For other subcommands that show the same: what Health answers, and its tables on stdout.
absl::StatusOr<v1::HealthResponse> AskHealth(const ServiceFlags& service);
void PrintHealth(const v1::HealthResponse& health);

}  // namespace weightbroker::tool
