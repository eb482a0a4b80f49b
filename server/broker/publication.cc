#include "server/broker/publication.h"

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/memory/host_slab.h"
#include "server/broker/sealed_shard.h"

namespace weightbroker {
namespace {

using internal::v1::LoadEvent;

constexpr std::chrono::milliseconds kExitGrace(2000);
// All of a shard's descriptors, and its manifest's, go in one message.
constexpr int kMaxSlabs = 128;

absl::StatusOr<int64_t> Sum(const std::vector<int64_t>& slab_bytes) {
  int64_t sum = 0;
  for (const int64_t bytes : slab_bytes) {
    if (bytes > 0 && !__builtin_add_overflow(sum, bytes, &sum)) continue;
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("a slab of ", bytes,
                                  " bytes cannot be made: slabs have at least 1 byte, and all "
                                  "together less than 2^63"),
                     {{"field", "slab_bytes"}, {"found", absl::StrCat(bytes)}});
  }
  return sum;
}

}  // namespace

Publication::ShardOr Publication::Run(LoaderSpawner& spawner, const internal::v1::LoadRequest& request,
                                      std::chrono::milliseconds heartbeat) {
  ShardOr shard = StartAndFollow(spawner, request, heartbeat);
  UniqueFd control_socket;  // closed once the loader has been waited for: that ends one which nobody keeps
  std::optional<Pending> pending;
  {
    MutexLock lock(mutex_);
    control_socket = std::move(control_socket_);
    loader_.reset();
    if (!shard.ok()) {
      if (ended_.ok()) ended_ = shard.status();
      shard = ended_;
      pending = TakePending();
    }
  }
  if (pending.has_value()) Reject(*std::move(pending), shard.status());
  if (process_ == nullptr) return shard;
  if (!shard.ok()) {
    EndLoader(*process_, loader_failed_, absl::StrCat("the publication has ended: ", shard.status().message()),
              kExitGrace);
  } else if ((*shard)->exporter == nullptr) {
    process_->WaitForEnd(kExitGrace);
  }
  process_.reset();
  return shard;
}

Publication::ShardOr Publication::StartAndFollow(LoaderSpawner& spawner, const internal::v1::LoadRequest& request,
                                                 std::chrono::milliseconds heartbeat) {
  ASSIGN_OR_RETURN(SpawnedLoader loader, spawner.Spawn(request));
  control_fd_ = loader.control_socket.get();
  process_ = std::move(loader.process);
  {
    MutexLock lock(mutex_);
    control_socket_ = std::move(loader.control_socket);
    loader_ = process_;
    RETURN_IF_ERROR(ended_);
    if (pending_.has_value()) RETURN_IF_ERROR(SendPending());
  }
  while (true) {
    std::vector<UniqueFd> fds;
    ASSIGN_OR_RETURN(const LoadEvent event, NextEvent(heartbeat, &fds));
    if (!fds.empty() && !event.has_sealed() && !event.has_allocated()) {
      return DistrustLoader("sent descriptors with something else than slabs");
    }
    switch (event.event_case()) {
      case LoadEvent::kAllocated:
        RETURN_IF_ERROR(OnAllocated(event.allocated(), std::move(fds)));
        break;
      case LoadEvent::kRefused:
        RETURN_IF_ERROR(OnRefused(ParseRpcStatus(event.refused().SerializeAsString())));
        break;
      case LoadEvent::kProgress:
        OnProgress(event.progress());
        break;
      case LoadEvent::kSealed:
        return OnSealed(event.sealed(), std::move(fds));
      case LoadEvent::kFailed: {
        const absl::Status failure = ParseRpcStatus(event.failed().SerializeAsString());
        loader_failed_ = !failure.ok();
        return failure.ok() ? DistrustLoader("said that it failed with code OK") : failure;
      }
      default:
        return DistrustLoader("sent an event that is none of a publication's");
    }
  }
}

absl::StatusOr<LoadEvent> Publication::NextEvent(std::chrono::milliseconds heartbeat, std::vector<UniqueFd>* fds) {
  while (true) {
    if (std::chrono::steady_clock::now() >= facts_.deadline) {
      return MakeError(Reason::kPublisherGone,
                       "the publisher took longer than it may until it committed; offer to publish the set again");
    }
    absl::StatusOr<SocketMessage> message = ReceiveMessage(control_fd_, heartbeat);
    if (HasReason(message.status(), Reason::kDeadlineExceeded)) {
      registry_->ReportAlive(facts_.set);
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

absl::Status Publication::OnAllocated(const internal::v1::SlabsAllocated& allocated, std::vector<UniqueFd> fds) {
  Pending pending;
  WritableMemory memory;
  {
    MutexLock lock(mutex_);
    if (!pending_.has_value() || !pending_->allocate_done ||
        pending_->command.allocate().slab_bytes_size() != allocated.slabs_size()) {
      return DistrustLoader(absl::StrCat("made ", allocated.slabs_size(), " slabs, which nobody had asked for"));
    }
    memory.slabs = {allocated.slabs().begin(), allocated.slabs().end()};
    RETURN_IF_ERROR(CheckWritableSlabs(memory.slabs, fds, facts_.set->placement().handle_kind, facts_.place.device,
                                       facts_.check_gpu_fd));
    pending = *TakePending();
    memory.first_slab = slab_count_;
    slab_count_ += allocated.slabs_size();
  }
  // Of a GPU nobody can see what has been written to; its memory has been taken as a whole.
  if (facts_.place.device != kHostDevice) registry_->ReportFilled(facts_.set, pending.granted_bytes);
  memory.fds = std::make_shared<const std::vector<UniqueFd>>(std::move(fds));
  pending.allocate_done(std::move(memory));
  return absl::OkStatus();
}

absl::Status Publication::OnRefused(const absl::Status& why) {
  std::optional<Pending> pending;
  {
    MutexLock lock(mutex_);
    pending = TakePending();
  }
  if (!pending.has_value() || why.ok()) return DistrustLoader("refused what nobody had asked for, or with code OK");
  Reject(*std::move(pending), why);
  return absl::OkStatus();
}

void Publication::OnProgress(const internal::v1::LoadProgress& progress) {
  if (progress.done_bytes() <= filled_bytes_) return registry_->ReportAlive(facts_.set);
  registry_->ReportFilled(facts_.set, progress.done_bytes() - filled_bytes_);
  filled_bytes_ = progress.done_bytes();
}

Publication::ShardOr Publication::OnSealed(const internal::v1::LoadSealed& sealed, std::vector<UniqueFd> fds) {
  ASSIGN_OR_RETURN(std::shared_ptr<const Exporter> exporter, KeepExporter());
  ShardOr shard = ShardFromLoader(sealed, std::move(fds), facts_.place, facts_.set->placement().handle_kind,
                                  {facts_.check_gpu_fd, std::move(exporter), facts_.publisher});
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(ended_);
  if (!pending_.has_value() || !pending_->commit_done) return DistrustLoader("handed over what nobody had committed");
  if (!shard.ok()) return shard;
  committed_ = true;
  digest_seconds_ = sealed.digest_seconds();
  return shard;
}

absl::StatusOr<std::shared_ptr<const Exporter>> Publication::KeepExporter() const {
  if (facts_.set->placement().handle_kind != v1::HANDLE_KIND_CUDA_IPC) return nullptr;
  return Exporter::Keep(control_fd_, process_);
}

absl::Status Publication::DescribeDeath() {
  const std::string how = process_->WaitForEnd(kExitGrace);
  return MakeError(
      Reason::kLoaderFailed,
      absl::StrCat("the process that held the publication's memory ended (", how.empty() ? "how is not known" : how,
                   "): see its log lines, and offer to publish the set again"),
      {{"exit", how}});
}

void Publication::Allocate(const std::vector<int64_t>& slab_bytes, AllocateDone done) {
  const absl::StatusOr<int64_t> bytes = Sum(slab_bytes);
  if (!bytes.ok()) return done(bytes.status());
  absl::Status granted = CheckOpenNow();  // why it has ended says more than that the set has
  if (granted.ok()) granted = registry_->GrantMore(facts_.set, facts_.place.device, *bytes);
  if (!granted.ok()) return done(granted);
  Pending pending;
  pending.command.mutable_allocate()->mutable_slab_bytes()->Add(slab_bytes.begin(), slab_bytes.end());
  pending.granted_bytes = *bytes;
  pending.allocate_done = std::move(done);
  if (const absl::Status submitted = Submit(&pending); !submitted.ok()) Reject(std::move(pending), submitted);
}

void Publication::Commit(const std::string& manifest, CommitDone done) {
  Pending pending;
  pending.commit_done = std::move(done);
  pending.command.mutable_commit()->set_manifest_bytes(static_cast<int64_t>(manifest.size()));
  absl::StatusOr<UniqueFd> memfd = CreateSealedMemfd("weightbroker-commit", std::as_bytes(std::span(manifest)));
  if (!memfd.ok()) return Reject(std::move(pending), memfd.status());
  pending.manifest = *std::move(memfd);
  if (const absl::Status submitted = Submit(&pending); !submitted.ok()) Reject(std::move(pending), submitted);
}

// Takes `pending` if it is ok.
absl::Status Publication::Submit(Pending* pending) {
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(CheckOpen());
  if (pending_.has_value()) {
    return MakeError(Reason::kTooManyRequests, "another call for this publication is under way: make one at a time");
  }
  const int more_slabs = pending->command.allocate().slab_bytes_size();
  if (more_slabs > kMaxSlabs - slab_count_) {
    return MakeError(Reason::kTooManyRequests,
                     absl::StrCat("the publication has ", slab_count_, " slabs and would have ", more_slabs,
                                  " more; at most ", kMaxSlabs, " are allowed: ask for larger ones"),
                     {{"limit", absl::StrCat(kMaxSlabs)}});
  }
  pending_ = std::move(*pending);
  *pending = Pending();
  // Before there is a loader it waits. If the loader has gone, Run's thread finds out, and rejects it.
  if (loader_ != nullptr) SendPending().IgnoreError();
  return absl::OkStatus();
}

absl::Status Publication::SendPending() {
  std::vector<int> fds;
  if (pending_->manifest.valid()) fds.push_back(pending_->manifest.get());
  const absl::Status sent = SendMessage(control_socket_.get(), pending_->command.SerializeAsString(), fds);
  pending_->manifest.reset();
  return sent;
}

absl::Status Publication::CheckOpen() const {
  RETURN_IF_ERROR(ended_);
  if (!committed_) return absl::OkStatus();
  return MakeError(Reason::kPublicationUnknown, "the publication has been committed already");
}

absl::Status Publication::CheckOpenNow() const {
  MutexLock lock(mutex_);
  return CheckOpen();
}

void Publication::Reject(Pending pending, const absl::Status& why) {
  if (pending.granted_bytes > 0) registry_->ReturnMemory(facts_.set, facts_.place.device, pending.granted_bytes);
  if (pending.allocate_done) pending.allocate_done(why);
  if (pending.commit_done) pending.commit_done(why);
}

void Publication::FinishCommit(const absl::Status& result) {
  std::optional<Pending> pending;
  {
    MutexLock lock(mutex_);
    pending = TakePending();
  }
  if (pending.has_value() && pending->commit_done) pending->commit_done(result);
}

void Publication::End(const absl::Status& cause) {
  std::optional<Pending> pending;
  {
    MutexLock lock(mutex_);
    if (committed_ || !ended_.ok()) return;
    ended_ = cause;
    pending = TakePending();
    if (loader_ != nullptr) loader_->Kill(absl::StrCat("the publication is ended: ", cause.message()));
  }
  if (pending.has_value()) Reject(*std::move(pending), cause);
}

}  // namespace weightbroker
