#include "common/group/seat.h"

#include <linux/futex.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::group {
namespace {

// A heartbeat may come late by as many intervals before a member counts as hung.
constexpr int64_t kBeatsInATimeout = 4;
constexpr int64_t kLeastPatience = 1'000'000;
constexpr int64_t kGreatestPatience = 20'000'000;
// Further than this ahead of the clock a heartbeat was not given by a member: clocks of one machine do not differ.
constexpr int64_t kGreatestSkew = 1'000'000'000;

bool HasDied(uint32_t word) { return (word & FUTEX_OWNER_DIED) != 0; }

SeatState StateOf(const Seat& seat) { return static_cast<SeatState>(seat.state.load(std::memory_order_acquire)); }

void SetState(Seat* seat, SeatState state) {
  seat->state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

// Whoever waits on it sees that it is to look again: the word is no longer what it waits on.
void NudgeCell(Cell* cell) {
  if ((cell->word.fetch_and(~static_cast<uint32_t>(FUTEX_WAITERS)) & FUTEX_WAITERS) != 0) WakeOn(*cell);
}

void ReleaseCell(Cell* cell) {
  if ((cell->word.exchange(0) & FUTEX_WAITERS) != 0) WakeOn(*cell);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupSeat>> GroupSeat::Take(const GroupPage* page, Clock clock) {
  std::unique_ptr<GroupSeat> seat(new GroupSeat(page, std::move(clock)));
  RETURN_IF_ERROR(seat->Claim());
  return seat;
}

GroupSeat::GroupSeat(const GroupPage* page, Clock clock)
    : page_(page),
      clock_(std::move(clock)),
      timeout_(page->facts().heartbeat_timeout.count()),
      interval_(timeout_ / kBeatsInATimeout),
      patience_(std::clamp(timeout_ / 10, kLeastPatience, kGreatestPatience)),
      thread_id_(static_cast<uint32_t>(gettid())) {}

GroupSeat::~GroupSeat() {
  if (seated_) Vacate();
  cells_.Unlist();
}

void GroupSeat::Vacate() {
  SetState(&mine(), SeatState::kFree);
  if (role_ == MemberRole::kActive) {
    uint64_t word = my_term_.word;
    page_->layout().term.compare_exchange_strong(word, Term::Of(my_term_.epoch(), std::nullopt).word);
  }
  for (Cell& cell : mine().watched) ReleaseCell(&cell);
  ReleaseCell(&mine().owner);
}

absl::Status GroupSeat::Claim() {
  for (uint32_t index = 0; index < kSeatCount; ++index) {
    ASSIGN_OR_RETURN(const Term term, page_->ReadTerm());
    // A seat whose holder was active stays as it is until another is: it says what has become of that one.
    if (term.seat() == index || IsHeld(page_->seat(index).owner.word.load())) continue;
    RETURN_IF_ERROR(cells_.List(&page_->seat(index)));
    if (!TryClaim(index)) continue;
    Occupy();
    return absl::OkStatus();
  }
  return MakeError(Reason::kGroupFull,
                   absl::StrCat("all ", kSeatCount, " seats of the engine group are taken: let a member leave"),
                   {{"seats", absl::StrCat(kSeatCount)}});
}

bool GroupSeat::TryClaim(uint32_t index) {
  Seat& seat = page_->seat(index);
  uint32_t word = seat.owner.word.load();
  if (IsHeld(word) || !seat.owner.word.compare_exchange_strong(word, thread_id_)) return false;
  if (Term{page_->layout().term.load()}.seat() == index) {  // its last holder became active, and ended, just now
    seat.owner.word.store(FUTEX_OWNER_DIED);
    return false;
  }
  index_ = index;
  seated_ = true;
  return true;
}

void GroupSeat::Occupy() {
  SetState(&mine(), SeatState::kFree);
  for (Cell& cell : mine().watched) cell.word.store(thread_id_);
  mine().claim_count.fetch_add(1);
  mine().process_id.store(static_cast<uint32_t>(getpid()));
  const int64_t now = clock_();
  mine().heartbeat_ns.store(now);
  due_ = now;
  GoToTheEnd();
}

void GroupSeat::GoToTheEnd() {
  join_sequence_ = page_->layout().next_join_sequence.fetch_add(1);
  mine().join_sequence.store(join_sequence_);
  role_ = MemberRole::kStandby;
  vacant_since_ = -1;
  SetState(&mine(), SeatState::kMember);
}

absl::Status GroupSeat::CheckOwnSeat() const {
  const uint32_t word = mine().owner.word.load();
  if ((word & FUTEX_TID_MASK) != thread_id_ || HasDied(word)) return PageError("this member's seat is another's");
  if (mine().join_sequence.load() != join_sequence_) return PageError("this member's number is another than it took");
  return absl::OkStatus();
}

absl::StatusOr<int64_t> GroupSeat::Turn(std::optional<int64_t> beat_ns) {
  RETURN_IF_ERROR(CheckOwnSeat());
  ASSIGN_OR_RETURN(const Term term, page_->ReadTerm());
  if (term.epoch() < greatest_epoch_) {
    return PageError(absl::StrCat("its epoch went back from ", greatest_epoch_, " to ", term.epoch()));
  }
  greatest_epoch_ = term.epoch();
  const int64_t now = clock_();
  SeeWhetherSuperseded(term);
  mine().heartbeat_ns.store(beat_ns.value_or(now));
  last_term_ = term;
  saw_active_ = false;
  ASSIGN_OR_RETURN(const int64_t look_again, StandBy(term, now));
  due_ = std::min(look_again, now + interval_);
  return due_;
}

void GroupSeat::SeeWhetherSuperseded(Term term) {
  if (role_ != MemberRole::kActive || term == my_term_) return;
  role_ = MemberRole::kSuperseded;
  SetState(&mine(), SeatState::kSuperseded);
}

// Gives when to look at the active member again.
absl::StatusOr<int64_t> GroupSeat::StandBy(Term term, int64_t now) {
  int64_t look_again = now + interval_;
  if (role_ != MemberRole::kStandby) return look_again;
  ASSIGN_OR_RETURN(const Loss loss, LookAtActive(term, now, &look_again));
  if (loss == Loss::kNone) {
    saw_active_ = true;
    vacant_since_ = -1;
    return look_again;
  }
  // A member whose engine gives no heartbeat is no better than the one that is lost.
  if (now - mine().heartbeat_ns.load() > timeout_) return look_again;
  if (vacant_since_ < 0 || vacancy_ != term) {
    vacancy_ = term;
    vacant_since_ = now;
  }
  const int64_t turn = vacant_since_ + CountAhead(now) * patience_;
  if (now < turn) return turn;
  return TakeOver(term, loss) ? now + interval_ : now;
}

absl::StatusOr<GroupSeat::Loss> GroupSeat::LookAtActive(Term term, int64_t now, int64_t* look_again) const {
  if (!term.seat().has_value()) return Loss::kLeft;
  const Seat& active = page_->seat(*term.seat());
  // Its cell for this seat, and not its owner's: a seat that is being taken anew has other owners for a moment.
  if (!IsHeld(active.watched[index_].word.load())) return Loss::kDied;
  const int64_t heartbeat = active.heartbeat_ns.load();
  if (heartbeat - now > kGreatestSkew) {
    return PageError(absl::StrCat("the active member's heartbeat is ", heartbeat - now, " ns ahead of the clock"));
  }
  if (now - heartbeat <= timeout_) {
    *look_again = heartbeat + timeout_ + 1;
    return Loss::kNone;
  }
  // Whoever was not running itself (a machine that was suspended, or is short of processors) cannot tell: the other may
  // have stood still for the same time, and for the same reason.
  if (now - due_ > interval_) return Loss::kNone;
  return Loss::kHung;
}

// How many would take over before this one, and could.
int GroupSeat::CountAhead(int64_t now) const {
  int ahead = 0;
  for (uint32_t i = 0; i < kSeatCount; ++i) {
    const Seat& seat = page_->seat(i);
    ahead += i != index_ && IsHeld(seat.owner.word.load()) && StateOf(seat) == SeatState::kMember &&
             seat.join_sequence.load() < join_sequence_ && now - seat.heartbeat_ns.load() <= timeout_ &&
             Term{page_->layout().term.load()}.seat() != i;
  }
  return ahead;
}

bool GroupSeat::TakeOver(Term from, Loss loss) {
  const Term to = Term::Of(from.epoch() + 1, index_);
  uint64_t word = from.word;
  if (from.epoch() >= Term::kGreatestEpoch || !page_->layout().term.compare_exchange_strong(word, to.word))
    return false;
  role_ = MemberRole::kActive;
  my_term_ = to;
  last_term_ = to;
  greatest_epoch_ = to.epoch();
  CountTakeover(from, loss);
  NudgeOthers(from.seat());
  return true;
}

void GroupSeat::CountTakeover(Term from, Loss loss) const {
  PageLayout& layout = page_->layout();
  if (loss == Loss::kDied) layout.takeovers_died.fetch_add(1);
  if (loss == Loss::kHung) layout.takeovers_hung.fetch_add(1);
  if (loss == Loss::kLeft && from.epoch() != page_->facts().first_epoch) layout.takeovers_left.fetch_add(1);
}

void GroupSeat::Nudge(uint32_t index, std::optional<uint32_t> active) const {
  NudgeCell(&page_->seat(index).watched[index]);
  if (active.has_value()) NudgeCell(&page_->seat(*active).watched[index]);
}

void GroupSeat::NudgeOthers(std::optional<uint32_t> active) const {
  for (uint32_t i = 0; i < kSeatCount; ++i) {
    if (i != index_ && IsHeld(page_->seat(i).owner.word.load())) Nudge(i, active);
  }
}

void GroupSeat::StepDown() {
  if (role_ != MemberRole::kActive) return;
  uint64_t word = my_term_.word;
  const Term vacant = Term::Of(my_term_.epoch(), std::nullopt);
  if (!page_->layout().term.compare_exchange_strong(word, vacant.word)) return SeeWhetherSuperseded(Term{word});
  GoToTheEnd();
  NudgeOthers(index_);
}

void GroupSeat::Rejoin() {
  if (role_ == MemberRole::kSuperseded) GoToTheEnd();
}

// On the active member's cell for this seat, which the kernel changes when that one ends; where there is none, on a
// cell of its own, which nobody but those changes who want it to look.
void GroupSeat::Wait(int64_t until_ns) {
  const uint32_t active = last_term_.seat().value_or(index_);
  Cell& cell = page_->seat(active).watched[index_];
  waits_on_.store(&cell);
  uint32_t word = cell.word.load();
  while ((word & FUTEX_WAITERS) == 0 && !cell.word.compare_exchange_weak(word, word | FUTEX_WAITERS)) {
  }
  word |= FUTEX_WAITERS;
  // What happened before the word said that somebody waits, nobody has told.
  const bool changed = woken_.exchange(false) || page_->layout().term.load() != last_term_.word;
  const bool lost = saw_active_ && !IsHeld(word);
  if (!changed && !lost) WaitOn(cell, word, until_ns);
}

void GroupSeat::Wake() {
  woken_.store(true);
  if (const Cell* const cell = waits_on_.load(); cell != nullptr) NudgeCell(const_cast<Cell*>(cell));
}

}  // namespace weightbroker::group
