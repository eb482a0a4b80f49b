#include "server/loader/scrub_session.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/read_fd.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/identity/sha256.h"
#include "common/plan/manifest.h"
#include "server/loader/scrub_memory.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxManifestBytes = int64_t{1} << 30;
constexpr size_t kMaxDamagedTensors = 100;
constexpr size_t kMaxResultBytes = 48 << 10;  // a message has at most 64 KiB
constexpr std::chrono::milliseconds kProgressInterval(250);

absl::Status Distrust(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the broker asked for a scrub ", what));
}

class Session {
 public:
  Session(const pb::LoadRequest& request, int control_fd, const std::function<void()>& before_result,
          const CudaOpener& open_cuda)
      : request_(request), control_fd_(control_fd), before_result_(before_result), open_cuda_(open_cuda) {}

  absl::Status Run() {
    ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, ReceiveFds());
    ASSIGN_OR_RETURN(const std::vector<v1::Tensor> rows, ReadRows(fds.back().get()));
    fds.pop_back();
    ASSIGN_OR_RETURN(memory_, ScrubMemory::Map(request_, fds, open_cuda_));
    start_ = Clock::now();
    for (const v1::Tensor& row : rows) {
      if (row.alias_of().empty()) RETURN_IF_ERROR(Check(row));  // an alias is checked under its tensor's name
    }
    pb::LoadEvent event;
    *event.mutable_scrubbed() = std::move(result_);
    before_result_();
    return SendMessage(control_fd_, event.SerializeAsString());
  }

 private:
  absl::StatusOr<std::vector<UniqueFd>> ReceiveFds() const {
    ASSIGN_OR_RETURN(SocketMessage message, ReceiveMessage(control_fd_));
    pb::LoadCommand command;
    if (message.closed) return MakeError(Reason::kCancelled, "the broker ended the scrub");
    if (!command.ParseFromString(message.bytes) || !command.proceed() || message.fds.empty()) {
      return Distrust("with something else than descriptors");
    }
    return std::move(message.fds);
  }

  absl::StatusOr<std::vector<v1::Tensor>> ReadRows(int manifest_fd) const {
    const pb::ScrubOrder& order = request_.scrub();
    if (order.manifest_bytes() < 0 || order.manifest_bytes() > kMaxManifestBytes) {
      return Distrust("with a manifest of impossible size");
    }
    const auto size_bytes = static_cast<size_t>(order.manifest_bytes());
    ASSIGN_OR_RETURN(const std::string bytes, ReadFd(manifest_fd, size_bytes, "reading a manifest"));
    if (Sha256Bytes(bytes) != order.manifest_sha256()) return Distrust("with a manifest of another SHA-256");
    ASSIGN_OR_RETURN(std::vector<v1::Tensor> rows, ParseManifest(bytes));
    for (const v1::Tensor& row : rows) RETURN_IF_ERROR(CheckPlace(row));
    return rows;
  }

  absl::Status CheckPlace(const v1::Tensor& row) const {
    const auto& slabs = request_.scrub().slabs();
    const bool is_inside = row.slab() >= 0 && row.slab() < slabs.size() && row.offset_bytes() >= 0 &&
                           row.size_bytes() >= 0 && row.offset_bytes() <= slabs[row.slab()].size_bytes() &&
                           row.size_bytes() <= slabs[row.slab()].size_bytes() - row.offset_bytes();
    return is_inside ? absl::OkStatus() : Distrust(absl::StrCat("of a tensor outside its slab, \"", row.name(), "\""));
  }

  absl::Status Check(const v1::Tensor& row) {
    ASSIGN_OR_RETURN(const Digest digest, memory_->DigestOf(row, [this](int64_t bytes) { return OnRead(bytes); }));
    result_.set_tensor_count(result_.tensor_count() + 1);
    const std::string found(reinterpret_cast<const char*>(digest.data()), digest.size());
    if (found != row.digest()) AddDamaged(row, found);
    return absl::OkStatus();
  }

  void AddDamaged(const v1::Tensor& row, const std::string& found) {
    const bool has_room = static_cast<size_t>(result_.damaged_size()) < kMaxDamagedTensors &&
                          (result_.damaged().empty() || result_.ByteSizeLong() + row.name().size() < kMaxResultBytes);
    if (!has_room) return;
    v1::DamagedTensor& damaged = *result_.add_damaged();
    damaged.set_name(row.name());
    damaged.set_slab(row.slab());
    damaged.set_offset_bytes(row.offset_bytes());
    damaged.set_size_bytes(row.size_bytes());
    damaged.set_expected_digest(row.digest());
    damaged.set_found_digest(found);
  }

  // Sleeps for as long as the cap asks for, and says that it is alive meanwhile.
  absl::Status OnRead(int64_t bytes) {
    result_.set_checked_bytes(result_.checked_bytes() + bytes);
    RETURN_IF_ERROR(ReportNowAndThen());
    const int64_t cap = request_.scrub().bytes_per_second();
    if (cap <= 0) return absl::OkStatus();
    const std::chrono::duration<double> due(static_cast<double>(result_.checked_bytes()) / static_cast<double>(cap));
    while (true) {
      const std::chrono::duration<double> left = due - (Clock::now() - start_);
      if (left.count() <= 0) return absl::OkStatus();
      std::this_thread::sleep_for(std::min<std::chrono::duration<double>>(left, kProgressInterval));
      RETURN_IF_ERROR(ReportNowAndThen());
    }
  }

  absl::Status ReportNowAndThen() {
    if (Clock::now() - last_report_ < kProgressInterval) return absl::OkStatus();
    last_report_ = Clock::now();
    pb::LoadEvent event;
    event.mutable_progress()->set_phase(v1::WEIGHT_SET_STATE_RESIDENT);
    event.mutable_progress()->set_done_bytes(result_.checked_bytes());
    return SendMessage(control_fd_, event.SerializeAsString());
  }

  const pb::LoadRequest& request_;
  const int control_fd_;
  const std::function<void()>& before_result_;
  const CudaOpener& open_cuda_;

  std::unique_ptr<ScrubMemory> memory_;
  Clock::time_point start_;
  Clock::time_point last_report_;
  pb::ScrubResult result_;
};

}  // namespace

absl::Status RunScrubSession(const pb::LoadRequest& request, int control_fd, const std::function<void()>& before_result,
                             const CudaOpener& open_cuda) {
  const absl::Status status = Session(request, control_fd, before_result, open_cuda).Run();
  if (status.ok()) return status;
  pb::LoadEvent event;
  event.mutable_failed()->ParseFromString(SerializeRpcStatus(status));
  SendMessage(control_fd, event.SerializeAsString()).IgnoreError();  // the broker may have gone; then it knows already
  return status;
}

}  // namespace weightbroker
