// One Scrub call: progress, then what came of each shard. The scrub goes on if the caller leaves.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/broker/scrub_manager.h"
#include "server/broker/service_context.h"
#include "server/broker/stream_call.h"
#include "weightbroker/v1/weight_broker_admin_service.pb.h"

namespace weightbroker {

class ScrubCall : public StreamCall<v1::ScrubResponse> {
 public:
  // `context` must outlive the call.
  ScrubCall(const ServiceContext& context, CallRecord record, v1::ScrubRequest request)
      : StreamCall(std::move(record)), context_(context), request_(std::move(request)) {}

  void Start();

 private:
  absl::Status StartScrub();
  absl::StatusOr<std::vector<ShardRef>> FindShards() const;

  const ServiceContext& context_;
  const v1::ScrubRequest request_;
};

}  // namespace weightbroker
