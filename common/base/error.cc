#include "common/base/error.h"

#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "common/base/quote.h"
#include "common/base/strings.h"
#include "common/base/wire.h"

namespace weightbroker {
namespace {

struct ReasonRow {
  std::string_view name;
  absl::StatusCode code;
};

constexpr ReasonRow kReasons[] = {
#define WEIGHTBROKER_REASON_ROW(enumerator, name, code) {name, absl::StatusCode::code},
    WEIGHTBROKER_REASONS(WEIGHTBROKER_REASON_ROW)
#undef WEIGHTBROKER_REASON_ROW
};

// Together under the 4 KiB that stay readable through a default client's metadata limit, base64 included.
constexpr size_t kMaxMessageBytes = 1400;
constexpr size_t kMaxMetadataBytes = 1400;

// Field numbers of google.rpc.ErrorInfo, google.rpc.Status, google.protobuf.Any, and of a map's entry. The test beside
// protos/ compares what is written here with what protobuf writes.
enum ErrorInfoField { kReasonField = 1, kDomainField = 2, kMetadataField = 3 };
enum EntryField { kKeyField = 1, kValueField = 2 };
enum StatusField { kCodeField = 1, kMessageField = 2, kDetailsField = 3 };
enum AnyField { kTypeUrlField = 1, kAnyValueField = 2 };

struct ErrorInfo {
  std::string reason;
  std::string domain;
  std::map<std::string, std::string> metadata;
};

std::string SerializeErrorInfo(const ErrorInfo& info) {
  WireWriter writer;
  writer.AddBytes(kReasonField, info.reason);
  writer.AddBytes(kDomainField, info.domain);
  for (const auto& [key, value] : info.metadata) {
    WireWriter entry;
    entry.AddBytes(kKeyField, key);
    entry.AddBytes(kValueField, value);
    writer.AddBytes(kMetadataField, entry.bytes());
  }
  return writer.bytes();
}

// The two values of a message whose fields 1 and 2 are strings: a map's entry, or an Any.
std::optional<std::pair<std::string, std::string>> ParseStringPair(std::string_view bytes) {
  std::pair<std::string, std::string> pair;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (reader.field() == 1) pair.first = reader.bytes();
    if (reader.field() == 2) pair.second = reader.bytes();
  }
  if (!reader.ok()) return std::nullopt;
  return pair;
}

std::optional<ErrorInfo> ParseErrorInfo(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorInfoTypeUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::string bytes(*payload);
  ErrorInfo info;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (reader.field() == kReasonField) info.reason = reader.bytes();
    if (reader.field() == kDomainField) info.domain = reader.bytes();
    if (reader.field() == kMetadataField) {
      const auto entry = ParseStringPair(reader.bytes());
      if (!entry.has_value()) return std::nullopt;
      info.metadata[entry->first] = entry->second;
    }
  }
  if (!reader.ok()) return std::nullopt;
  return info;
}

ErrorInfo CutMetadata(const ErrorInfo& info) {
  ErrorInfo cut{info.reason, info.domain, {}};
  size_t bytes = 0;
  size_t left_out = 0;
  for (const auto& [key, raw_value] : info.metadata) {
    const std::string value = ToUtf8(raw_value);
    bytes += key.size() + value.size() + 8;
    if (bytes <= kMaxMetadataBytes) {
      cut.metadata[ToUtf8(key)] = value;
    } else {
      ++left_out;
    }
  }
  if (left_out > 0) cut.metadata["metadata_left_out"] = absl::StrCat(left_out);
  return cut;
}

}  // namespace

std::string_view ReasonName(Reason reason) { return kReasons[static_cast<size_t>(reason)].name; }

absl::StatusCode ReasonCode(Reason reason) { return kReasons[static_cast<size_t>(reason)].code; }

absl::Status MakeError(Reason reason, const std::string& message, const std::map<std::string, std::string>& metadata) {
  const ErrorInfo info{std::string(ReasonName(reason)), kErrorDomain, metadata};
  absl::Status status(ReasonCode(reason), message);
  status.SetPayload(kErrorInfoTypeUrl, absl::Cord(SerializeErrorInfo(info)));
  return status;
}

absl::Status SystemError(const std::string& what, int error_number) {
  char buffer[128] = {};
  const char* text = strerror_r(error_number, buffer, sizeof(buffer));
  const char* name = strerrorname_np(error_number);
  return MakeError(Reason::kSystemError, absl::StrCat(what, ": ", text),
                   {{"what", what}, {"errno", name != nullptr ? name : absl::StrCat(error_number)}});
}

ErrorDetails GetErrorDetails(const absl::Status& status) {
  const auto info = ParseErrorInfo(status);
  if (!info.has_value()) return {};
  return {info->reason, info->metadata};
}

bool HasReason(const absl::Status& status, Reason reason) {
  return !status.ok() && GetErrorDetails(status).reason == ReasonName(reason);
}

std::string SerializeRpcStatus(const absl::Status& status) {
  WireWriter writer;
  if (!status.ok()) writer.AddVarint(kCodeField, static_cast<uint64_t>(status.code()));
  writer.AddBytes(kMessageField, CutUtf8WithCount(ToUtf8(ToStd(status.message())), kMaxMessageBytes));
  if (const auto info = ParseErrorInfo(status); info.has_value()) {
    WireWriter any;
    any.AddBytes(kTypeUrlField, kErrorInfoTypeUrl);
    any.AddBytes(kAnyValueField, SerializeErrorInfo(CutMetadata(*info)));
    writer.AddBytes(kDetailsField, any.bytes());
  }
  return writer.bytes();
}

absl::Status ParseRpcStatus(std::string_view bytes) {
  int code = 0;
  std::string message;
  std::string error_info;
  bool well_formed = true;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (reader.field() == kCodeField) code = static_cast<int>(reader.varint());
    if (reader.field() == kMessageField) message = reader.bytes();
    if (reader.field() == kDetailsField) {
      const auto any = ParseStringPair(reader.bytes());
      well_formed = well_formed && any.has_value();
      if (any.has_value() && any->first == kErrorInfoTypeUrl) error_info = any->second;
    }
  }
  if (!reader.ok() || !well_formed) {
    return MakeError(Reason::kProtocolError, "an error arrived that is not a google.rpc.Status");
  }
  absl::Status status(static_cast<absl::StatusCode>(code), message);
  if (!error_info.empty()) status.SetPayload(kErrorInfoTypeUrl, absl::Cord(error_info));
  return status;
}

}  // namespace weightbroker
