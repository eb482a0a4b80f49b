// Exits with 0 if the stub works as far as it can without a service.
#include <grpcpp/grpcpp.h>
#include <weightbroker/redeem.h>
#include <weightbroker/v1/weight_broker_admin_service.grpc.pb.h>
#include <weightbroker/v1/weight_broker_service.grpc.pb.h>

#include <cstdio>

int main() {
  const auto channel = grpc::CreateChannel("unix:/nonexistent/weightbroker.sock", grpc::InsecureChannelCredentials());
  const auto stub = weightbroker::v1::WeightBrokerService::NewStub(channel);
  grpc::ClientContext context;
  weightbroker::v1::HealthResponse response;
  const grpc::Status status = stub->Health(&context, {}, &response);
  int fd = -1;
  size_t fd_count = 0;
  const int code =
      weightbroker::RedeemTicket("/nonexistent/weightbroker.sock", "ticket", 6, &fd, 1, &fd_count, 1000, nullptr, 0);
  printf("%s; %d\n", status.error_message().c_str(), code);
  return status.error_code() == grpc::StatusCode::UNAVAILABLE && code == ENOENT ? 0 : 1;
}
