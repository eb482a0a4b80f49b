#include "common/group/member.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"

namespace weightbroker::group {
namespace {

constexpr size_t kOwnPageBytes = 4096;

absl::Status LeftError() { return MakeError(Reason::kCancelled, "this member has left its engine group"); }

absl::Status ForkedError() {
  return MakeError(Reason::kCancelled,
                   "this process was forked from the member of the engine group and is none itself: join anew");
}

absl::Status SupersededError(uint64_t epoch) {
  return MakeError(Reason::kGroupSuperseded,
                   absl::StrCat("this member was active in epoch ", epoch,
                                " and gave no heartbeat in time: another has taken over; drop what was begun in that "
                                "epoch and rejoin as a standby"),
                   {{"epoch", absl::StrCat(epoch)}});
}

// The engine's signals are not for a thread that it does not know of, which inherits the mask of its maker.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void GroupMember::OwnPageDeleter::operator()(OwnPage* page) const { munmap(page, kOwnPageBytes); }

absl::StatusOr<GroupMember::OwnPagePtr> GroupMember::MakeOwnPage() {
  void* const memory = mmap(nullptr, kOwnPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return SystemError("mmap", errno);
  OwnPagePtr page(new (memory) OwnPage{});
  if (madvise(memory, kOwnPageBytes, MADV_WIPEONFORK) != 0) return SystemError("madvise(MADV_WIPEONFORK)", errno);
  page->is_here.store(1);
  return page;
}

absl::StatusOr<std::unique_ptr<GroupMember>> GroupMember::Join(GroupPage page, MemberOptions options) {
  ASSIGN_OR_RETURN(OwnPagePtr own, MakeOwnPage());
  UniqueFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.valid()) return SystemError("eventfd", errno);
  std::unique_ptr<GroupMember> member(new GroupMember(std::move(page), std::move(own), std::move(event), options));
  {
    const BlockedSignals blocked;
    const MutexLock lock(member->join_mutex_);
    ASSIGN_OR_RETURN(member->thread_,
                     StartThread("a seat in an engine group", [held = member.get()] { held->HoldSeat(); }));
  }
  RETURN_IF_ERROR(member->WaitUntilSeated());
  return member;
}

GroupMember::GroupMember(GroupPage page, OwnPagePtr own, UniqueFd event, MemberOptions options)
    : page_(std::move(page)),
      own_(std::move(own)),
      event_(std::move(event)),
      options_(options),
      last_beat_ns_(SteadyNanoseconds()) {}

GroupMember::~GroupMember() {
  if (IsForked()) {
    thread_.detach();                    // it is not there
    static_cast<void>(seat_.release());  // it is the parent's, who still sits on it
  } else {
    Leave();
  }
}

absl::Status GroupMember::WaitUntilSeated() {
  const MutexLock lock(mutex_);
  while (!seated_) changed_.Wait(mutex_);
  return standing_.status;
}

void GroupMember::HoldSeat() {
  GroupSeat* seat = nullptr;
  {
    auto taken = GroupSeat::Take(&page_);
    const MutexLock lock(mutex_);
    seated_ = true;
    if (taken.ok()) {
      seat_ = *std::move(taken);
      seat = seat_.get();
    } else {
      standing_.status = taken.status();
    }
    changed_.NotifyAll();
  }
  while (seat != nullptr) {
    const auto until_ns = TakeTurn();
    if (!until_ns.ok()) break;
    seat->Wait(*until_ns);
  }
}

// An error once this member has left.
absl::StatusOr<int64_t> GroupMember::TakeTurn() {
  const MutexLock lock(mutex_);
  std::optional<int64_t> beat_ns;
  if (options_.beats_itself) beat_ns = last_beat_ns_.load(std::memory_order_relaxed);
  const auto until_ns = stopping_ ? absl::StatusOr<int64_t>(LeftError()) : seat_->Turn(beat_ns);
  Standing standing = {seat_->role(), seat_->term().epoch(), until_ns.status()};
  own_->active_term.store(until_ns.ok() && standing.role == MemberRole::kActive ? seat_->term().word : 0,
                          std::memory_order_release);
  if (!until_ns.ok()) seat_ = nullptr;
  Publish(std::move(standing));
  return until_ns;
}

void GroupMember::Publish(Standing standing) {
  if (standing.role == standing_.role && standing.epoch == standing_.epoch && standing.status == standing_.status)
    return;
  standing_ = std::move(standing);
  changed_.NotifyAll();
  eventfd_write(event_.get(), 1);
}

Standing GroupMember::standing() const {
  if (IsForked()) return {MemberRole::kStandby, 0, ForkedError()};
  const MutexLock lock(mutex_);
  return standing_;
}

absl::StatusOr<uint64_t> GroupMember::WaitUntilActive(TimePoint deadline) const {
  if (IsForked()) return ForkedError();
  const MutexLock lock(mutex_);
  while (true) {
    RETURN_IF_ERROR(standing_.status);
    if (standing_.role == MemberRole::kActive) {
      if (IsActive(standing_.epoch)) return standing_.epoch;
      seat_->Wake();  // another has taken over, which the thread has not seen yet
    }
    if (standing_.role == MemberRole::kSuperseded) return SupersededError(standing_.epoch);
    if (std::chrono::steady_clock::now() >= deadline) {
      return MakeError(Reason::kDeadlineExceeded, "this member of the engine group is still a standby");
    }
    changed_.WaitUntil(mutex_, deadline);
  }
}

void GroupMember::StepDown() {
  if (IsForked()) return;
  const MutexLock lock(mutex_);
  if (seat_ == nullptr) return;
  own_->active_term.store(0, std::memory_order_release);
  seat_->StepDown();
  Publish({seat_->role(), seat_->term().epoch(), absl::OkStatus()});
  seat_->Wake();
}

absl::Status GroupMember::Rejoin() {
  if (IsForked()) return ForkedError();
  const MutexLock lock(mutex_);
  if (seat_ == nullptr) return standing_.status;
  seat_->Rejoin();
  Publish({seat_->role(), seat_->term().epoch(), absl::OkStatus()});
  seat_->Wake();
  return absl::OkStatus();
}

void GroupMember::Leave() {
  if (IsForked()) return;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    if (seat_ != nullptr) seat_->Wake();
  }
  const MutexLock lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace weightbroker::group
