#include "tests/integration/hostile/raw_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

namespace weightbroker::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint8_t kData = 0;
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kSettings = 4;
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;
constexpr size_t kMaxFrameBytes = 16'384;
constexpr uint8_t kContinuation = 9;

int MillisecondsUntil(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  return left > 0 ? static_cast<int>(left) : 0;
}

bool WaitFor(int fd, short events, Clock::time_point deadline) {
  pollfd entry = {.fd = fd, .events = events, .revents = 0};
  return poll(&entry, 1, MillisecondsUntil(deadline)) > 0;
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload) {
  const auto size = static_cast<uint32_t>(payload.size());
  std::string frame;
  for (const uint32_t byte : {size >> 16, size >> 8, size, uint32_t{type}, uint32_t{flags}, stream >> 24, stream >> 16,
                              stream >> 8, stream}) {
    frame.push_back(static_cast<char>(byte & 0xFF));
  }
  return frame.append(payload);
}

// HPACK's integers of 7 bits, which all lengths here are.
std::string Length(size_t value) {
  std::string bytes;
  if (value < 127) return std::string(1, static_cast<char>(value));
  bytes.push_back(127);
  for (value -= 127; value >= 128; value /= 128) bytes.push_back(static_cast<char>(value % 128 + 128));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string Text(std::string_view text) { return Length(text.size()).append(text); }

// Never indexed, with a name of HPACK's static table (RFC 7541, appendix A) or one of its own.
std::string Field(std::string_view name, std::string_view value) {
  return std::string(1, '\0') + Text(name) + Text(value);
}

// A block of headers in as many frames as it takes.
std::string HeaderFrames(uint32_t stream, std::string_view block) {
  std::string frames;
  uint8_t type = kHeaders;
  while (true) {
    const bool is_last = block.size() <= kMaxFrameBytes;
    frames += Frame(type, is_last ? kEndHeaders : 0, stream, block.substr(0, kMaxFrameBytes));
    if (is_last) return frames;
    block.remove_prefix(kMaxFrameBytes);
    type = kContinuation;
  }
}

}  // namespace

UniqueFd ConnectTo(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) fd.reset();
  return fd;
}

bool SendAll(int fd, std::string_view bytes, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno != EAGAIN || !WaitFor(fd, POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool IsClosedWithin(int fd, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  char forgotten[65'536];
  while (WaitFor(fd, POLLIN, deadline)) {
    const ssize_t count = recv(fd, forgotten, sizeof(forgotten), MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

std::string ReadSome(int fd, size_t enough, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  std::string bytes;
  char buffer[65'536];
  while (bytes.size() < enough && WaitFor(fd, POLLIN, deadline)) {
    const ssize_t count = recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN)) break;
    if (count > 0) bytes.append(buffer, static_cast<size_t>(count));
  }
  return bytes;
}

std::string Http2Preface() { return "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Frame(kSettings, 0, 0, ""); }

std::string RawCall(uint32_t stream, const std::string& path, const std::string& message, int64_t claimed_bytes,
                    size_t metadata_bytes) {
  std::string block = Field(":method", "POST") + Field(":scheme", "http") + Field(":path", path) +
                      Field(":authority", "localhost") + Field("content-type", "application/grpc") +
                      Field("te", "trailers");
  if (metadata_bytes > 0) block += Field("x-padding", std::string(metadata_bytes, 'x'));
  const auto size = static_cast<uint32_t>(claimed_bytes >= 0 ? claimed_bytes : static_cast<int64_t>(message.size()));
  std::string data(1, '\0');
  for (const uint32_t byte : {size >> 24, size >> 16, size >> 8, size}) data.push_back(static_cast<char>(byte & 0xFF));
  data += message;
  return HeaderFrames(stream, block) + Frame(kData, claimed_bytes >= 0 ? 0 : kEndStream, stream, data);
}

}  // namespace weightbroker::testing
