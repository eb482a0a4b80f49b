#include "client/tool/fingerprint_command.h"

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/connection.h"
#include "client/tool/format.h"
#include "common/base/alias_name.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::tool {
namespace {

using client::Connection;

absl::StatusOr<v1::FingerprintResponse> Fingerprint(const ServiceFlags& service, const SetFlags& flags) {
  v1::FingerprintRequest request;
  if (IsAliasName(flags.weights)) {
    request.set_alias(flags.weights);
  } else {
    *request.mutable_spec() = SpecOf(flags);
    *request.mutable_environment() = EnvironmentOf(flags);
  }
  ASSIGN_OR_RETURN(const auto connection, Connect(service));
  v1::FingerprintResponse response;
  RETURN_IF_ERROR(connection->Call(client::DeadlineIn(service.timeout), [&](grpc::ClientContext& context) {
    response.Clear();
    return connection->service().Fingerprint(&context, request, &response);
  }));
  return response;
}

std::string ValueText(const std::string& value) { return value.empty() ? "(absent)" : Printable(value); }

void Print(const v1::FingerprintResponse& response) {
  std::vector<std::vector<std::string>> summary = {{"fingerprint", response.fingerprint()},
                                                   {"resident", response.resident() ? "yes" : "no"}};
  if (!response.resident()) {
    summary.push_back({"closest", response.compared_with().empty() ? "none" : response.compared_with()});
  }
  printf("%s\n", FormatTable(summary).c_str());
  std::vector<std::vector<std::string>> components = {{"COMPONENT", "VALUE"}};
  for (const v1::FingerprintComponent& part : response.components()) {
    components.push_back({Printable(part.field()), ValueText(part.value())});
  }
  printf("%s", FormatTable(components).c_str());
  if (response.differences().empty()) return;
  std::vector<std::vector<std::string>> differences = {{"DIFFERS", "REQUESTED", "RESIDENT"}};
  for (const v1::FingerprintDifference& part : response.differences()) {
    differences.push_back({Printable(part.field()), ValueText(part.requested()), ValueText(part.resident())});
  }
  printf("\n%s", FormatTable(differences).c_str());
}

}  // namespace

ExitCode RunFingerprint(const ServiceFlags& service, const SetFlags& flags) {
  const absl::StatusOr<v1::FingerprintResponse> response = Fingerprint(service, flags);
  if (!response.ok()) return PrintError(response.status(), service.json);
  if (service.json) {
    PrintJson(*response);
  } else {
    Print(*response);
  }
  return kDone;
}

}  // namespace weightbroker::tool
