// One Export call: a lease for as long as the stream is open, the header with the ticket, the manifest's frames as they
// were serialized when the shard was loaded, then events. A renewal has neither ticket nor manifest.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "server/broker/registry.h"
#include "server/broker/service_context.h"
#include "server/broker/stream_call.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

class ExportCall : public StreamCall<grpc::ByteBuffer> {
 public:
  // `context` must outlive the call. `request` is a serialized v1.ExportRequest.
  ExportCall(const ServiceContext& context, CallRecord record, const grpc::ByteBuffer& request);
  ~ExportCall() override;

  // Answers at once if the set is named by fingerprint; otherwise hands the reading of files to a worker and returns.
  void Start();

 private:
  absl::Status StartExport();
  void RunBySpec();
  absl::Status ExportBySpec();
  absl::Status ExportUnverified(const absl::Status& cause);
  void CountCheck(FingerprintCheck result) const;
  WeightSetRef ChooseSet(const std::vector<WeightSetRef>& sets) const;
  absl::Status ExportByFingerprint();
  absl::Status ExportByAlias();
  std::string FollowedAlias() const;
  void FollowAlias(const Lease& lease);
  void OnSuperseded(const std::string& alias, const std::string& fingerprint);
  absl::Status CheckEnvironmentOf(const WeightSetRef& set) const;
  absl::Status ExportSet(const WeightSetRef& set);
  absl::Status Grant(const WeightSetRef& set, const std::vector<v1::HandleKind>& kinds);
  absl::Status ShowOnly(const WeightSetRef& set, const std::vector<v1::HandleKind>& kinds);
  absl::Status CheckRenewal(const WeightSetRef& set) const;
  void AddHandles(const Shard& shard, v1::ExportHeader* header) const;
  void SendHeader(v1::ExportHeader* header, const WeightSetRef& set, const Shard& shard);
  void SendManifest(const Shard& shard);
  bool KeepLease(Lease lease);
  void Refuse(const absl::Status& status);
  void OnLeaseEnded(const std::string& message);
  void OnQuarantined(const std::string& why);
  void OnLeft() override;
  void DropLease(const std::string& cause);

  std::shared_ptr<ExportCall> Self() { return std::static_pointer_cast<ExportCall>(shared_from_this()); }

  const ServiceContext& context_;
  v1::ExportRequest request_;  // constant after construction
  bool request_parsed_ = false;
  v1::IdentityState identity_state_ = v1::IDENTITY_STATE_UNSPECIFIED;  // set before the header is sent

  Mutex lease_mutex_;
  Lease lease_ ABSL_GUARDED_BY(lease_mutex_);
  bool left_ ABSL_GUARDED_BY(lease_mutex_) = false;                       // no lease is taken any more
  bool shard_sent_ ABSL_GUARDED_BY(lease_mutex_) = false;                 // events may follow
  std::optional<std::string> ended_ ABSL_GUARDED_BY(lease_mutex_);        // why the lease ended before that
  std::optional<std::string> quarantined_ ABSL_GUARDED_BY(lease_mutex_);  // likewise, why the shard is in quarantine
  // What superseded the set before that: the fingerprint that the alias named last.
  std::optional<std::string> superseded_ ABSL_GUARDED_BY(lease_mutex_);
};

}  // namespace weightbroker
