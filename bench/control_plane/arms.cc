#include "bench/control_plane/arms.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/bare_echo.h"
#include "bench/bench_support.h"
#include "bench/control_plane/attach_steps.h"
#include "common/base/file.h"
#include "common/base/status_macros.h"
#include "common/identity/checkpoint_identity.h"
#include "weightbroker/client.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker::bench {
namespace {

using nlohmann::json;

absl::Status ToAbsl(const grpc::Status& status) {
  return status.ok() ? absl::OkStatus() : absl::InternalError(status.error_message());
}

absl::Status ToAbsl(const Status& status) {
  return status.ok() ? absl::OkStatus() : absl::InternalError(status.ToString());
}

// Something that is called again and again, and how long each call took.
struct Call {
  std::string name;
  std::function<absl::Status()> make;
  std::vector<double> microseconds = {};
};

absl::Status TimeOnce(Call& call, bool keep) {
  const double start = NowSeconds();
  RETURN_IF_ERROR(call.make());
  const double taken = NowSeconds() - start;
  if (keep) call.microseconds.push_back(taken * 1e6);
  return absl::OkStatus();
}

// A unary method over a channel of its own.
template <typename Stub, typename Request, typename Response>
std::function<absl::Status()> Unary(std::shared_ptr<Stub> stub, Request request,
                                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*)) {
  return [stub = std::move(stub), request = std::move(request), method] {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    Response response;
    return ToAbsl((stub.get()->*method)(&context, request, &response));
  };
}

std::function<absl::Status()> HealthCall(const std::shared_ptr<grpc::Channel>& channel) {
  using Stub = v1::WeightBrokerService::Stub;
  return Unary<Stub, v1::HealthRequest, v1::HealthResponse>(v1::WeightBrokerService::NewStub(channel), {},
                                                            &Stub::Health);
}

std::function<absl::Status()> FingerprintCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& model) {
  using Stub = v1::WeightBrokerService::Stub;
  v1::FingerprintRequest request;
  request.mutable_spec()->set_model(model);
  request.mutable_environment()->set_torch_version("any");
  return Unary<Stub, v1::FingerprintRequest, v1::FingerprintResponse>(v1::WeightBrokerService::NewStub(channel),
                                                                      request, &Stub::Fingerprint);
}

std::function<absl::Status()> EchoCall(const std::string& socket) {
  using Stub = EchoService::Stub;
  return Unary<Stub, EchoRequest, EchoResponse>(EchoService::NewStub(ConnectOrDie(socket)), {}, &Stub::Echo);
}

// In an order that is drawn anew for each turn: none always follows the same other.
absl::Status TakeTurns(const ArmFlags& flags, std::vector<Call>& calls) {
  std::mt19937 random(1);
  std::vector<Call*> order;
  for (Call& call : calls) order.push_back(&call);
  for (int i = -flags.warm_up_calls; i < flags.calls; ++i) {
    std::shuffle(order.begin(), order.end(), random);
    for (Call* const call : order) RETURN_IF_ERROR(TimeOnce(*call, i >= 0));
  }
  return absl::OkStatus();
}

absl::StatusOr<json> MeasureUnary(const ArmFlags& flags) {
  const auto channel = ConnectOrDie(flags.service_socket);
  ASSIGN_OR_RETURN(RawEchoClient raw_echo, RawEchoClient::Connect(flags.raw_echo_socket));
  ASSIGN_OR_RETURN(const CheckpointIdentity identity, ReadCheckpointIdentity(RealFileSystem(), flags.model));
  std::vector<Call> small = {{"health", HealthCall(channel)},
                             {"grpc_echo", EchoCall(flags.grpc_echo_socket)},
                             {"raw_echo", [&] { return raw_echo.Echo(); }}};
  // Apart: what comes behind one of these finds caches that are cold.
  std::vector<Call> large = {{"fingerprint", FingerprintCall(channel, flags.model)},
                             {"fingerprint_stat_calls", [&] { return CheckUnchanged(RealFileSystem(), identity); }}};
  RETURN_IF_ERROR(TakeTurns(flags, small));
  RETURN_IF_ERROR(TakeTurns(flags, large));
  json report;
  for (std::vector<Call>* const calls : {&small, &large}) {
    for (Call& call : *calls) report[call.name] = std::move(call.microseconds);
  }
  return report;
}

absl::StatusOr<Client> ConnectClient(const ArmFlags& flags) {
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = flags.service_socket;
  Result<Client> client = Client::Create(options);
  if (!client.ok()) return ToAbsl(client.status());
  RETURN_IF_ERROR(ToAbsl(client->WaitUntilConnected(std::chrono::seconds(20))));
  return *std::move(client);
}

// Seconds from Attach to where a name has been found.
absl::StatusOr<double> TimeAttach(const Client& client, const ArmFlags& flags) {
  WeightSpec spec;
  spec.model = flags.model;
  AttachOptions options;
  options.fallback = Fallback::kFail;
  options.fingerprint = flags.fingerprint;
  options.deadline = std::chrono::seconds(60);
  const double start = NowSeconds();
  const Result<MappedWeights> weights = client.Attach(spec, options);
  if (!weights.ok()) return ToAbsl(weights.status());
  const std::vector<Tensor>& tensors = weights->tensors();
  if (weights->Find(tensors[tensors.size() / 2].name) == nullptr) return absl::InternalError("a name is not found");
  return NowSeconds() - start;
}

absl::StatusOr<json> MeasureAttach(const ArmFlags& flags) {
  ASSIGN_OR_RETURN(const Client client, ConnectClient(flags));
  ASSIGN_OR_RETURN(const double seconds, TimeAttach(client, flags));
  return json({{"seconds", seconds}});
}

absl::StatusOr<json> MeasureSteps(const ArmFlags& flags) {
  ASSIGN_OR_RETURN(const auto steps, TimeAttachSteps(flags.service_socket, flags.fingerprint));
  return json(steps);
}

// One of many that do the same at once. It goes on after an error: that is what is counted.
class ConcurrentClient {
 public:
  explicit ConcurrentClient(const ArmFlags& flags) : flags_(flags) {}

  absl::StatusOr<json> Run() {
    Call health{"health_us", HealthCall(ConnectOrDie(flags_.service_socket))};
    Call echo{"grpc_echo_us", EchoCall(flags_.grpc_echo_socket)};
    ASSIGN_OR_RETURN(const Client client, ConnectClient(flags_));
    WaitForStart();
    for (int i = 0; i < flags_.calls; ++i) {
      Count(TimeOnce(health, true));
      Count(TimeOnce(echo, true));
    }
    std::vector<double> attaches;
    for (int i = 0; i < flags_.attaches; ++i) {
      const auto seconds = TimeAttach(client, flags_);
      Count(seconds.status());
      if (seconds.ok()) attaches.push_back(*seconds);
    }
    return json({{"health_us", health.microseconds},
                 {"grpc_echo_us", echo.microseconds},
                 {"attach_seconds", attaches},
                 {"errors", errors_}});
  }

 private:
  static void WaitForStart() {
    char nothing = 0;
    [[maybe_unused]] const ssize_t end = read(kStartFd, &nothing, 1);
  }

  void Count(const absl::Status& status) {
    if (status.ok()) return;
    ++errors_;
    fprintf(stderr, "control_plane_bench: %s\n", status.ToString().c_str());
  }

  const ArmFlags& flags_;
  int errors_ = 0;
};

absl::StatusOr<json> Measure(const ArmFlags& flags) {
  if (flags.arm == "unary") return MeasureUnary(flags);
  if (flags.arm == "attach") return MeasureAttach(flags);
  if (flags.arm == "steps") return MeasureSteps(flags);
  if (flags.arm == "client") return ConcurrentClient(flags).Run();
  return absl::InvalidArgumentError("there is no arm " + flags.arm);
}

}  // namespace

int RunArm(const ArmFlags& flags) {
  const absl::StatusOr<json> report = Measure(flags);
  if (!report.ok()) {
    fprintf(stderr, "control_plane_bench: %s: %s\n", flags.arm.c_str(), report.status().ToString().c_str());
    return 1;
  }
  printf("%s\n", report->dump().c_str());
  return 0;
}

}  // namespace weightbroker::bench
