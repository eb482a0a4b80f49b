// Refuses a gRPC client who may not come in, in words that it understands and without letting it near gRPC: the first
// call gets PERMISSION_DENIED with the reason, as if a server had answered. Merely closing would make the client report
// "UNAVAILABLE: Socket closed" and try again for ever.
//
//   Http2Refusal refusal;
//   send(Http2Refusal::Greeting());
//   while (!refusal.stream().has_value()) refusal.Read(bytes_received);   // until the first call has come
//   send(refusal.Answer(error));
//
// Just enough of HTTP/2 (RFC 9113) and HPACK (RFC 7541) for that. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace weightbroker {

class Http2Refusal {
 public:
  // The server's connection preface: without it the client does not send its call.
  static std::string Greeting();

  // Reads on in what the client says, from the preface's first byte, in pieces of any size.
  void Read(std::string_view bytes);

  // The stream of the first call, once it has come.
  std::optional<uint32_t> stream() const { return stream_; }

  // Ends that call with `error` (code, message, and details as any error of the service has them), and the connection.
  std::string Answer(const absl::Status& error) const;

 private:
  void OnFrameHeader();

  uint64_t skip_bytes_ = 24;  // of the preface or the frame's payload
  std::string frame_header_;  // what has arrived of it
  std::optional<uint32_t> stream_;
};

}  // namespace weightbroker
