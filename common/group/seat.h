// A seat in a group's page and what its holder does there, turn by turn: give a heartbeat, see whether the active
// member is still there, take over when it is not and it is this one's turn.
//
//   ASSIGN_OR_RETURN(std::unique_ptr<GroupSeat> seat, GroupSeat::Take(&page));      // GROUP_FULL
//   while (!stopping) {
//     ASSIGN_OR_RETURN(const int64_t until_ns, seat->Turn());                       // GROUP_PAGE_INVALID: leave
//     seat->Wait(until_ns);                                                         // or until something happens
//   }
//
// All but Wake, StepDown and Rejoin belong to one thread, which must live as long as the seat is held: its end is what
// the others see. Wake is thread-safe; StepDown and Rejoin come from any thread, but not during a Turn.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/clock.h"
#include "common/group/page.h"
#include "common/group/robust_cells.h"

namespace weightbroker::group {

class GroupSeat {
 public:
  using Clock = std::function<int64_t()>;  // nanoseconds on CLOCK_MONOTONIC, or what a test takes for it

  // Takes a free seat, as a standby behind all others. GROUP_FULL if there is none; GROUP_PAGE_INVALID. `page` must
  // outlive it.
  static absl::StatusOr<std::unique_ptr<GroupSeat>> Take(const GroupPage* page, Clock clock = SteadyNanoseconds);

  ~GroupSeat();  // leaves: if active, another may follow at once
  GroupSeat(const GroupSeat&) = delete;
  GroupSeat& operator=(const GroupSeat&) = delete;

  // One turn. Gives when the next is due. `beat_ns` is the heartbeat that it gives, now by default. GROUP_PAGE_INVALID
  // if the page has what no member writes: nothing has been changed then, and the seat is to be given up.
  absl::StatusOr<int64_t> Turn(std::optional<int64_t> beat_ns = std::nullopt);

  // Waits until `until_ns`, a change in the group that concerns this seat, or Wake.
  void Wait(int64_t until_ns);
  void Wake();

  // Makes an active member a standby behind all others. Harmless otherwise.
  void StepDown();

  // Makes a superseded member a standby behind all others. Harmless otherwise.
  void Rejoin();

  MemberRole role() const { return role_; }
  // The term in which this member is active; only then.
  Term term() const { return my_term_; }
  uint32_t index() const { return index_; }

 private:
  // What has become of the active member.
  enum class Loss { kNone, kDied, kHung, kLeft };

  GroupSeat(const GroupPage* page, Clock clock);

  absl::Status Claim();
  bool TryClaim(uint32_t index);
  void Occupy();
  void Vacate();
  void GoToTheEnd();
  absl::Status CheckOwnSeat() const;
  void SeeWhetherSuperseded(Term term);
  absl::StatusOr<int64_t> StandBy(Term term, int64_t now);
  absl::StatusOr<Loss> LookAtActive(Term term, int64_t now, int64_t* look_again) const;
  int CountAhead(int64_t now) const;
  bool TakeOver(Term from, Loss loss);
  void CountTakeover(Term from, Loss loss) const;
  void Nudge(uint32_t index, std::optional<uint32_t> active) const;
  void NudgeOthers(std::optional<uint32_t> active) const;
  Seat& mine() const { return page_->seat(index_); }

  const GroupPage* const page_;
  const Clock clock_;
  const int64_t timeout_;   // all in nanoseconds
  const int64_t interval_;  // between heartbeats
  const int64_t patience_;  // of each candidate with the one before it

  RobustCells cells_;
  uint32_t thread_id_ = 0;
  uint32_t index_ = 0;
  bool seated_ = false;

  MemberRole role_ = MemberRole::kStandby;
  Term my_term_;
  uint64_t greatest_epoch_ = 0;  // seen so far
  uint64_t join_sequence_ = 0;
  int64_t due_ = 0;          // when this turn should have been
  Term last_term_;           // as of the last turn
  bool saw_active_ = false;  // alive, in that turn
  Term vacancy_;             // the term whose active member is lost
  int64_t vacant_since_ = -1;

  std::atomic<const Cell*> waits_on_{nullptr};
  std::atomic<bool> woken_{false};
};

}  // namespace weightbroker::group
