#include "server/loader/oom_volunteer.h"

#include <cerrno>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

constexpr char kFirstChoice[] = "1000";

}  // namespace

OomVolunteer::OomVolunteer(std::string path) : path_(std::move(path)) {
  std::ifstream(path_) >> score_;
  std::ofstream(path_) << kFirstChoice;
}

absl::Status OomVolunteer::Withdraw() {
  errno = 0;
  std::ofstream file(path_);
  if (!score_.empty() && (file << score_ << std::flush)) return absl::OkStatus();
  return SystemError(absl::StrCat("writing ", path_), errno != 0 ? errno : EIO);
}

}  // namespace weightbroker
