#include "client/src/redeem_ticket.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/base/error.h"
#include "weightbroker/redeem.h"

namespace weightbroker::client {
namespace {

Reason ReasonFor(int code) {
  switch (code) {
    case EACCES:
      return Reason::kTicketInvalid;
    case ETIMEDOUT:
      return Reason::kDeadlineExceeded;
    case ENOENT:
    case ECONNREFUSED:
    case ECONNRESET:
      return Reason::kServiceUnavailable;
    case EMFILE:
    case ENFILE:
      return Reason::kSystemError;
    default:
      return Reason::kProtocolError;
  }
}

}  // namespace

absl::StatusOr<std::vector<UniqueFd>> RedeemTicket(const std::string& socket_path, const std::string& ticket,
                                                   size_t fd_count, Deadline deadline) {
  std::vector<int> received(fd_count);
  size_t received_count = 0;
  char error[kRedeemErrorBytes];
  // A wait of weeks is as good as one without end, and does not fit an int.
  const auto timeout_ms = std::min<int64_t>(Remaining(deadline).count(), std::numeric_limits<int>::max());
  const int code =
      ::weightbroker::RedeemTicket(socket_path.c_str(), ticket.data(), ticket.size(), received.data(), received.size(),
                                   &received_count, static_cast<int>(timeout_ms), error, sizeof(error));
  if (code != 0) {
    const char* name = strerrorname_np(code);
    return MakeError(ReasonFor(code), error, {{"socket", socket_path}, {"errno", name != nullptr ? name : "unknown"}});
  }
  return std::vector<UniqueFd>(received.begin(), received.begin() + static_cast<std::ptrdiff_t>(received_count));
}

}  // namespace weightbroker::client
