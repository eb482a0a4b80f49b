#include "common/group/page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/memory/memfd.h"

namespace weightbroker::group {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr size_t kFingerprintBytes = sizeof(PageLayout::fingerprint);

bool IsFingerprint(const std::string& text) {
  return text.size() == 2 * kFingerprintBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsTimeout(std::chrono::nanoseconds timeout) { return timeout >= kLeastTimeout && timeout <= kGreatestTimeout; }

absl::Status CheckFacts(const PageFacts& facts) {
  if (!IsFingerprint(facts.fingerprint)) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("an engine group needs the fingerprint of its weights, 64 lower-case hexadecimal "
                                  "digits; ",
                                  Quote(facts.fingerprint), " is none"),
                     {{"field", "fingerprint"}});
  }
  if (IsTimeout(facts.heartbeat_timeout)) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("a heartbeat time-out of ", facts.heartbeat_timeout.count(), " ns is out of range: ",
                                kLeastTimeout.count(), " ms to ", kGreatestTimeout.count(), " ms"),
                   {{"field", "heartbeat_timeout"}});
}

class Mapping {
 public:
  explicit Mapping(int fd) : address_(mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) {}
  ~Mapping() {
    if (valid()) munmap(address_, kPageBytes);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  bool valid() const { return address_ != MAP_FAILED; }
  void* get() const { return address_; }
  PageLayout* Release() { return static_cast<PageLayout*>(std::exchange(address_, MAP_FAILED)); }

 private:
  void* address_;
};

absl::Status CheckFile(int fd) {
  struct stat stat = {};
  if (fstat(fd, &stat) != 0) return SystemError("fstat of an engine group's page", errno);
  if (stat.st_size != static_cast<off_t>(kPageBytes)) {
    return PageError(absl::StrCat("it has ", stat.st_size, " bytes instead of ", kPageBytes));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) return PageError("it is not sealed against being truncated");
  return absl::OkStatus();
}

absl::Status CheckConstants(const PageLayout& layout) {
  if (layout.magic.load(std::memory_order_relaxed) != kMagic) return PageError("it does not begin with its mark");
  const uint32_t version = layout.version.load(std::memory_order_relaxed);
  if (version != kVersion) {
    return PageError(absl::StrCat("it has version ", version, " of the format; this program knows ", kVersion));
  }
  if (layout.seat_count.load(std::memory_order_relaxed) != kSeatCount ||
      layout.page_bytes.load(std::memory_order_relaxed) != kPageBytes) {
    return PageError("it has another number of seats or bytes than its version has");
  }
  if (!IsTimeout(std::chrono::nanoseconds(layout.heartbeat_timeout_ns.load(std::memory_order_relaxed)))) {
    return PageError("its heartbeat time-out is out of range");
  }
  return absl::OkStatus();
}

std::string HexOf(const uint8_t (&bytes)[kFingerprintBytes]) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(bytes), kFingerprintBytes));
}

}  // namespace

absl::Status PageError(const std::string& what) {
  return MakeError(Reason::kGroupPageInvalid, absl::StrCat("the page of the engine group is not to be used: ", what));
}

absl::StatusOr<UniqueFd> CreateGroupPage(const PageFacts& facts) {
  RETURN_IF_ERROR(CheckFacts(facts));
  ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd("weightbroker-group", 0));
  if (ftruncate(fd.get(), static_cast<off_t>(kPageBytes)) != 0) {
    return SystemError("ftruncate of an engine group's page", errno);
  }
  const Mapping mapping(fd.get());
  if (!mapping.valid()) return SystemError("mmap of an engine group's page", errno);
  auto* const layout = new (mapping.get()) PageLayout;  // all zeros, which is what atomics of zero are
  const std::string fingerprint = absl::HexStringToBytes(facts.fingerprint);
  std::copy(fingerprint.begin(), fingerprint.end(), layout->fingerprint);
  layout->version = kVersion;
  layout->seat_count = kSeatCount;
  layout->page_bytes = kPageBytes;
  layout->heartbeat_timeout_ns = facts.heartbeat_timeout.count();
  layout->next_join_sequence = 1;
  layout->first_epoch = facts.first_epoch;
  layout->term = Term::Of(facts.first_epoch, std::nullopt).word;
  layout->magic = kMagic;
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return SystemError("fcntl(F_ADD_SEALS)", errno);
  return fd;
}

absl::StatusOr<GroupPage> GroupPage::Map(int fd) {
  RETURN_IF_ERROR(CheckFile(fd));
  Mapping mapping(fd);
  if (!mapping.valid()) return SystemError("mmap of an engine group's page", errno);
  const auto* const layout = static_cast<const PageLayout*>(mapping.get());
  RETURN_IF_ERROR(CheckConstants(*layout));
  PageFacts facts{.fingerprint = HexOf(layout->fingerprint),
                  .heartbeat_timeout = std::chrono::nanoseconds(layout->heartbeat_timeout_ns.load()),
                  .first_epoch = layout->first_epoch.load()};
  return GroupPage(mapping.Release(), std::move(facts));
}

GroupPage::GroupPage(GroupPage&& other) noexcept
    : layout_(std::exchange(other.layout_, nullptr)), facts_(std::move(other.facts_)) {}

GroupPage::~GroupPage() {
  if (layout_ != nullptr) munmap(layout_, kPageBytes);
}

absl::StatusOr<Term> GroupPage::ReadTerm() const {
  RETURN_IF_ERROR(CheckConstants(*layout_));
  const Term term{layout_->term.load(std::memory_order_acquire)};
  if (term.seat().has_value() && *term.seat() >= kSeatCount) {
    return PageError(absl::StrCat("seat ", *term.seat(), " is said to be active, of ", kSeatCount));
  }
  if (term.epoch() < facts_.first_epoch) {
    return PageError(absl::StrCat("its epoch, ", term.epoch(), ", is below its first, ", facts_.first_epoch));
  }
  return term;
}

absl::StatusOr<GroupView> GroupPage::Read(int64_t now_ns) const {
  ASSIGN_OR_RETURN(const Term term, ReadTerm());
  GroupView view;
  view.epoch = term.epoch();
  view.died = layout_->takeovers_died.load(std::memory_order_relaxed);
  view.hung = layout_->takeovers_hung.load(std::memory_order_relaxed);
  view.left = layout_->takeovers_left.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < kSeatCount; ++i) {
    const Seat& seat = layout_->seats[i];
    const auto state = static_cast<SeatState>(seat.state.load(std::memory_order_acquire));
    if (!IsHeld(seat.owner.word.load(std::memory_order_acquire)) || state == SeatState::kFree) continue;
    const std::chrono::nanoseconds age(now_ns - std::min(now_ns, seat.heartbeat_ns.load(std::memory_order_relaxed)));
    view.members.push_back({.seat = i,
                            .role = term.seat() == i                  ? MemberRole::kActive
                                    : state == SeatState::kSuperseded ? MemberRole::kSuperseded
                                                                      : MemberRole::kStandby,
                            .process_id = seat.process_id.load(std::memory_order_relaxed),
                            .join_sequence = seat.join_sequence.load(std::memory_order_relaxed),
                            .heartbeat_age = age,
                            .hung = age > facts_.heartbeat_timeout});
  }
  const auto order = [](const MemberView& member) {
    return std::make_tuple(member.role != MemberRole::kActive, member.role == MemberRole::kSuperseded,
                           member.join_sequence);
  };
  std::sort(view.members.begin(), view.members.end(),
            [&](const MemberView& a, const MemberView& b) { return order(a) < order(b); });
  return view;
}

}  // namespace weightbroker::group
