#include "client/tool/output.h"

#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "client/tool/remedy.h"
#include "common/base/error.h"
#include "common/base/quote.h"

namespace weightbroker::tool {
namespace {

void PrintParts(const std::string& message, const std::string& reason,
                const std::map<std::string, std::string>& metadata, bool json) {
  fprintf(stderr, "error: %s\nreason: %s (docs/errors.md)\n", OneLine(message).c_str(), OneLine(reason).c_str());
  for (const auto& [key, value] : metadata) {
    fprintf(stderr, "  %s: %s\n", OneLine(key).c_str(), OneLine(value).c_str());
  }
  if (const std::string remedy = RemedyFor(reason); !remedy.empty()) {
    fprintf(stderr, "what to do: %s\n", remedy.c_str());
  }
  if (!json) return;
  const nlohmann::ordered_json line = {{"ok", false}, {"reason", reason}, {"message", message}, {"metadata", metadata}};
  // A message may quote bytes of a file that are no UTF-8.
  printf("%s\n", line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
}

// Empty for what no JSON can hold.
std::string ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  if (!google::protobuf::util::MessageToJsonString(message, &json, options).ok()) return "";
  return json;
}

}  // namespace

ExitCode ExitCodeFor(const absl::Status& status) {
  if (status.ok()) return kDone;
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ? kUnavailable : kRefused;
}

ExitCode PrintError(const absl::Status& status, bool json) {
  const ErrorDetails details = GetErrorDetails(status);
  PrintParts(std::string(status.message()), details.reason, details.metadata, json);
  return ExitCodeFor(status);
}

ExitCode PrintError(const Status& status, bool json) {
  PrintParts(status.message(), status.reason(), status.metadata(), json);
  return ExitCodeFor(absl::Status(static_cast<absl::StatusCode>(status.code()), ""));
}

void PrintJson(const google::protobuf::Message& message) {
  if (const std::string json = ToJson(message); !json.empty()) printf("%s\n", json.c_str());
}

void PrintJsonWith(const google::protobuf::Message& message, const std::string& key, const std::string& value) {
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(ToJson(message), nullptr, /*allow_exceptions=*/false);
  json[key] = value;
  printf("%s\n", json.dump().c_str());
}

}  // namespace weightbroker::tool
