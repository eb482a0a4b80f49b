#include "client/tool/output.h"

#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "common/base/error.h"

namespace weightbroker::tool {

ExitCode ExitCodeFor(const absl::Status& status) {
  if (status.ok()) return kDone;
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ? kUnavailable : kRefused;
}

ExitCode PrintError(const absl::Status& status, bool json) {
  const ErrorDetails details = GetErrorDetails(status);
  const std::string message(status.message());
  fprintf(stderr, "error: %s\nreason: %s (docs/errors.md says what to do)\n", message.c_str(), details.reason.c_str());
  for (const auto& [key, value] : details.metadata) fprintf(stderr, "  %s: %s\n", key.c_str(), value.c_str());
  if (json) {
    const nlohmann::ordered_json line = {
        {"ok", false}, {"reason", details.reason}, {"message", message}, {"metadata", details.metadata}};
    // A message may quote bytes of a file that are no UTF-8.
    printf("%s\n", line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
  }
  return ExitCodeFor(status);
}

void PrintJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  if (google::protobuf::util::MessageToJsonString(message, &json, options).ok()) printf("%s\n", json.c_str());
}

}  // namespace weightbroker::tool
