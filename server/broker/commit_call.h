// One Commit call: collects what is to be committed as it arrives, and answers once the shard has been made of it.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/base/mutex.h"
#include "server/broker/call_record.h"
#include "server/broker/service_context.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

class Publication;

class CommitCall : public grpc::ServerReadReactor<v1::CommitRequest>, public std::enable_shared_from_this<CommitCall> {
 public:
  // `context` must outlive the call; `response` lives until Finish.
  CommitCall(const ServiceContext& context, CallRecord record, v1::CommitResponse* response)
      : context_(context), record_(std::move(record)), response_(response) {}

  // Begins to read, and gives the call to gRPC, which keeps it until it is over.
  grpc::ServerReadReactor<v1::CommitRequest>* Start();

 private:
  void OnReadDone(bool ok) override;
  void OnCancel() override { End(absl::CancelledError("the caller has left")); }
  void OnDone() override;

  absl::Status Add();
  void Commit();
  void Describe(const Publication& publication);
  void End(const absl::Status& status);

  const ServiceContext& context_;
  std::shared_ptr<CommitCall> self_;  // gRPC's hold

  // Of gRPC's reading alone.
  v1::CommitRequest request_;  // being read
  std::string token_;
  std::string manifest_;  // frames, as in a shard's manifest

  Mutex mutex_;
  CallRecord record_;  // ended under mutex_; the caller in it is constant
  v1::CommitResponse* const response_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace weightbroker
