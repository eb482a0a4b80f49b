#include "server/endpoint/reply.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "client/include/weightbroker/redeem.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/socket.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

namespace protocol = ticket_protocol;

std::string TicketReplyHeader(protocol::Status status, size_t fd_count, const std::string& message) {
  unsigned char header[protocol::kReplyHeaderBytes];
  memcpy(header, protocol::kMagic, protocol::kMagicBytes);
  protocol::PutUint32(protocol::kVersion, header + 8);
  protocol::PutUint32(status, header + 12);
  protocol::PutUint32(static_cast<uint32_t>(fd_count), header + 16);
  protocol::PutUint32(static_cast<uint32_t>(message.size()), header + 20);
  return std::string(reinterpret_cast<const char*>(header), sizeof(header)) + message;
}

protocol::Status TicketStatus(const absl::Status& error) {
  if (HasReason(error, Reason::kAccessDenied)) return protocol::kAccessDenied;
  if (HasReason(error, Reason::kProtocolError)) return protocol::kMalformedRequest;
  return protocol::kTicketRefused;
}

std::string CutMessage(const absl::Status& error) {
  return std::string(CutUtf8(ToUtf8(ToStd(error.message())), protocol::kMaxMessageBytes));
}

Reply::Progress ProgressAfterErrno(int error_number) {
  if (error_number == EAGAIN) return Reply::Progress::kBlocked;
  if (error_number == ETOOMANYREFS) return Reply::Progress::kFdsInFlight;
  return Reply::Progress::kBroken;
}

}  // namespace

Reply Reply::WithFds(SharedFds fds) {
  Reply reply;
  reply.bytes_ = TicketReplyHeader(protocol::kOk, fds != nullptr ? fds->size() : 0, "");
  reply.fds_ = std::move(fds);
  return reply;
}

Reply Reply::TicketRefusal(const absl::Status& error) {
  Reply reply;
  reply.bytes_ = TicketReplyHeader(TicketStatus(error), 0, CutMessage(error));
  return reply;
}

Reply Reply::WithBytes(std::string bytes) {
  Reply reply;
  reply.bytes_ = std::move(bytes);
  return reply;
}

Reply::Progress Reply::Advance(int socket) {
  while (bytes_sent_ < bytes_.size()) {
    if (const Progress progress = SendBytes(socket); progress != Progress::kSent) return progress;
  }
  while (fds_ != nullptr && fds_sent_ < fds_->size()) {
    if (const Progress progress = SendBatch(socket); progress != Progress::kSent) return progress;
  }
  return Progress::kSent;
}

Reply::Progress Reply::SendBytes(int socket) {
  const ssize_t count =
      send(socket, bytes_.data() + bytes_sent_, bytes_.size() - bytes_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count < 0) return ProgressAfterErrno(errno);
  bytes_sent_ += static_cast<size_t>(count);
  return Progress::kSent;
}

// One byte with the next descriptors: the kernel takes at most 253 at once, and a byte cannot be sent in part.
Reply::Progress Reply::SendBatch(int socket) {
  const size_t count = std::min(fds_->size() - fds_sent_, protocol::kMaxFdsPerBatch);
  std::vector<int> fds;
  for (size_t i = 0; i < count; ++i) fds.push_back((*fds_)[fds_sent_ + i].get());
  const char byte = protocol::kBatchByte;
  if (const int error = SendNow(socket, {&byte, 1}, fds); error != 0) return ProgressAfterErrno(error);
  fds_sent_ += count;
  return Progress::kSent;
}

}  // namespace weightbroker
