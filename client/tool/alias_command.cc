#include "client/tool/alias_command.h"

#include <google/protobuf/util/time_util.h>

#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/connection.h"
#include "client/tool/format.h"
#include "common/base/strings.h"
#include "weightbroker/v1/weight_broker_admin_service.pb.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using google::protobuf::util::TimeUtil;

constexpr char kNone[] = "none";

// What a flag says of the fingerprint that is expected, as the API does.
std::string Expected(const std::string& text) { return text == kNone ? "" : text; }

// Connects, makes one call, and prints what it gives with `print`.
template <typename Response, typename Call, typename Print>
ExitCode RunCall(const ServiceFlags& service, Call call, Print print) {
  const auto connection = Connection::Open({.socket_path = service.socket});
  if (!connection.ok()) return PrintError(connection.status(), service.json);
  Response response;
  // Each of these calls may be made again when its broker has ended under it: doing it twice changes nothing more.
  const absl::Status status =
      (*connection)->Call(client::DeadlineIn(service.timeout), [&](grpc::ClientContext& context) {
        response.Clear();
        return call((*connection)->admin_service(), context, &response);
      });
  if (!status.ok()) return PrintError(status, service.json);
  if (service.json) {
    PrintJson(response);
  } else {
    print(response);
  }
  return kDone;
}

std::vector<std::string> DescribeAlias(const v1::Alias& alias) {
  return {alias.name(), alias.fingerprint(), alias.previous_fingerprint().empty() ? "-" : alias.previous_fingerprint(),
          TimeUtil::ToString(alias.move_time())};
}

void PrintAliases(const google::protobuf::RepeatedPtrField<v1::Alias>& aliases) {
  std::vector<std::vector<std::string>> rows = {{"ALIAS", "FINGERPRINT", "BEFORE", "SINCE"}};
  for (const v1::Alias& alias : aliases) rows.push_back(DescribeAlias(alias));
  printf("%s", FormatTable(rows).c_str());
}

void PrintChange(const v1::SetAliasResponse& response) {
  printf("%s", FormatTable({{"ALIAS", "FINGERPRINT", "BEFORE", "SINCE"}, DescribeAlias(response.alias())}).c_str());
  if (response.superseded_lease_count() > 0) {
    printf("told that theirs is superseded: %s\n", FormatCount(response.superseded_lease_count(), "lease").c_str());
  }
  if (response.has_released()) {
    printf("%s is %s\n", response.released().fingerprint().c_str(),
           WithoutPrefix(v1::WeightSetState_Name(response.released().state()), "WEIGHT_SET_STATE_").c_str());
  }
}

}  // namespace

ExitCode RunAliasSet(const ServiceFlags& service, const AliasFlags& flags) {
  v1::SetAliasRequest request;
  request.set_alias(flags.alias);
  request.set_fingerprint(flags.fingerprint);
  request.set_release_previous(flags.release_previous);
  if (flags.expected_fingerprint.has_value()) {
    request.set_expected_fingerprint(Expected(*flags.expected_fingerprint));
  }
  return RunCall<v1::SetAliasResponse>(
      service,
      [&](v1::WeightBrokerAdminService::StubInterface& stub, grpc::ClientContext& context,
          v1::SetAliasResponse* response) { return stub.SetAlias(&context, request, response); },
      PrintChange);
}

ExitCode RunAliasDelete(const ServiceFlags& service, const AliasFlags& flags) {
  v1::DeleteAliasRequest request;
  request.set_alias(flags.alias);
  if (flags.expected_fingerprint.has_value()) {
    request.set_expected_fingerprint(Expected(*flags.expected_fingerprint));
  }
  return RunCall<v1::DeleteAliasResponse>(
      service,
      [&](v1::WeightBrokerAdminService::StubInterface& stub, grpc::ClientContext& context,
          v1::DeleteAliasResponse* response) { return stub.DeleteAlias(&context, request, response); },
      [](const v1::DeleteAliasResponse& response) {
        printf("%s named %s\n", response.alias().name().c_str(), response.alias().fingerprint().c_str());
      });
}

ExitCode RunAliasList(const ServiceFlags& service) {
  return RunCall<v1::ListWeightSetsResponse>(
      service,
      [](v1::WeightBrokerAdminService::StubInterface& stub, grpc::ClientContext& context,
         v1::ListWeightSetsResponse* response) { return stub.ListWeightSets(&context, {}, response); },
      [](const v1::ListWeightSetsResponse& response) {
        if (response.aliases().empty()) {
          printf("no aliases\n");
        } else {
          PrintAliases(response.aliases());
        }
      });
}

}  // namespace weightbroker::tool
