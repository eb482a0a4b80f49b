#include "server/loader/publish_session.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/read_fd.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/identity/checkpoint_identity.h"
#include "common/plan/manifest.h"
#include "common/plan/plan.h"
#include "common/publish/published_tensors.h"
#include "common/quant/gate.h"
#include "server/loader/hand_over.h"
#include "server/loader/publish_memory.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;

constexpr std::chrono::milliseconds kProgressInterval(250);
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;

class Session {
 public:
  Session(FileSystem& file_system, const pb::LoadRequest& request, int control_fd,
          const std::function<void()>& before_hand_over, const CudaOpener& open_cuda)
      : file_system_(file_system),
        request_(request),
        control_fd_(control_fd),
        before_hand_over_(before_hand_over),
        open_cuda_(open_cuda) {}

  absl::Status Run() {
    RETURN_IF_ERROR(CheckDeclaredQuantization());
    ASSIGN_OR_RETURN(memory_, PublishMemory::Create(request_, open_cuda_));
    while (!handed_over_) {
      absl::StatusOr<SocketMessage> message = ReceiveMessage(control_fd_, kProgressInterval);
      if (HasReason(message.status(), Reason::kDeadlineExceeded)) {
        RETURN_IF_ERROR(ReportFilling());
        continue;
      }
      RETURN_IF_ERROR(message.status());
      if (message->closed) return MakeError(Reason::kCancelled, "the broker ended the publication");
      RETURN_IF_ERROR(Obey(*std::move(message)));
    }
    if (memory_->needs_exporter()) WaitForTheEnd(control_fd_);
    return absl::OkStatus();
  }

 private:
  // What the engine does with its weights is its own affair; but where its spec says that they are quantized as the
  // checkpoint is, the checkpoint says how.
  absl::Status CheckDeclaredQuantization() {
    if (request_.spec().quantization() != kSpecAuto) return absl::OkStatus();
    ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(file_system_, request_.spec().model()));
    RETURN_IF_ERROR(CheckQuantization(checkpoint).status());
    return CheckUnchanged(file_system_, FromProto(request_));
  }

  absl::Status Obey(SocketMessage message) {
    pb::LoadCommand command;
    if (!command.ParseFromString(message.bytes)) {
      return MakeError(Reason::kProtocolError, "the broker sent bytes that are not a LoadCommand");
    }
    const absl::Status done =
        command.has_commit() ? Commit(command.commit(), message.fds) : Allocate(command.allocate());
    return done.ok() ? done : Refuse(done);
  }

  absl::Status Allocate(const pb::AllocateCommand& command) {
    const std::vector<int64_t> slab_bytes(command.slab_bytes().begin(), command.slab_bytes().end());
    ASSIGN_OR_RETURN(const std::vector<FinishedSlab> made, memory_->Add(slab_bytes));
    pb::LoadEvent event;
    std::vector<int> fds;
    event.mutable_allocated();
    for (const FinishedSlab& slab : made) {
      *event.mutable_allocated()->add_slabs() = slab.description;
      if (slab.fd.valid()) fds.push_back(slab.fd.get());
    }
    has_slabs_ = has_slabs_ || !made.empty();
    return SendMessage(control_fd_, event.SerializeAsString(), fds);
  }

  absl::Status Commit(const pb::CommitCommand& command, const std::vector<UniqueFd>& fds) {
    ASSIGN_OR_RETURN(std::vector<v1::Tensor> rows, ReadRows(command, fds));
    ASSIGN_OR_RETURN(rows, CheckPublishedTensors(std::move(rows), memory_->slab_bytes()));
    if (request_.publish().has_promise()) RETURN_IF_ERROR(CheckPromise(request_.publish().promise(), rows));
    RETURN_IF_ERROR(memory_->Seal());
    const auto start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(const std::vector<Digest> digests, memory_->DigestsOf(rows));
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].set_digest(reinterpret_cast<const char*>(digests[i].data()), digests[i].size());
    }
    return HandOver(std::move(rows), std::chrono::steady_clock::now() - start);
  }

  static absl::StatusOr<std::vector<v1::Tensor>> ReadRows(const pb::CommitCommand& command,
                                                          const std::vector<UniqueFd>& fds) {
    if (fds.size() != 1 || command.manifest_bytes() < 0 || command.manifest_bytes() > kMaxManifestBytes) {
      return MakeError(Reason::kProtocolError, "the broker asked for a commit without a manifest of possible size");
    }
    const auto size_bytes = static_cast<size_t>(command.manifest_bytes());
    ASSIGN_OR_RETURN(const std::string bytes, ReadFd(fds.front().get(), size_bytes, "reading what is to be committed"));
    return ParseManifest(bytes);
  }

  absl::Status HandOver(std::vector<v1::Tensor> rows, std::chrono::duration<double> digest_time) {
    const auto tensor_count = static_cast<int64_t>(rows.size());
    ASSIGN_OR_RETURN(const std::string manifest, SerializeManifest(std::move(rows)));
    handed_over_ = true;
    ASSIGN_OR_RETURN(const std::vector<FinishedSlab> finished, memory_->Finish());
    before_hand_over_();
    return SendShard(control_fd_,
                     {.rank = request_.ranks(0).rank(),
                      .tensor_count = tensor_count,
                      .read_bytes = 0,
                      .digest_seconds = digest_time.count()},
                     finished, manifest);
  }

  absl::Status Refuse(const absl::Status& why) {
    // Once slabs have been handed over there is nothing to go back to; nor is there if the broker has gone.
    if (handed_over_ || HasReason(why, Reason::kServiceUnavailable)) return why;
    pb::LoadEvent event;
    event.mutable_refused()->ParseFromString(SerializeRpcStatus(why));
    return SendMessage(control_fd_, event.SerializeAsString());
  }

  absl::Status ReportFilling() {
    if (!has_slabs_) return absl::OkStatus();
    pb::LoadEvent event;
    event.mutable_progress()->set_phase(v1::WEIGHT_SET_STATE_LOADING);
    event.mutable_progress()->set_done_bytes(memory_->filled_bytes());
    return SendMessage(control_fd_, event.SerializeAsString());
  }

  FileSystem& file_system_;
  const pb::LoadRequest& request_;
  const int control_fd_;
  const std::function<void()>& before_hand_over_;
  const CudaOpener& open_cuda_;

  std::unique_ptr<PublishMemory> memory_;
  bool has_slabs_ = false;
  bool handed_over_ = false;
};

}  // namespace

absl::Status RunPublishSession(FileSystem& file_system, const pb::LoadRequest& request, int control_fd,
                               const std::function<void()>& before_hand_over, const CudaOpener& open_cuda) {
  const absl::Status status = Session(file_system, request, control_fd, before_hand_over, open_cuda).Run();
  if (status.ok()) return status;
  pb::LoadEvent event;
  event.mutable_failed()->ParseFromString(SerializeRpcStatus(status));
  SendMessage(control_fd, event.SerializeAsString()).IgnoreError();  // the broker may have gone; then it knows already
  return status;
}

}  // namespace weightbroker
