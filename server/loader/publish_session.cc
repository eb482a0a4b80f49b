#include "server/loader/publish_session.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/read_fd.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/identity/checkpoint_identity.h"
#include "common/memory/writable_slab.h"
#include "common/plan/manifest.h"
#include "common/plan/plan.h"
#include "common/publish/digest_tensors.h"
#include "common/publish/published_tensors.h"
#include "common/quant/gate.h"
#include "server/loader/hand_over.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;

constexpr std::chrono::milliseconds kProgressInterval(250);
constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;
constexpr int kMaxDigestThreads = 16;

// A sealed slab, mapped to be digested.
class ReadMapping {
 public:
  ReadMapping() = default;
  ReadMapping(ReadMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  ReadMapping& operator=(ReadMapping&&) = delete;
  ~ReadMapping() {
    if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }

  static absl::StatusOr<ReadMapping> Map(const WritableSlab& slab) {
    const auto size = static_cast<size_t>(slab.size_bytes());
    void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, slab.fd(), 0);
    if (data == MAP_FAILED) return SystemError("mmap of a slab", errno);
    ReadMapping mapping;
    mapping.bytes_ = {static_cast<const std::byte*>(data), size};
    return mapping;
  }

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

class Session {
 public:
  Session(FileSystem& file_system, const pb::LoadRequest& request, int control_fd,
          const std::function<void()>& before_hand_over)
      : file_system_(file_system), request_(request), control_fd_(control_fd), before_hand_over_(before_hand_over) {}

  absl::Status Run() {
    RETURN_IF_ERROR(CheckDeclaredQuantization());
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
    std::vector<WritableSlab> made;
    pb::LoadEvent event;
    std::vector<int> fds;
    pb::SlabsAllocated& allocated = *event.mutable_allocated();
    for (const int64_t size_bytes : command.slab_bytes()) {
      ASSIGN_OR_RETURN(made.emplace_back(), WritableSlab::Create(size_bytes));
      v1::Slab& slab = *allocated.add_slabs();
      slab.set_size_bytes(made.back().size_bytes());
      slab.set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
      slab.set_page_kind(made.back().page_kind());
      fds.push_back(made.back().fd());
    }
    RETURN_IF_ERROR(SendMessage(control_fd_, event.SerializeAsString(), fds));
    std::move(made.begin(), made.end(), std::back_inserter(slabs_));
    return absl::OkStatus();
  }

  absl::Status Commit(const pb::CommitCommand& command, const std::vector<UniqueFd>& fds) {
    ASSIGN_OR_RETURN(std::vector<v1::Tensor> rows, ReadRows(command, fds));
    ASSIGN_OR_RETURN(rows, CheckPublishedTensors(std::move(rows), SlabBytes()));
    if (request_.publish().has_promise()) RETURN_IF_ERROR(CheckPromise(request_.publish().promise(), rows));
    for (WritableSlab& slab : slabs_) RETURN_IF_ERROR(slab.Seal());
    RETURN_IF_ERROR(Digest(rows));
    return HandOver(std::move(rows));
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

  absl::Status Digest(std::vector<v1::Tensor>& rows) {
    std::vector<ReadMapping> mappings;
    for (const WritableSlab& slab : slabs_) {
      ASSIGN_OR_RETURN(ReadMapping mapping, ReadMapping::Map(slab));
      mappings.push_back(std::move(mapping));
    }
    std::vector<std::span<const std::byte>> tensors;
    for (const v1::Tensor& row : rows) {
      tensors.push_back(mappings[static_cast<size_t>(row.slab())].bytes().subspan(
          static_cast<size_t>(row.offset_bytes()), static_cast<size_t>(row.size_bytes())));
    }
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const std::vector<weightbroker::Digest> digests = DigestTensors(tensors, std::clamp(cores, 1, kMaxDigestThreads));
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i].set_digest(reinterpret_cast<const char*>(digests[i].data()), digests[i].size());
    }
    return absl::OkStatus();
  }

  absl::Status HandOver(std::vector<v1::Tensor> rows) {
    const auto tensor_count = static_cast<int64_t>(rows.size());
    ASSIGN_OR_RETURN(const std::string manifest, SerializeManifest(std::move(rows)));
    handed_over_ = true;
    std::vector<FinishedSlab> sealed;
    for (WritableSlab& slab : slabs_) {
      ASSIGN_OR_RETURN(SealedSlab one, std::move(slab).Finish());
      sealed.push_back(FromSealed(std::move(one)));
    }
    before_hand_over_();
    return SendShard(control_fd_, {.rank = request_.ranks(0).rank(), .tensor_count = tensor_count, .read_bytes = 0},
                     sealed, manifest);
  }

  absl::Status Refuse(const absl::Status& why) {
    // Once slabs have been handed over there is nothing to go back to; nor is there if the broker has gone.
    if (handed_over_ || HasReason(why, Reason::kServiceUnavailable)) return why;
    pb::LoadEvent event;
    event.mutable_refused()->ParseFromString(SerializeRpcStatus(why));
    return SendMessage(control_fd_, event.SerializeAsString());
  }

  absl::Status ReportFilling() {
    if (slabs_.empty()) return absl::OkStatus();
    pb::LoadEvent event;
    event.mutable_progress()->set_phase(v1::WEIGHT_SET_STATE_LOADING);
    int64_t filled_bytes = 0;
    for (const WritableSlab& slab : slabs_) filled_bytes += slab.filled_bytes();
    event.mutable_progress()->set_done_bytes(filled_bytes);
    return SendMessage(control_fd_, event.SerializeAsString());
  }

  std::vector<int64_t> SlabBytes() const {
    std::vector<int64_t> bytes;
    for (const WritableSlab& slab : slabs_) bytes.push_back(slab.size_bytes());
    return bytes;
  }

  FileSystem& file_system_;
  const pb::LoadRequest& request_;
  const int control_fd_;
  const std::function<void()>& before_hand_over_;

  std::vector<WritableSlab> slabs_;
  bool handed_over_ = false;
};

}  // namespace

absl::Status RunPublishSession(FileSystem& file_system, const pb::LoadRequest& request, int control_fd,
                               const std::function<void()>& before_hand_over) {
  const absl::Status status = Session(file_system, request, control_fd, before_hand_over).Run();
  if (status.ok()) return status;
  pb::LoadEvent event;
  event.mutable_failed()->ParseFromString(SerializeRpcStatus(status));
  SendMessage(control_fd, event.SerializeAsString()).IgnoreError();  // the broker may have gone; then it knows already
  return status;
}

}  // namespace weightbroker
