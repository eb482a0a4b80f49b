// One Register call: resolve, start or join the load, then follow it. A publisher's offer is the same, with a grant
// for whoever is to publish, whose publication lasts as long as the call until the set is resident.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "server/broker/publication.h"
#include "server/broker/registry.h"
#include "server/broker/service_context.h"
#include "server/broker/spec_resolution.h"
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
  absl::StatusOr<ResolvedSpec> CheckAndResolve() const;
  absl::StatusOr<v1::RegisterPlan> PlanOnly() const;
  void AnswerDryRun();
  Registration FoundAs(const std::string& fingerprint) const;
  absl::StatusOr<WeightSetRef> FindOrPublish(NewWeightSet wanted);
  absl::StatusOr<WeightSetRef> FindPublished(const ResolvedSpec& resolved, const std::string& wanted) const;
  absl::Status CheckOffer(const v1::WeightSpec& spec) const;
  bool Waits() const { return request_.wait() || request_.has_publish(); }
  void AskForMemory(const std::shared_ptr<Publication>& publication);
  void Grant(const Publication& publication, const WritableMemory& memory);
  void OnChange();
  void OnLeft() override;

  std::shared_ptr<RegisterCall> Self() { return std::static_pointer_cast<RegisterCall>(shared_from_this()); }

  const ServiceContext& context_;
  const v1::RegisterRequest request_;
  WeightSetRef set_;  // written before the subscription is made, constant after
  Subscription subscription_;

  Mutex publish_mutex_;
  std::shared_ptr<Publication> publication_ ABSL_GUARDED_BY(publish_mutex_);  // while this caller publishes
  bool left_ ABSL_GUARDED_BY(publish_mutex_) = false;
};

}  // namespace weightbroker
