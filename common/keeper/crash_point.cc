#include "common/keeper/crash_point.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/base/log.h"

namespace weightbroker {
namespace {

std::string Environment(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

std::string_view MomentName(CrashPoint::Moment moment) {
  switch (moment) {
    case CrashPoint::Moment::kBefore:
      return "before";
    case CrashPoint::Moment::kAfter:
      return "after";
    case CrashPoint::Moment::kAcked:
      return "acked";
  }
  return "unknown";
}

}  // namespace

const CrashPoint& CrashPoint::FromEnvironment() {
  static const CrashPoint* const point =
      new CrashPoint(Environment("WEIGHTBROKER_TEST_CRASH_AT"), Environment("WEIGHTBROKER_TEST_CRASH_TOKEN"));
  return *point;
}

CrashPoint::CrashPoint(const std::string& text, const std::string& token) : token_(token) {
  if (text.empty()) return;
  const std::vector<std::string> fields = absl::StrSplit(text, ':');
  if (fields.size() == 2 && fields[0] == "kept_entry") {
    entry_ = fields[1];
    return;
  }
  int occurrence = 0;
  if (fields.size() != 4 || fields[0] != "keeper_message" || !absl::SimpleAtoi(fields[3], &occurrence)) {
    Log(LogLevel::kWarning, "keeper.crash_point_ignored", {{"value", text}});
    return;
  }
  type_ = fields[1];
  moment_ = fields[2];
  occurrence_ = occurrence;
}

void CrashPoint::Reached(KeeperMessageType type, Moment moment) const {
  if (IsHit(type, moment)) kill(getpid(), SIGKILL);
}

void CrashPoint::ReachedEntry(const std::string& key) const {
  if (IsHit(key)) kill(getpid(), SIGKILL);
}

bool CrashPoint::IsHit(const std::string& key) const {
  if (entry_.empty() || key.rfind(entry_, 0) != 0) return false;
  return token_.empty() || unlink(token_.c_str()) == 0;
}

bool CrashPoint::IsHit(KeeperMessageType type, Moment moment) const {
  if (occurrence_ == 0 || type_ != KeeperMessageTypeName(type) || moment_ != MomentName(moment)) return false;
  if (seen_.fetch_add(1) + 1 != occurrence_) return false;
  return token_.empty() || unlink(token_.c_str()) == 0;
}

}  // namespace weightbroker
