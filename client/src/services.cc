#include "client/src/services.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

// No call of a service waits for a load without taking part in it: Register with `wait` begins one where there is none,
// and the other ranks' are for their own engines to begin.
// How often services are asked for all that they hold, to see what has failed: a longer answer than a fingerprint.
constexpr std::chrono::milliseconds kFailureInterval(500);
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

// Whether a rank that is waited for has failed to load.
class FailureWatch {
 public:
  FailureWatch(const Services& services, const std::vector<std::string>& devices, const RanksWait& wait)
      : services_(services), devices_(devices), wait_(wait) {}

  // NOT_RESIDENT if the weights of that fingerprint have failed to load on `device`, and will not be loaded again.
  absl::Status Check(const std::string& device, const std::string& fingerprint) {
    ASSIGN_OR_RETURN(const auto connection, services_.For(device));
    v1::ListWeightSetsResponse list;
    RETURN_IF_ERROR(connection->Call(wait_.deadline, [&](grpc::ClientContext& context) {
      list.Clear();  // of a try before this one
      return connection->admin_service().ListWeightSets(&context, {}, &list);
    }));
    for (const v1::WeightSet& set : list.weight_sets()) {
      if (set.fingerprint() != fingerprint || set.state() != v1::WEIGHT_SET_STATE_FAILED) continue;
      return IsOld(set, device) ? absl::OkStatus() : Failed(set, device, connection->socket_path());
    }
    seen_otherwise_.insert(device);
    return absl::OkStatus();
  }

 private:
  bool IsOld(const v1::WeightSet& set, const std::string& device) const {
    const auto registered =
        std::chrono::seconds(set.register_time().seconds()) + std::chrono::nanoseconds(set.register_time().nanos());
    return registered < wait_.begin.time_since_epoch() && seen_otherwise_.count(device) == 0 &&
           std::chrono::steady_clock::now() - start_ < wait_.patience_with_old_failures;
  }

  absl::Status Failed(const v1::WeightSet& set, const std::string& device, const std::string& socket_path) const {
    const auto rank = std::find(devices_.begin(), devices_.end(), device) - devices_.begin();
    return MakeError(
        Reason::kNotResident,
        absl::StrCat("no rank is attached before all are there, and rank ", rank, " has failed to load on ", device,
                     ", by the service at ", socket_path, ": ", set.failure().message()),
        {{"rank", absl::StrCat(rank)},
         {"devices", device},
         {"socket", socket_path},
         {"fingerprint", set.fingerprint()},
         {"cause", set.failure().reason()}});
  }

  const Services& services_;
  const std::vector<std::string>& devices_;
  const RanksWait& wait_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::set<std::string> seen_otherwise_;  // devices whose weights had not failed when this began to look
};

absl::Status Absent(const std::vector<std::string>& devices) {
  const std::string list = absl::StrJoin(devices, ", ");
  return MakeError(
      Reason::kNotResident,
      absl::StrCat("no rank is attached before all are there, and the services of these GPUs do not have theirs: ",
                   list),
      {{"devices", list}});
}

// Where the deadline has passed under a call, what was known before says more.
absl::Status OrAbsent(const absl::Status& status, const std::vector<std::string>& absent) {
  return HasReason(status, Reason::kDeadlineExceeded) && !absent.empty() ? Absent(absent) : status;
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
                                                  const RanksWait& wait) {
  FailureWatch failures(services, devices, wait);
  std::vector<std::string> absent;  // when they were last asked
  auto next_look = std::chrono::steady_clock::now();
  while (true) {
    const absl::StatusOr<Answers> answers = AskAll(services, devices, wait.request, wait.deadline);
    if (!answers.ok()) return OrAbsent(answers.status(), absent);
    absent.clear();
    for (const auto& [device, answer] : *answers) {
      if (!answer.resident()) absent.push_back(device);
    }
    if (absent.empty()) return OneFingerprint(*answers);
    const bool looks = std::chrono::steady_clock::now() >= next_look;
    if (looks) next_look = std::chrono::steady_clock::now() + kFailureInterval;
    for (const std::string& device : looks ? absent : std::vector<std::string>()) {
      const absl::Status checked = failures.Check(device, answers->at(device).fingerprint());
      if (!checked.ok()) return OrAbsent(checked, absent);
    }
    if (Remaining(wait.deadline) <= kPollInterval) return Absent(absent);
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace weightbroker::client
