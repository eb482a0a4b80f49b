#include "client/tool/alias_command.h"

#include <google/protobuf/util/time_util.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "client/tool/find_set.h"
#include "client/tool/format.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "weightbroker/v1/weight_broker_admin_service.pb.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using client::Deadline;
using google::protobuf::util::TimeUtil;

constexpr char kNone[] = "none";

// What a flag says of the fingerprint that is expected, as the API wants it: whole, or empty. WEIGHT_SET_UNKNOWN,
// WEIGHT_SET_AMBIGUOUS.
absl::StatusOr<std::string> Expected(const Connection& connection, const std::string& text, Deadline deadline) {
  if (text == kNone) return std::string();
  if (text.size() == kFingerprintDigits) return text;
  ASSIGN_OR_RETURN(const v1::WeightSet set, FindSetByPrefix(connection, text, deadline));
  return set.fingerprint();
}

// Connects, has `ask` ask the service, and prints what it gives with `print`.
template <typename Ask, typename Print>
ExitCode Run(const ServiceFlags& service, Ask ask, Print print) {
  const auto connection = Connect(service);
  if (!connection.ok()) return PrintError(connection.status(), service.json);
  const auto response = ask(**connection, client::DeadlineIn(service.timeout));
  if (!response.ok()) return PrintError(response.status(), service.json);
  print(*response);
  return kDone;
}

// Of a message as JSON, or for people.
template <typename Message>
auto JsonOr(const ServiceFlags& service, void (*print)(const Message&)) {
  return [json = service.json, print](const Message& message) { json ? PrintJson(message) : print(message); };
}

absl::StatusOr<v1::ListWeightSetsResponse> List(const Connection& connection, Deadline deadline) {
  v1::ListWeightSetsResponse response;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();
    return connection.admin_service().ListWeightSets(&context, {}, &response);
  }));
  return response;
}

// May be made again when its broker has ended under it: an alias that names the set already is left as it is.
absl::StatusOr<v1::SetAliasResponse> Set(const Connection& connection, const v1::SetAliasRequest& request,
                                         Deadline deadline) {
  v1::SetAliasResponse response;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();
    return connection.admin_service().SetAlias(&context, request, &response);
  }));
  return response;
}

v1::DeleteAliasResponse Deleted(const v1::ListWeightSetsResponse& before, const std::string& name) {
  v1::DeleteAliasResponse response;
  response.mutable_alias()->set_name(name);
  for (const v1::Alias& alias : before.aliases()) {
    if (alias.name() == name) *response.mutable_alias() = alias;
  }
  return response;
}

// A call that was lost with its broker may have been carried out: then the next broker does not know the alias.
absl::StatusOr<v1::DeleteAliasResponse> Delete(const Connection& connection, const v1::DeleteAliasRequest& request,
                                               Deadline deadline) {
  ASSIGN_OR_RETURN(const v1::ListWeightSetsResponse before, List(connection, deadline));
  client::Attempts attempts(connection, deadline);
  bool was_lost = false;
  while (true) {
    v1::DeleteAliasResponse response;
    const absl::Status status = connection.CallOnce(deadline, [&](grpc::ClientContext& context) {
      return connection.admin_service().DeleteAlias(&context, request, &response);
    });
    if (status.ok()) return response;
    if (was_lost && HasReason(status, Reason::kAliasUnknown)) return Deleted(before, request.alias());
    if (!attempts.ShallTryAgain(status)) return status;
    was_lost = true;
  }
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

// An alias that has been set, and the set of the file of --desired that it is to name instead; empty if there is none.
struct Change {
  v1::SetAliasResponse response;
  std::string desired_set;
};

// Empty, too, where the service does not say.
std::string DesiredInstead(const Connection& connection, const v1::Alias& alias, Deadline deadline) {
  v1::HealthResponse health;
  const absl::Status asked = connection.Call(deadline, [&](grpc::ClientContext& context) {
    health.Clear();
    return connection.service().Health(&context, {}, &health);
  });
  if (!asked.ok()) return "";
  for (const v1::DesiredAlias& desired : health.desired_aliases()) {
    if (desired.name() != alias.name()) continue;
    for (const v1::DesiredSet& set : health.desired_sets()) {
      if (set.name() == desired.set() && set.fingerprint() != alias.fingerprint()) return set.name();
    }
  }
  return "";
}

absl::StatusOr<Change> SetAlias(const Connection& connection, const AliasFlags& flags, Deadline deadline) {
  v1::SetAliasRequest request;
  request.set_alias(flags.alias);
  request.set_fingerprint(flags.fingerprint);
  request.set_release_previous(flags.release_previous);
  if (flags.expected_fingerprint.has_value()) {
    ASSIGN_OR_RETURN(*request.mutable_expected_fingerprint(),
                     Expected(connection, *flags.expected_fingerprint, deadline));
  }
  Change change;
  ASSIGN_OR_RETURN(change.response, Set(connection, request, deadline));
  change.desired_set = DesiredInstead(connection, change.response.alias(), deadline);
  return change;
}

void PrintTable(const v1::SetAliasResponse& response) {
  printf("%s", FormatTable({{"ALIAS", "FINGERPRINT", "BEFORE", "SINCE"}, DescribeAlias(response.alias())}).c_str());
  if (response.superseded_lease_count() > 0) {
    printf("told that theirs is superseded: %s\n", FormatCount(response.superseded_lease_count(), "lease").c_str());
  }
  if (response.has_released()) {
    printf("%s is %s\n", response.released().fingerprint().c_str(),
           WithoutPrefix(v1::WeightSetState_Name(response.released().state()), "WEIGHT_SET_STATE_").c_str());
  }
}

void PrintChange(const Change& change, bool json) {
  if (!change.desired_set.empty()) {
    fprintf(stderr,
            "warning: the file of --desired has %s name its set \"%s\": the service sets it back to that; change the "
            "file instead, and have it read again\n",
            change.response.alias().name().c_str(), change.desired_set.c_str());
  }
  if (json) {
    PrintJsonWith(change.response, "desired_set", change.desired_set);
  } else {
    PrintTable(change.response);
  }
}

void PrintDeleted(const v1::DeleteAliasResponse& response) {
  printf("%s named %s\n", response.alias().name().c_str(), response.alias().fingerprint().c_str());
}

void PrintList(const v1::ListWeightSetsResponse& response) {
  if (response.aliases().empty()) {
    printf("no aliases\n");
  } else {
    PrintAliases(response.aliases());
  }
}

}  // namespace

ExitCode RunAliasSet(const ServiceFlags& service, const AliasFlags& flags) {
  return Run(
      service, [&](const Connection& connection, Deadline deadline) { return SetAlias(connection, flags, deadline); },
      [&](const Change& change) { PrintChange(change, service.json); });
}

ExitCode RunAliasDelete(const ServiceFlags& service, const AliasFlags& flags) {
  const auto ask = [&](const Connection& connection, Deadline deadline) -> absl::StatusOr<v1::DeleteAliasResponse> {
    v1::DeleteAliasRequest request;
    request.set_alias(flags.alias);
    if (flags.expected_fingerprint.has_value()) {
      ASSIGN_OR_RETURN(*request.mutable_expected_fingerprint(),
                       Expected(connection, *flags.expected_fingerprint, deadline));
    }
    return Delete(connection, request, deadline);
  };
  return Run(service, ask, JsonOr(service, PrintDeleted));
}

ExitCode RunAliasList(const ServiceFlags& service) { return Run(service, List, JsonOr(service, PrintList)); }

}  // namespace weightbroker::tool
