// A member of an engine group: a seat in its page, and the thread that holds it.
//
//   ASSIGN_OR_RETURN(GroupPage page, GroupPage::Map(fd.get()));
//   ASSIGN_OR_RETURN(auto member, GroupMember::Join(std::move(page)));             // GROUP_FULL
//   ASSIGN_OR_RETURN(const uint64_t epoch, member->WaitUntilActive(deadline));
//   while (member->IsActive(epoch)) Serve(epoch);
//
// The thread gives heartbeats and takes over, whatever the engine's own threads do; with `beats_itself` the heartbeats
// are the engine's own. A process that forks keeps its membership; in its child, which has not the thread, the member
// is nobody. Thread-safe. Knows no service.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/base/unique_fd.h"
#include "common/group/page.h"
#include "common/group/seat.h"

namespace weightbroker::group {

struct MemberOptions {
  bool beats_itself = false;  // heartbeats are the engine's calls of Beat, and nothing else
};

struct Standing {
  MemberRole role = MemberRole::kStandby;
  uint64_t epoch = 0;   // in which the member is active, or was when it was superseded
  absl::Status status;  // why the member has left; then `role` says nothing
};

class GroupMember {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Takes a seat and starts the thread. GROUP_FULL, GROUP_PAGE_INVALID, SYSTEM_ERROR.
  static absl::StatusOr<std::unique_ptr<GroupMember>> Join(GroupPage page, MemberOptions options = {});
  ~GroupMember();  // leaves
  GroupMember(const GroupMember&) = delete;
  GroupMember& operator=(const GroupMember&) = delete;

  // Whether this member is active in that epoch, now. Two loads, one of them of the line that changes when another
  // takes over.
  bool IsActive(uint64_t epoch) const {
    const uint64_t word = own_->active_term.load(std::memory_order_acquire);
    return word != 0 && Term{word}.epoch() == epoch && page_.layout().term.load(std::memory_order_acquire) == word;
  }

  Standing standing() const;

  // Waits until this member is active and gives the epoch; at once if it is. It is active at that moment, not only as
  // far as its thread has seen. DEADLINE_EXCEEDED, GROUP_SUPERSEDED, or why it has left (CANCELLED after Leave).
  absl::StatusOr<uint64_t> WaitUntilActive(TimePoint deadline) const;

  // Readable after every change of the standing, until it is read (8 bytes). The member's own.
  int event_fd() const { return event_.get(); }

  void StepDown();
  absl::Status Rejoin();  // GROUP_SUPERSEDED is over; why it has left, if it has
  void Leave();           // waits until it has
  void Beat() { last_beat_ns_.store(SteadyNanoseconds(), std::memory_order_relaxed); }

  const GroupPage& page() const { return page_; }

 private:
  // In a page that a forked child finds full of zeros.
  struct OwnPage {
    std::atomic<uint64_t> active_term;  // 0 unless active
    std::atomic<uint32_t> is_here;      // 1
  };
  class OwnPageDeleter {
   public:
    void operator()(OwnPage* page) const;
  };
  using OwnPagePtr = std::unique_ptr<OwnPage, OwnPageDeleter>;

  static absl::StatusOr<OwnPagePtr> MakeOwnPage();
  GroupMember(GroupPage page, OwnPagePtr own, UniqueFd event, MemberOptions options);

  bool IsForked() const { return own_->is_here.load() == 0; }
  void HoldSeat();
  absl::StatusOr<int64_t> TakeTurn();
  void Publish(Standing standing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitUntilSeated();

  const GroupPage page_;
  const OwnPagePtr own_;
  const UniqueFd event_;
  const MemberOptions options_;
  std::atomic<int64_t> last_beat_ns_;

  mutable Mutex mutex_;
  mutable CondVar changed_;
  bool seated_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Standing standing_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<GroupSeat> seat_ ABSL_GUARDED_BY(mutex_);  // made and destroyed by the thread

  Mutex join_mutex_;
  std::thread thread_ ABSL_GUARDED_BY(join_mutex_);  // last: it uses all of the above
};

}  // namespace weightbroker::group
