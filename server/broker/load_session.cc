#include "server/broker/load_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/load_planner.h"
#include "server/broker/sealed_shard.h"

namespace weightbroker {
namespace {

using internal::v1::LoadEvent;

// How long a loader that has said its last word may take to leave.
constexpr std::chrono::milliseconds kExitGrace(2000);

// A long load is a line now and then in the log, besides one for each phase.
constexpr std::chrono::seconds kProgressLogInterval(5);

}  // namespace

LoadSession::LoadSession(std::shared_ptr<Registry> registry, WeightSetRef set, SpawnedLoader loader,
                         std::chrono::milliseconds heartbeat, std::chrono::milliseconds stall_timeout,
                         GpuFdCheck check_gpu_fd)
    : registry_(std::move(registry)),
      set_(std::move(set)),
      control_socket_(std::move(loader.control_socket)),
      process_(std::move(loader.process)),
      heartbeat_(heartbeat),
      stall_timeout_(stall_timeout),
      check_gpu_fd_(check_gpu_fd),
      last_progress_(std::chrono::steady_clock::now()) {}

absl::Status LoadSession::Run() {
  absl::Status result = Converse();
  if (!result.ok()) {
    // One that is at work still has memory that nobody will take.
    EndLoader(*process_, loader_failed_, absl::StrCat("the load has failed: ", result.message()), kExitGrace);
    MutexLock lock(mutex_);
    return cancelled_.ok() ? result : cancelled_;
  }
  if (set_->placement().handle_kind != v1::HANDLE_KIND_CUDA_IPC) process_->WaitForEnd(kExitGrace);
  return result;
}

void LoadSession::Cancel(const absl::Status& cause) {
  MutexLock lock(mutex_);
  if (cancelled_.ok()) cancelled_ = cause;
  if (!handed_over_) process_->Kill(absl::StrCat("the load is ended: ", cause.message()));
}

// What a loader sent before it was killed can be received still: the shards of a load that has been cancelled must not
// become resident, with memory of an exporter that has gone.
absl::Status LoadSession::TakeOver() {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(cancelled_);
  handed_over_ = true;
  return absl::OkStatus();
}

absl::Status LoadSession::Converse() {
  bool planned = false;
  while (true) {
    std::vector<UniqueFd> fds;
    ASSIGN_OR_RETURN(const LoadEvent event, NextEvent(&fds));
    if (!fds.empty() && !event.has_sealed()) return DistrustLoader("sent descriptors before it was done");
    switch (event.event_case()) {
      case LoadEvent::kFailed: {
        const absl::Status failure = ParseRpcStatus(event.failed().SerializeAsString());
        loader_failed_ = !failure.ok();
        return failure.ok() ? DistrustLoader("said that it failed with code OK") : failure;
      }
      case LoadEvent::kPlanned:
        RETURN_IF_ERROR(OnPlanned(event.planned()));
        planned = true;
        break;
      case LoadEvent::kProgress:
        RETURN_IF_ERROR(OnProgress(event.progress()));
        break;
      case LoadEvent::kSealed: {
        if (!planned) return DistrustLoader("handed over a shard that it had not planned");
        ASSIGN_OR_RETURN(const bool is_last, OnSealed(event.sealed(), std::move(fds)));
        if (!is_last) break;
        RETURN_IF_ERROR(TakeOver());
        report_ = event.sealed().report();
        return registry_->MakeResident(set_, std::move(shards_), event.sealed().read_bytes());
      }
      case LoadEvent::kAllocated:
      case LoadEvent::kRefused:
      case LoadEvent::kScrubbed:
        return DistrustLoader("answered as one for a publisher would");
      case LoadEvent::EVENT_NOT_SET:
        return DistrustLoader("sent a message without an event");
    }
  }
}

absl::StatusOr<LoadEvent> LoadSession::NextEvent(std::vector<UniqueFd>* fds) {
  while (true) {
    absl::StatusOr<SocketMessage> message = ReceiveMessage(control_socket_.get(), heartbeat_);
    if (HasReason(message.status(), Reason::kDeadlineExceeded)) {
      registry_->ReportAlive(set_);
      RETURN_IF_ERROR(CheckNotStalled());
      continue;
    }
    if (!message.ok()) return message.status();
    if (message->closed) return DescribeDeath();
    LoadEvent event;
    if (!event.ParseFromString(message->bytes)) return DistrustLoader("sent bytes that are not a LoadEvent");
    *fds = std::move(message->fds);
    return event;
  }
}

absl::Status LoadSession::OnProgress(const internal::v1::LoadProgress& progress) {
  const WeightSetView before = registry_->View(set_);
  RETURN_IF_ERROR(registry_->ReportProgress(set_, progress.phase(), progress.done_bytes()));
  const WeightSetView after = registry_->View(set_);
  if (after.state == before.state && after.done_bytes == before.done_bytes) return CheckNotStalled();
  last_progress_ = std::chrono::steady_clock::now();
  if (after.state != before.state || last_progress_ - last_logged_ >= kProgressLogInterval) LogProgress(after);
  return absl::OkStatus();
}

void LoadSession::LogProgress(const WeightSetView& view) {
  last_logged_ = last_progress_;
  LogFields fields = {{"fingerprint", set_->fingerprint().hash},
                      {"state", StateName(view.state)},
                      {"done_bytes", absl::StrCat(view.done_bytes)},
                      {"total_bytes", absl::StrCat(view.total_bytes)},
                      {"bytes_per_second", absl::StrCat(static_cast<int64_t>(view.rate_bytes_per_second))}};
  if (view.seconds_left.has_value()) fields.emplace_back("seconds_left", absl::StrCat(*view.seconds_left));
  Log(LogLevel::kInfo, "load.progress", fields);
}

// What the loader has said, and not whether it is alive, is what counts: one that waits for a disk for ever is.
absl::Status LoadSession::CheckNotStalled() {
  const auto quiet = std::chrono::steady_clock::now() - last_progress_;
  if (stall_timeout_.count() == 0 || quiet < stall_timeout_) return absl::OkStatus();
  const std::string seconds = absl::StrCat(std::chrono::duration<double>(quiet).count());
  const WeightSetView view = registry_->View(set_);
  const std::string state = StateName(view.state);
  Log(LogLevel::kError, "load.stalled",
      {{"fingerprint", set_->fingerprint().hash},
       {"model", set_->spec().model()},
       {"state", state},
       {"done_bytes", absl::StrCat(view.done_bytes)},
       {"total_bytes", absl::StrCat(view.total_bytes)},
       {"seconds", seconds}});
  return MakeError(Reason::kLoaderStalled,
                   absl::StrCat("the loader of ", Printable(set_->spec().model()), " has made no progress for ",
                                seconds, " s, in ", state, " at ", view.done_bytes, " of ", view.total_bytes,
                                " bytes, and has been killed: does a disk or a network file system hang? If it is only "
                                "slow, allow more with --loader_stall_timeout; then register again"),
                   {{"seconds", seconds},
                    {"state", state},
                    {"done_bytes", absl::StrCat(view.done_bytes)},
                    {"total_bytes", absl::StrCat(view.total_bytes)}});
}

absl::Status LoadSession::OnPlanned(const internal::v1::LoadPlanned& planned) {
  ASSIGN_OR_RETURN(plan_, ToMemoryPlan(planned, set_->placement().ranks));
  RETURN_IF_ERROR(registry_->GrantMemory(set_, plan_));
  last_progress_ = std::chrono::steady_clock::now();
  Log(LogLevel::kInfo, "load.granted",
      {{"fingerprint", set_->fingerprint().hash},
       {"ranks", JoinRanks(set_->placement().ranks)},
       {"bytes", absl::StrCat(planned.slab_bytes())},
       {"tensors", absl::StrCat(planned.tensor_count())}});
  internal::v1::LoadCommand command;
  command.set_proceed(true);
  const absl::Status sent = SendMessage(control_socket_.get(), command.SerializeAsString());
  return HasReason(sent, Reason::kServiceUnavailable) ? DescribeDeath() : sent;
}

absl::StatusOr<bool> LoadSession::OnSealed(const internal::v1::LoadSealed& sealed, std::vector<UniqueFd> fds) {
  const ShardMemory& planned = plan_.shards[shards_.size()];
  if (sealed.rank() == planned.rank && sealed.tensor_count() != planned.tensor_count) {
    return DistrustLoader(absl::StrCat("planned ", planned.tensor_count, " tensors for rank ", planned.rank,
                                       " and handed over ", sealed.tensor_count()));
  }
  std::shared_ptr<const Exporter> exporter;
  if (set_->placement().handle_kind == v1::HANDLE_KIND_CUDA_IPC) {
    ASSIGN_OR_RETURN(exporter, KeepExporter());
  }
  ASSIGN_OR_RETURN(shards_.emplace_back(),
                   ShardFromLoader(sealed, std::move(fds), {planned.rank, planned.device},
                                   set_->placement().handle_kind, {check_gpu_fd_, std::move(exporter)}));
  return shards_.size() == plan_.shards.size();
}

// The loader stays, as the exporter of all its shards.
absl::StatusOr<std::shared_ptr<const Exporter>> LoadSession::KeepExporter() {
  if (!shards_.empty()) return shards_.front()->exporter;
  return Exporter::Keep(control_socket_.get(), process_);
}

absl::Status LoadSession::DescribeDeath() {
  const std::string how = process_->WaitForEnd(kExitGrace);
  return MakeError(Reason::kLoaderFailed,
                   absl::StrCat("the loader ended without a result (", how.empty() ? "how is not known" : how,
                                "); its memory has been given back: see its log lines, and register again"),
                   {{"exit", how}});
}

}  // namespace weightbroker
