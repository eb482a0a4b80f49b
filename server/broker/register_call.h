// One Register call: resolve, start or join the load, then follow it.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/broker/registry.h"
#include "server/broker/service_context.h"
#include "server/broker/stream_call.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

class RegisterCall : public StreamCall<v1::RegisterResponse> {
 public:
  // `context` must outlive the call.
  RegisterCall(const ServiceContext& context, CallRecord record, const v1::RegisterRequest& request)
      : StreamCall(std::move(record)), context_(context), request_(request) {}

  // Hands the reading of files to a worker and returns.
  void Start();

 private:
  void Run();
  absl::StatusOr<WeightSetRef> FindOrLoad();
  void OnChange();

  std::shared_ptr<RegisterCall> Self() { return std::static_pointer_cast<RegisterCall>(shared_from_this()); }

  const ServiceContext& context_;
  const v1::RegisterRequest request_;
  WeightSetRef set_;  // written before the subscription is made, constant after
  Subscription subscription_;
};

}  // namespace weightbroker
