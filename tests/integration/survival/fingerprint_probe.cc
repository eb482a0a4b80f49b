// A new process that asks the service for a fingerprint, once, by the bare generated stub, and prints the answer with
// the moment at which it had it, in nanoseconds of CLOCK_MONOTONIC.
//
//   weightbroker-fingerprint-probe SOCKET MODEL DEADLINE_MS

#include <grpcpp/grpcpp.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace {

long long Now() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const long long start = Now();
  const auto stub = weightbroker::v1::WeightBrokerService::NewStub(
      grpc::CreateChannel(std::string("unix:") + argv[1], grpc::InsecureChannelCredentials()));
  weightbroker::v1::FingerprintRequest request;
  request.mutable_spec()->set_model(argv[2]);
  request.mutable_environment()->set_torch_version("any");
  weightbroker::v1::FingerprintResponse response;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(atoi(argv[3])));
  const grpc::Status status = stub->Fingerprint(&context, request, &response);
  printf("{\"ok\": %s, \"started_ns\": %lld, \"answered_ns\": %lld, \"resident\": %s, \"fingerprint\": \"%s\"}\n",
         status.ok() ? "true" : "false", start, Now(), response.resident() ? "true" : "false",
         response.fingerprint().c_str());
  if (!status.ok()) fprintf(stderr, "%s\n", status.error_message().c_str());
  fflush(stdout);
  _exit(status.ok() ? 0 : 1);  // what gRPC would tidy up here is nobody's
}
