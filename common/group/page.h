// The page that the members of an engine group share: who is active, who stands by, who is alive. Every offset is
// fixed; docs/group-page-format.md describes it for those who read it without this library.
//
//   ASSIGN_OR_RETURN(const UniqueFd fd, CreateGroupPage({.fingerprint = hex, .heartbeat_timeout = 200ms, ...}));
//   ASSIGN_OR_RETURN(GroupPage page, GroupPage::Map(fd.get()));           // GROUP_PAGE_INVALID if it is none
//   const GroupView view = *page.Read(SteadyNanoseconds());               // GROUP_PAGE_INVALID if a member wrote
//   rubbish
//
// All members can write to all of it, and trust each other. Nothing in it is a pointer, and whatever is read from it is
// checked before it is used as an index. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"

namespace weightbroker::group {

inline constexpr uint64_t kMagic = 0x3150554f52474257;  // "WBGROUP1", as bytes
inline constexpr uint32_t kVersion = 1;
inline constexpr uint32_t kSeatCount = 64;
inline constexpr std::chrono::milliseconds kLeastTimeout(20);
inline constexpr std::chrono::milliseconds kGreatestTimeout(60'000);
inline constexpr std::chrono::milliseconds kDefaultTimeout(200);

// Who is active and since which epoch, in one word, so that one compare-and-swap decides.
struct Term {
  static constexpr int kSeatBits = 16;
  static constexpr uint64_t kGreatestEpoch = (uint64_t{1} << (64 - kSeatBits)) - 1;

  static Term Of(uint64_t epoch, std::optional<uint32_t> seat) {
    return {epoch << kSeatBits | (seat.has_value() ? *seat + 1 : 0)};
  }
  uint64_t epoch() const { return word >> kSeatBits; }
  // The active member's seat; nothing if nobody is active. May be any number in a page that is not to be trusted.
  std::optional<uint32_t> seat() const {
    const auto number = static_cast<uint32_t>(word & ((1 << kSeatBits) - 1));
    return number == 0 ? std::nullopt : std::optional<uint32_t>(number - 1);
  }
  bool operator==(const Term&) const = default;

  uint64_t word = 0;
};

// A robust futex: the thread id of whoever holds it, or 0. When that thread ends, however it ends, the kernel puts
// FUTEX_OWNER_DIED in its place and wakes whoever waits, before it frees the memory of the process. Padded to the
// distance of the entries in the kernel's list of them.
struct Cell {
  std::atomic<uint32_t> word;
  uint32_t unused;
};

// What a seat is used for.
enum class SeatState : uint32_t {
  kFree = 0,        // for nothing, whoever sits on it
  kMember = 1,      // a member that is active or may become so
  kSuperseded = 2,  // one that was active and has been taken over from
};

struct Seat {
  Cell owner;                // held by the member's thread: the seat is its
  Cell watched[kSeatCount];  // held by the same thread: [i] is where the member on seat i waits for this one's end
  uint8_t unused[56];
  std::atomic<uint32_t> state;  // SeatState
  std::atomic<uint32_t> process_id;
  std::atomic<uint64_t> join_sequence;
  std::atomic<int64_t> heartbeat_ns;  // CLOCK_MONOTONIC
  std::atomic<uint64_t> claim_count;  // grows each time that the seat is taken
  uint8_t unused_too[32];
};

struct PageLayout {
  // Written once, before anybody has the page.
  std::atomic<uint64_t> magic;
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> seat_count;
  std::atomic<uint64_t> page_bytes;
  std::atomic<int64_t> heartbeat_timeout_ns;
  uint8_t fingerprint[32];

  alignas(64) std::atomic<uint64_t> term;  // a Term; alone in its cache line, because it is asked for on request paths

  alignas(64) std::atomic<uint64_t> next_join_sequence;
  std::atomic<uint64_t> first_epoch;
  std::atomic<uint64_t> takeovers_died;
  std::atomic<uint64_t> takeovers_hung;
  std::atomic<uint64_t> takeovers_left;

  alignas(4096) Seat seats[kSeatCount];
};

inline constexpr size_t kPageBytes = sizeof(PageLayout);

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(Cell) == 8 && sizeof(Seat) == 640 && kPageBytes == 45056);
static_assert(offsetof(PageLayout, fingerprint) == 32 && offsetof(PageLayout, term) == 64);
static_assert(offsetof(PageLayout, next_join_sequence) == 128 && offsetof(PageLayout, takeovers_left) == 160);
static_assert(offsetof(PageLayout, seats) == 4096 && offsetof(Seat, watched) == 8 && offsetof(Seat, state) == 576);
static_assert(offsetof(Seat, join_sequence) == 584 && offsetof(Seat, claim_count) == 600);

struct PageFacts {
  std::string fingerprint;  // 64 lower-case hexadecimal digits
  std::chrono::nanoseconds heartbeat_timeout = kDefaultTimeout;
  uint64_t first_epoch = 0;  // the first member that becomes active does so in the next
};

// Whether a seat's holder, by a cell of it, is there.
inline bool IsHeld(uint32_t word) { return (word & 0x3fffffffU) != 0 && (word & 0x40000000U) == 0; }

enum class MemberRole { kStandby, kActive, kSuperseded };

struct MemberView {
  uint32_t seat = 0;
  MemberRole role = MemberRole::kStandby;
  uint32_t process_id = 0;
  uint64_t join_sequence = 0;
  std::chrono::nanoseconds heartbeat_age{0};
  bool hung = false;
};

// What a page says at one moment: each value by itself is whole, together they may be of slightly different times.
struct GroupView {
  uint64_t epoch = 0;
  std::vector<MemberView> members;  // the active one first, then by join_sequence; the superseded last
  uint64_t died = 0;
  uint64_t hung = 0;
  uint64_t left = 0;
};

// A new page, sealed against growing and shrinking, as a descriptor for reading and writing. INVALID_ARGUMENT for what
// is no fingerprint or a time-out out of range; SYSTEM_ERROR.
absl::StatusOr<UniqueFd> CreateGroupPage(const PageFacts& facts);

class GroupPage {
 public:
  // Maps it. GROUP_PAGE_INVALID if `fd` is not such a page, or could be truncated under its readers; SYSTEM_ERROR.
  static absl::StatusOr<GroupPage> Map(int fd);

  GroupPage(GroupPage&& other) noexcept;
  GroupPage& operator=(GroupPage&&) = delete;
  ~GroupPage();

  // As they were when it was mapped.
  const PageFacts& facts() const { return facts_; }

  PageLayout& layout() const { return *layout_; }
  Seat& seat(uint32_t index) const { return layout_->seats[index]; }

  // Who is active now. GROUP_PAGE_INVALID if that seat cannot be, or the page is no longer what was mapped.
  absl::StatusOr<Term> ReadTerm() const;

  // Everything. GROUP_PAGE_INVALID likewise. `now_ns` is on CLOCK_MONOTONIC.
  absl::StatusOr<GroupView> Read(int64_t now_ns) const;

 private:
  GroupPage(PageLayout* layout, PageFacts facts) : layout_(layout), facts_(std::move(facts)) {}

  PageLayout* layout_;
  PageFacts facts_;
};

// "the page of the engine group is not to be used: <what>", GROUP_PAGE_INVALID.
absl::Status PageError(const std::string& what);

}  // namespace weightbroker::group
