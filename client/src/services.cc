#include "client/src/services.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

constexpr std::chrono::milliseconds kPollInterval(20);

// A UUID becomes part of a path: nothing but what one consists of may.
bool IsGpuUuid(const std::string& uuid) {
  return uuid.rfind("GPU-", 0) == 0 && uuid.find_first_not_of("0123456789abcdefABCDEF-", 4) == std::string::npos;
}

absl::Status BadDevice(const std::string& device, const std::string& path) {
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("the socket's path ", path, " is of one service for each GPU, and \"", device,
                                "\" is no GPU's UUID; name the engine's GPU (AttachOptions::cuda_device), and those of "
                                "all ranks (AttachOptions::devices)"),
                   {{"field", "devices"}, {"device", device}});
}

// What each device's service says of a spec.
using Answers = std::map<std::string, v1::FingerprintResponse>;

absl::StatusOr<Answers> AskAll(const Services& services, const std::vector<std::string>& devices,
                               const v1::FingerprintRequest& request, Deadline deadline) {
  Answers answers;
  for (const std::string& device : devices) {
    ASSIGN_OR_RETURN(const auto connection, services.For(device));
    RETURN_IF_ERROR(connection->Call(deadline, [&](grpc::ClientContext& context) {
      return connection->service().Fingerprint(&context, request, &answers[device]);
    }));
  }
  return answers;
}

absl::StatusOr<std::string> OneFingerprint(const Answers& answers) {
  const std::string& first = answers.begin()->second.fingerprint();
  std::map<std::string, std::string> found;
  for (const auto& [device, answer] : answers) found[device] = answer.fingerprint();
  const bool same = std::all_of(found.begin(), found.end(), [&](const auto& one) { return one.second == first; });
  if (same) return first;
  const std::string list = absl::StrJoin(found, ", ", absl::PairFormatter(" has "));
  return MakeError(Reason::kFingerprintMismatch,
                   absl::StrCat("the services of this node's GPUs do not hold the same weights: ", list,
                                "; they may see different files, or have different drivers"),
                   std::move(found));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Services>> Services::Open(const ConnectionOptions& options) {
  const bool per_gpu = options.socket_path.find(kGpuUuidPlaceholder) != std::string::npos;
  std::shared_ptr<Services> services(new Services(options, per_gpu));
  if (!per_gpu) RETURN_IF_ERROR(services->Connect("", options).status());
  return services;
}

absl::Status Services::WaitUntilConnected(Deadline deadline) const {
  if (per_gpu_) return absl::OkStatus();
  ASSIGN_OR_RETURN(const auto connection, Connect("", options_));
  return connection->WaitUntilConnected(deadline);
}

absl::StatusOr<std::shared_ptr<const Connection>> Services::For(const std::string& device) const {
  if (!per_gpu_) return Connect("", options_);
  if (!IsGpuUuid(device)) return BadDevice(device, options_.socket_path);
  ConnectionOptions own = options_;
  own.socket_path.replace(own.socket_path.find(kGpuUuidPlaceholder), sizeof(kGpuUuidPlaceholder) - 1, device);
  if (own.daemon.has_value()) own.daemon->flags.push_back("--devices=" + device);
  return Connect(device, own);
}

absl::StatusOr<std::shared_ptr<const Connection>> Services::Connect(const std::string& key,
                                                                    const ConnectionOptions& options) const {
  const MutexLock lock(mutex_);
  std::shared_ptr<const Connection>& connection = connections_[key];
  if (connection == nullptr) {
    ASSIGN_OR_RETURN(connection, Connection::Open(options));
  }
  return connection;
}

absl::StatusOr<std::string> WaitForOneFingerprint(const Services& services, const std::vector<std::string>& devices,
                                                  const v1::FingerprintRequest& request, Deadline deadline) {
  while (true) {
    ASSIGN_OR_RETURN(const Answers answers, AskAll(services, devices, request, deadline));
    std::vector<std::string> absent;
    for (const auto& [device, answer] : answers) {
      if (!answer.resident()) absent.push_back(device);
    }
    if (absent.empty()) return OneFingerprint(answers);
    if (Remaining(deadline) <= kPollInterval) {
      return MakeError(Reason::kNotResident,
                       absl::StrCat("no rank is attached before all are there, and the services of these GPUs do not "
                                    "have theirs: ",
                                    absl::StrJoin(absent, ", ")),
                       {{"devices", absl::StrJoin(absent, ", ")}});
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace weightbroker::client
