#include "bench/gpu/bench_service.h"

#include <chrono>
#include <csignal>

#include "client/src/attach.h"
#include "client/src/connection.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

constexpr std::chrono::minutes kLoadTime(10);
constexpr std::chrono::seconds kStartTime(60);
constexpr std::chrono::seconds kEndTime(60);

}  // namespace

absl::StatusOr<v1::WeightSet> BenchService::Start(v1::RegisterRequest request) {
  std::vector<std::string> arguments = {
      "--socket",          options_.socket, "--model_roots", "bench=" + options_.folder,
      "--metrics_address", "127.0.0.1:0",   "--log_level",   "warning"};
  arguments.insert(arguments.end(), options_.flags.begin(), options_.flags.end());
  ASSIGN_OR_RETURN(child_, Spawn({.path = options_.bin_dir + "/weightbrokerd", .arguments = std::move(arguments)}));
  ASSIGN_OR_RETURN(const auto connection, client::Connection::Open({.socket_path = options_.socket}));
  RETURN_IF_ERROR(connection->WaitUntilConnected(client::DeadlineIn(kStartTime)));
  request.mutable_spec()->set_model(options_.folder);
  request.mutable_environment()->set_torch_version("any");
  request.set_wait(true);
  return client::RegisterAndWait(*connection, request, client::DeadlineIn(kLoadTime), nullptr);
}

BenchService::~BenchService() {
  if (!child_.has_value()) return;
  child_->Kill(SIGTERM).IgnoreError();
  if (!child_->Wait(kEndTime).ok()) child_->Kill(SIGKILL).IgnoreError();
  child_->Wait().IgnoreError();
}

}  // namespace weightbroker::bench
