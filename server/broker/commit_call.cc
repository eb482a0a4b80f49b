#include "server/broker/commit_call.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/plan/manifest.h"
#include "server/broker/publication.h"

namespace weightbroker {
namespace {

// 60,000 tensors take 5 MB.
constexpr size_t kMaxManifestBytes = 256 << 20;

}  // namespace

grpc::ServerReadReactor<v1::CommitRequest>* CommitCall::Start() {
  self_ = shared_from_this();
  if (const absl::Status status = record_.CheckCaller(); !status.ok()) {
    End(status);
  } else {
    StartRead(&request_);
  }
  return this;
}

void CommitCall::OnReadDone(bool ok) {
  if (const absl::Status status = record_.CheckInTime(); !status.ok()) return End(status);
  if (!ok) return Commit();  // the caller has said all, or has left; then this is refused below
  if (const absl::Status status = Add(); !status.ok()) return End(status);
  StartRead(&request_);
}

absl::Status CommitCall::Add() {
  if (token_.empty()) token_ = request_.publication_token();
  const std::vector<v1::Tensor> rows(request_.tensors().begin(), request_.tensors().end());
  ASSIGN_OR_RETURN(const std::string frames, SerializeManifest(rows));
  if (manifest_.size() + frames.size() > kMaxManifestBytes) {
    return MakeError(Reason::kManifestInvalid,
                     absl::StrCat("what is committed takes more than ", kMaxManifestBytes, " bytes to describe"),
                     {{"limit_bytes", absl::StrCat(kMaxManifestBytes)}});
  }
  manifest_ += frames;
  return absl::OkStatus();
}

void CommitCall::Commit() {
  const auto publication = context_.publications->Find(token_, record_.peer().uid);
  if (!publication.ok()) return End(publication.status());
  {
    MutexLock lock(mutex_);
    record_.SetObject((*publication)->facts().set->fingerprint().hash);
  }
  (*publication)
      ->Commit(manifest_, [self = shared_from_this(), publication = *publication](const absl::Status& result) {
        if (result.ok()) self->Describe(*publication);
        self->End(result);
      });
}

void CommitCall::Describe(const Publication& publication) {
  MutexLock lock(mutex_);
  if (ended_) return;
  *response_->mutable_weight_set() = context_.registry->Describe(publication.facts().set);
  response_->set_digest_seconds(publication.digest_seconds());
}

void CommitCall::End(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (std::exchange(ended_, true)) return;
  Finish(record_.End(status));
}

void CommitCall::OnDone() {
  const auto self = std::move(self_);  // destroys the call on return, unless somebody else still holds it
}

}  // namespace weightbroker
