#include "server/broker/health_service.h"

#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/call_record.h"
#include "server/broker/stream_call.h"
#include "weightbroker/v1/weight_broker_admin_service.grpc.pb.h"
#include "weightbroker/v1/weight_broker_group_service.grpc.pb.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// SERVICE_UNKNOWN for a name that the server does not have.
HealthCheckResponse::ServingStatus StatusOf(const std::string& service, const RegistryTotals& totals,
                                            const Reconciler* reconciler) {
  bool serving = false;
  if (service.empty() || service == v1::WeightBrokerAdminService::service_full_name() ||
      service == v1::WeightBrokerGroupService::service_full_name()) {
    serving = !totals.draining;
  } else if (service == v1::WeightBrokerService::service_full_name()) {
    serving = ServiceStatus(totals, reconciler) == v1::HealthResponse::STATUS_READY;
  } else {
    return HealthCheckResponse::SERVICE_UNKNOWN;
  }
  return serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

class WatchCall : public StreamCall<HealthCheckResponse> {
 public:
  WatchCall(const ServiceContext& context, CallRecord record, std::string service)
      : StreamCall(std::move(record)), context_(context), service_(std::move(service)) {
    ObserveDurationWhenIdle();
  }

  void Start() {
    if (const absl::Status status = record().CheckCaller(); !status.ok()) {
      End(status);
      return;
    }
    const auto self = std::static_pointer_cast<WatchCall>(shared_from_this());
    subscription_ = context_.registry->SubscribeToStates([weak = std::weak_ptr<WatchCall>(self)] {
      if (const auto call = weak.lock()) call->OnChange();
    });
    OnChange();
  }

 private:
  void OnChange() {
    MutexLock lock(sent_mutex_);
    const RegistryTotals totals = context_.registry->Totals();
    const HealthCheckResponse::ServingStatus status = StatusOf(service_, totals, context_.reconciler);
    if (status != sent_) {
      sent_ = status;
      HealthCheckResponse response;
      response.set_status(status);
      SendLatest(std::move(response));
    }
    if (totals.draining) End(MakeError(Reason::kDraining, "the service is shutting down; watch again when it is back"));
  }

  const ServiceContext& context_;
  const std::string service_;
  Subscription subscription_;

  Mutex sent_mutex_;  // one look and its message at a time, or an old look would overwrite a new one
  HealthCheckResponse::ServingStatus sent_ ABSL_GUARDED_BY(sent_mutex_) = HealthCheckResponse::UNKNOWN;
};

}  // namespace

grpc::ServerUnaryReactor* HealthServiceImpl::Check(grpc::CallbackServerContext* grpc_context,
                                                   const HealthCheckRequest* request, HealthCheckResponse* response) {
  auto* const reactor = grpc_context->DefaultReactor();
  CallRecord record(context_, RpcMethod::kHealthCheck, grpc_context->peer());
  absl::Status status = record.CheckCaller();
  if (status.ok()) {
    response->set_status(StatusOf(request->service(), context_.registry->Totals(), context_.reconciler));
    if (response->status() == HealthCheckResponse::SERVICE_UNKNOWN) {
      status =
          MakeError(Reason::kServiceUnknown, absl::StrCat("there is no service ", Quote(request->service()), " here"),
                    {{"service", Printable(request->service())}});
    }
  }
  reactor->Finish(record.End(status));
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthServiceImpl::Watch(grpc::CallbackServerContext* grpc_context,
                                                                        const HealthCheckRequest* request) {
  const auto call = std::make_shared<WatchCall>(
      context_, CallRecord(context_, RpcMethod::kHealthWatch, grpc_context->peer()), request->service());
  auto* const reactor = call->Attach(grpc_context);
  call->Start();
  return reactor;
}

}  // namespace weightbroker
