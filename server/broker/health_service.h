// The standard grpc.health.v1.Health, fed from the registry: the server ("") and the admin service are SERVING as long
// as they are not shutting down; "weightbroker.v1.WeightBrokerService" is SERVING only when everything asked for is
// resident.
//
// Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/broker/service_context.h"

namespace weightbroker {

class HealthServiceImpl final : public grpc::health::v1::Health::CallbackService {
 public:
  // `context` must outlive the service.
  explicit HealthServiceImpl(const ServiceContext& context) : context_(context) {}

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* grpc_context,
                                  const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* grpc_context, const grpc::health::v1::HealthCheckRequest* request) override;

 private:
  const ServiceContext& context_;
};

}  // namespace weightbroker
