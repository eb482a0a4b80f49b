#include "server/loader/load_session.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/read_fd.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/quote.h"
#include "common/identity/sha256.h"
#include "common/plan/manifest.h"
#include "common/quant/gate.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;

constexpr int64_t kMaxRequestBytes = 256 << 20;

int64_t Sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

// The checkpoint's files must be the request's, one by one: a file that appeared since then could change its meaning.
absl::Status CheckFilesAreThoseOf(const CheckpointIdentity& identity, const CheckpointFiles& files) {
  std::vector<std::string> found = files.side_names;
  found.push_back(files.config_name);
  if (!files.index_name.empty()) found.push_back(files.index_name);
  found.insert(found.end(), files.shard_names.begin(), files.shard_names.end());
  std::sort(found.begin(), found.end());
  std::vector<std::string> known;
  for (const FileIdentity& file : identity.files) known.push_back(file.name);
  std::sort(known.begin(), known.end());
  std::vector<std::string> differing;
  std::set_symmetric_difference(found.begin(), found.end(), known.begin(), known.end(), std::back_inserter(differing));
  if (differing.empty()) return absl::OkStatus();
  const bool is_new = std::binary_search(found.begin(), found.end(), differing.front());
  return MakeError(Reason::kCheckpointChanged,
                   absl::StrCat(Printable(differing.front()), ": the file ", is_new ? "was not" : "was only",
                                " part of the checkpoint when it was fingerprinted; register the model again"),
                   {{"file", Printable(differing.front())}, {"changed", is_new ? "new" : "gone"}});
}

class Session {
 public:
  Session(FileSystem& file_system, const pb::LoadRequest& request, int control_fd, const LoadOptions& options,
          const std::function<void()>& before_hand_over)
      : file_system_(file_system),
        request_(request),
        identity_(FromProto(request)),
        control_fd_(control_fd),
        options_(options),
        before_hand_over_(before_hand_over) {}

  absl::Status Run() {
    RETURN_IF_ERROR(Plan());
    RETURN_IF_ERROR(AskToProceed());
    RETURN_IF_ERROR(AllocateSlabs());
    RETURN_IF_ERROR(Load());
    RETURN_IF_ERROR(Verify());
    return SealAndHandOver();
  }

  void Report(const absl::Status& error) {
    pb::LoadEvent event;
    event.mutable_failed()->ParseFromString(SerializeRpcStatus(error));
    // The broker may have gone; then it knows already.
    Send(event).IgnoreError();
  }

 private:
  absl::Status Plan() {
    ASSIGN_OR_RETURN(checkpoint_, OpenCheckpoint(file_system_, request_.spec().model()));
    ASSIGN_OR_RETURN(const Quantization quantization, CheckQuantization(checkpoint_));
    RETURN_IF_ERROR(CheckSpecAgainstCheckpoint(request_.spec(), checkpoint_, quantization.method));
    ASSIGN_OR_RETURN(plan_, PlanShard(checkpoint_, /*rank=*/0));
    RETURN_IF_ERROR(CheckFilesAreThoseOf(identity_, checkpoint_.files));
    return CheckUnchanged(file_system_, identity_);
  }

  absl::Status AskToProceed() {
    pb::LoadEvent event;
    event.mutable_planned()->set_slab_bytes(Sum(plan_.slab_bytes));
    event.mutable_planned()->set_read_bytes(plan_.read_bytes);
    event.mutable_planned()->set_tensor_count(static_cast<int64_t>(plan_.tensors.size()));
    pb::PlannedShard& shard = *event.mutable_planned()->add_shards();
    shard.set_slab_bytes(Sum(plan_.slab_bytes));
    shard.set_tensor_count(static_cast<int64_t>(plan_.tensors.size()));
    RETURN_IF_ERROR(Send(event));
    ASSIGN_OR_RETURN(const SocketMessage answer, ReceiveMessage(control_fd_));
    pb::LoadCommand command;
    if (answer.closed || !command.ParseFromString(answer.bytes) || !command.proceed()) {
      return MakeError(Reason::kCancelled, "the broker ended the load before any memory was taken");
    }
    return absl::OkStatus();
  }

  absl::Status AllocateSlabs() {
    for (const int64_t size_bytes : plan_.slab_bytes) {
      ASSIGN_OR_RETURN(HostSlab slab, HostSlab::Create(size_bytes));
      slabs_.push_back(std::move(slab));
    }
    return absl::OkStatus();
  }

  absl::Status Load() {
    RETURN_IF_ERROR(SendProgress(v1::WEIGHT_SET_STATE_LOADING, 0));
    const LoadSource source{file_system_, checkpoint_, identity_, plan_};
    ASSIGN_OR_RETURN(digests_, LoadShard(source, slabs_, options_, [this](int64_t done_bytes) {
                       return SendProgress(v1::WEIGHT_SET_STATE_LOADING, done_bytes);
                     }));
    return absl::OkStatus();
  }

  absl::Status Verify() {
    RETURN_IF_ERROR(SendProgress(v1::WEIGHT_SET_STATE_VERIFYING, plan_.read_bytes));
    return CheckUnchanged(file_system_, identity_);
  }

  absl::Status SealAndHandOver() {
    pb::LoadEvent event;
    pb::LoadSealed& sealed = *event.mutable_sealed();
    std::vector<UniqueFd> fds;
    for (HostSlab& slab : slabs_) {
      ASSIGN_OR_RETURN(SealedSlab result, std::move(slab).Seal());
      v1::Slab& description = *sealed.add_slabs();
      description.set_size_bytes(result.size_bytes);
      description.set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
      description.set_page_kind(result.page_kind);
      fds.push_back(std::move(result.fd));
    }
    ASSIGN_OR_RETURN(const std::string manifest, SerializeManifest(plan_, digests_));
    ASSIGN_OR_RETURN(fds.emplace_back(),
                     CreateSealedMemfd("weightbroker-manifest", std::as_bytes(std::span(manifest))));
    sealed.set_tensor_count(static_cast<int64_t>(plan_.tensors.size()));
    sealed.set_read_bytes(plan_.read_bytes);
    sealed.set_manifest_sha256(Sha256Bytes(manifest));
    sealed.set_manifest_bytes(static_cast<int64_t>(manifest.size()));
    std::vector<int> numbers;
    for (const UniqueFd& fd : fds) numbers.push_back(fd.get());
    before_hand_over_();
    return SendMessage(control_fd_, event.SerializeAsString(), numbers);
  }

  absl::Status SendProgress(v1::WeightSetState phase, int64_t done_bytes) {
    pb::LoadEvent event;
    event.mutable_progress()->set_phase(phase);
    event.mutable_progress()->set_done_bytes(done_bytes);
    return Send(event);
  }

  absl::Status Send(const pb::LoadEvent& event) { return SendMessage(control_fd_, event.SerializeAsString()); }

  FileSystem& file_system_;
  const pb::LoadRequest& request_;
  const CheckpointIdentity identity_;
  const int control_fd_;
  const LoadOptions options_;
  const std::function<void()>& before_hand_over_;

  Checkpoint checkpoint_;
  ShardPlan plan_;
  std::vector<HostSlab> slabs_;
  std::vector<Digest> digests_;
};

}  // namespace

absl::Status RunLoadSession(FileSystem& file_system, const pb::LoadRequest& request, int control_fd,
                            LoadOptions options, const std::function<void()>& before_hand_over) {
  if (request.reader_threads() > 0) options.reader_threads = request.reader_threads();
  Session session(file_system, request, control_fd, options, before_hand_over);
  absl::Status status = session.Run();
  if (!status.ok()) session.Report(status);
  return status;
}

absl::StatusOr<pb::LoadRequest> ReadLoadRequest(int request_fd) {
  struct stat status {};
  if (fstat(request_fd, &status) != 0) return SystemError("fstat of the request", errno);
  RETURN_IF_ERROR(CheckSealedMemfd(request_fd, status.st_size));
  if (status.st_size > kMaxRequestBytes) {
    return MakeError(Reason::kProtocolError, absl::StrCat("the request has ", status.st_size, " bytes, and at most ",
                                                          kMaxRequestBytes, " are allowed"));
  }
  const auto size_bytes = static_cast<size_t>(status.st_size);
  ASSIGN_OR_RETURN(const std::string bytes, ReadFd(request_fd, size_bytes, "read the request"));
  if (bytes.size() < size_bytes) return SystemError("read the request", EIO);
  pb::LoadRequest request;
  if (!request.ParseFromString(bytes)) return MakeError(Reason::kProtocolError, "the request is no LoadRequest");
  return request;
}

}  // namespace weightbroker
