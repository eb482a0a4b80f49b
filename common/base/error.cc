#include "common/base/error.h"

#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "weightbroker/internal/v1/rpc_status.pb.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;

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

std::optional<pb::ErrorInfo> ParseErrorInfo(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrorInfoTypeUrl);
  pb::ErrorInfo info;
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) return std::nullopt;
  return info;
}

std::string CutMessage(const std::string& message) {
  if (message.size() <= kMaxMessageBytes) return message;
  size_t end = kMaxMessageBytes;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;  // not inside a UTF-8 sequence
  return absl::StrCat(message.substr(0, end), "... (", message.size() - end, " more bytes)");
}

pb::ErrorInfo CutMetadata(const pb::ErrorInfo& info) {
  pb::ErrorInfo cut;
  cut.set_reason(info.reason());
  cut.set_domain(info.domain());
  const std::map<std::string, std::string> sorted(info.metadata().begin(), info.metadata().end());
  size_t bytes = 0;
  size_t left_out = 0;
  for (const auto& [key, value] : sorted) {
    bytes += key.size() + value.size() + 8;
    if (bytes <= kMaxMetadataBytes) {
      (*cut.mutable_metadata())[key] = value;
    } else {
      ++left_out;
    }
  }
  if (left_out > 0) (*cut.mutable_metadata())["metadata_left_out"] = absl::StrCat(left_out);
  return cut;
}

}  // namespace

std::string_view ReasonName(Reason reason) { return kReasons[static_cast<size_t>(reason)].name; }

absl::StatusCode ReasonCode(Reason reason) { return kReasons[static_cast<size_t>(reason)].code; }

absl::Status MakeError(Reason reason, const std::string& message, const std::map<std::string, std::string>& metadata) {
  pb::ErrorInfo info;
  info.set_reason(std::string(ReasonName(reason)));
  info.set_domain(kErrorDomain);
  for (const auto& [key, value] : metadata) (*info.mutable_metadata())[key] = value;
  absl::Status status(ReasonCode(reason), message);
  status.SetPayload(kErrorInfoTypeUrl, absl::Cord(info.SerializeAsString()));
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
  return {info->reason(), {info->metadata().begin(), info->metadata().end()}};
}

bool HasReason(const absl::Status& status, Reason reason) {
  return !status.ok() && GetErrorDetails(status).reason == ReasonName(reason);
}

std::string SerializeRpcStatus(const absl::Status& status) {
  pb::RpcStatus proto;
  proto.set_code(static_cast<int>(status.code()));
  proto.set_message(CutMessage(std::string(status.message())));
  if (const auto info = ParseErrorInfo(status); info.has_value()) {
    auto* detail = proto.add_details();
    detail->set_type_url(kErrorInfoTypeUrl);
    detail->set_value(CutMetadata(*info).SerializeAsString());
  }
  return proto.SerializeAsString();
}

absl::Status ParseRpcStatus(std::string_view bytes) {
  pb::RpcStatus proto;
  if (!proto.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return MakeError(Reason::kProtocolError, "an error arrived that is not a google.rpc.Status");
  }
  absl::Status status(static_cast<absl::StatusCode>(proto.code()), proto.message());
  if (status.ok()) return status;
  for (const auto& detail : proto.details()) {
    if (detail.type_url() == kErrorInfoTypeUrl) status.SetPayload(kErrorInfoTypeUrl, absl::Cord(detail.value()));
  }
  return status;
}

}  // namespace weightbroker
