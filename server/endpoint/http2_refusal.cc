#include "server/endpoint/http2_refusal.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/error.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

constexpr size_t kFrameHeaderBytes = 9;

enum FrameType : unsigned char { kHeaders = 1, kSettings = 4, kGoaway = 7 };
enum HeadersFlags : unsigned char { kNone = 0, kEndStreamAndHeaders = 0x5 };

std::string BigEndian(uint32_t value, int bytes) {
  std::string text;
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) text.push_back(static_cast<char>(value >> shift));
  return text;
}

std::string Frame(FrameType type, HeadersFlags flags, uint32_t stream, const std::string& payload) {
  std::string frame = BigEndian(static_cast<uint32_t>(payload.size()), 3);
  frame.push_back(static_cast<char>(type));
  frame.push_back(static_cast<char>(flags));
  return frame.append(BigEndian(stream, 4)).append(payload);
}

// A string of HPACK without Huffman coding: its length with a 7-bit prefix, then its bytes.
std::string HpackString(std::string_view text) {
  constexpr size_t kPrefixMax = 127;
  std::string result;
  if (text.size() < kPrefixMax) {
    result.push_back(static_cast<char>(text.size()));
  } else {
    result.push_back(static_cast<char>(kPrefixMax));
    size_t rest = text.size() - kPrefixMax;
    for (; rest >= 128; rest >>= 7) result.push_back(static_cast<char>(rest | 128));
    result.push_back(static_cast<char>(rest));
  }
  return result.append(text);
}

// A header field that neither side keeps.
std::string HpackField(std::string_view name, std::string_view value) {
  std::string field(1, '\0');
  return field.append(HpackString(name)).append(HpackString(value));
}

// As gRPC wants it in grpc-message.
std::string PercentEncode(std::string_view text) {
  std::string encoded;
  for (const char c : text) {
    if (c >= ' ' && c <= '~' && c != '%') {
      encoded.push_back(c);
    } else {
      encoded += absl::StrFormat("%%%02X", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

}  // namespace

std::string Http2Refusal::Greeting() { return Frame(kSettings, kNone, 0, ""); }

void Http2Refusal::Read(std::string_view bytes) {
  while (!bytes.empty() && !stream_.has_value()) {
    const size_t skipped = static_cast<size_t>(std::min<uint64_t>(skip_bytes_, bytes.size()));
    skip_bytes_ -= skipped;
    bytes.remove_prefix(skipped);
    const size_t taken = std::min(kFrameHeaderBytes - frame_header_.size(), bytes.size());
    frame_header_.append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    if (frame_header_.size() == kFrameHeaderBytes) OnFrameHeader();
  }
}

void Http2Refusal::OnFrameHeader() {
  const auto* header = reinterpret_cast<const unsigned char*>(frame_header_.data());
  skip_bytes_ = static_cast<uint64_t>(header[0]) << 16 | static_cast<uint64_t>(header[1]) << 8 | header[2];
  if (header[3] == kHeaders) {
    stream_ = (static_cast<uint32_t>(header[5]) << 24 | static_cast<uint32_t>(header[6]) << 16 |
               static_cast<uint32_t>(header[7]) << 8 | header[8]) &
              0x7FFFFFFF;
  }
  frame_header_.clear();
}

std::string Http2Refusal::Answer(const absl::Status& error) const {
  constexpr char kStatus200 = '\x88';  // entry 8 of HPACK's static table
  const std::string details = SerializeRpcStatus(error);
  std::string headers(1, kStatus200);
  headers.append(HpackField("content-type", "application/grpc"))
      .append(HpackField("grpc-status", absl::StrCat(static_cast<int>(error.code()))))
      .append(HpackField("grpc-message", PercentEncode(ToStd(error.message()))))
      .append(HpackField("grpc-status-details-bin", absl::Base64Escape(ToAbsl(details))));
  const std::string goaway = BigEndian(stream_.value_or(0), 4) + BigEndian(0, 4);
  return Frame(kHeaders, kEndStreamAndHeaders, stream_.value_or(0), headers) + Frame(kGoaway, kNone, 0, goaway);
}

}  // namespace weightbroker
