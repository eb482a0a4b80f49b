#include "server/broker/scrub_run.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "server/broker/sealed_shard.h"

namespace weightbroker {
namespace {

using internal::v1::LoadEvent;
using internal::v1::ScrubResult;

constexpr std::chrono::milliseconds kExitGrace(2000);
constexpr char kCancelledCause[] = "the scrub is ended";

absl::Status Cancelled() { return MakeError(Reason::kCancelled, "the scrub was ended before it had read everything"); }

}  // namespace

absl::StatusOr<ScrubResult> ScrubRun::Run(LoaderSpawner& spawner, const std::function<void(int64_t)>& on_progress) {
  RETURN_IF_ERROR(CheckExportable(*shard_.shard));
  RETURN_IF_ERROR(Start(spawner));
  absl::Status sent = SendOrder();
  absl::StatusOr<ScrubResult> result = sent.ok() ? Follow(on_progress) : absl::StatusOr<ScrubResult>(sent);
  std::shared_ptr<LoaderProcess> process;
  {
    MutexLock lock(mutex_);
    process = std::exchange(process_, nullptr);
  }
  if (!result.ok()) {
    const bool ends_itself = loader_failed_ || HasReason(result.status(), Reason::kServiceUnavailable);
    EndLoader(*process, ends_itself, absl::StrCat("the scrub has failed: ", result.status().message()), kExitGrace);
  }
  const std::string how = process->WaitForEnd(kExitGrace);
  if (cancelled()) return Cancelled();
  if (!HasReason(result.status(), Reason::kServiceUnavailable)) return result;
  return MakeError(
      Reason::kLoaderFailed,
      absl::StrCat("the process that was to check rank ", shard_.shard->rank, " of weight set ",
                   shard_.set->fingerprint().hash, " ended without a result (", how.empty() ? "how is not known" : how,
                   "): nothing is known of the bytes; scrub again"),
      {{"exit", how}});
}

absl::Status ScrubRun::Start(LoaderSpawner& spawner) {
  const Shard& shard = *shard_.shard;
  internal::v1::LoadRequest request;
  request.set_fingerprint(shard_.set->fingerprint().hash);
  request.set_handle_kind(shard.handle_kind);
  internal::v1::RankPlacement& place = *request.add_ranks();
  place.set_rank(shard.rank);
  place.set_device(shard.device);
  internal::v1::ScrubOrder& order = *request.mutable_scrub();
  for (v1::Slab& slab : SlabsWithHandles(shard)) *order.add_slabs() = std::move(slab);
  order.set_manifest_bytes(shard.manifest->file().size_bytes);
  order.set_manifest_sha256(shard.manifest->file().sha256);
  order.set_bytes_per_second(limits_.bytes_per_second);
  ASSIGN_OR_RETURN(SpawnedLoader loader, spawner.Spawn(request));
  control_socket_ = std::move(loader.control_socket);
  MutexLock lock(mutex_);
  process_ = std::move(loader.process);
  if (cancelled_) process_->Kill(kCancelledCause);
  return absl::OkStatus();
}

absl::Status ScrubRun::SendOrder() {
  std::vector<int> fds;
  for (const UniqueFd& fd : *shard_.shard->slab_fds) fds.push_back(fd.get());
  fds.push_back(shard_.shard->manifest->file().fd.get());
  internal::v1::LoadCommand command;
  command.set_proceed(true);
  return SendMessage(control_socket_.get(), command.SerializeAsString(), fds);
}

absl::StatusOr<ScrubResult> ScrubRun::Follow(const std::function<void(int64_t)>& on_progress) {
  auto last_word = std::chrono::steady_clock::now();
  while (true) {
    absl::StatusOr<SocketMessage> message = ReceiveMessage(control_socket_.get(), limits_.heartbeat);
    RETURN_IF_ERROR(CheckGoesOn(last_word));
    if (HasReason(message.status(), Reason::kDeadlineExceeded)) continue;
    RETURN_IF_ERROR(message.status());
    if (message->closed) return MakeError(Reason::kServiceUnavailable, "the loader has gone");
    last_word = std::chrono::steady_clock::now();
    LoadEvent event;
    if (!event.ParseFromString(message->bytes)) return DistrustLoader("sent bytes that are not a LoadEvent");
    if (!message->fds.empty()) return DistrustLoader("sent descriptors though it was to check a shard");
    if (event.has_scrubbed()) return std::move(*event.mutable_scrubbed());
    if (event.has_failed()) {
      const absl::Status failure = ParseRpcStatus(event.failed().SerializeAsString());
      loader_failed_ = !failure.ok();
      return failure.ok() ? DistrustLoader("said that it failed with code OK") : failure;
    }
    if (!event.has_progress()) return DistrustLoader("sent an event that is none of a scrub's");
    on_progress(event.progress().done_bytes());
  }
}

// A scrub must not keep the memory of a set that is being released.
absl::Status ScrubRun::CheckGoesOn(std::chrono::steady_clock::time_point last_word) {
  if (cancelled() || registry_->View(shard_.set).state != v1::WEIGHT_SET_STATE_RESIDENT) {
    MutexLock lock(mutex_);
    cancelled_ = true;
    return Cancelled();
  }
  const auto quiet = std::chrono::steady_clock::now() - last_word;
  if (limits_.stall_timeout.count() == 0 || quiet < limits_.stall_timeout) return absl::OkStatus();
  const std::string seconds = absl::StrCat(std::chrono::duration<double>(quiet).count());
  return MakeError(Reason::kLoaderStalled,
                   absl::StrCat("the process that checks rank ", shard_.shard->rank, " of weight set ",
                                shard_.set->fingerprint().hash, " has said nothing for ", seconds,
                                " s and has been killed: nothing is known of the bytes"),
                   {{"seconds", seconds}});
}

void ScrubRun::Cancel() {
  MutexLock lock(mutex_);
  cancelled_ = true;
  if (process_ != nullptr) process_->Kill(kCancelledCause);
}

}  // namespace weightbroker
