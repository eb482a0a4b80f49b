#include "client/tool/desired_command.h"

#include <google/protobuf/util/time_util.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tool/format.h"
#include "common/base/file.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/desired/desired_check.h"
#include "common/desired/desired_request.h"
#include "common/desired/desired_state.h"

namespace weightbroker::tool {
namespace {

using google::protobuf::util::TimeUtil;

constexpr size_t kShortFingerprint = 12;

std::string StateName(const v1::DesiredSet& set) {
  return WithoutPrefix(v1::DesiredSet::State_Name(set.state()), "STATE_");
}

// How far it is, or what keeps it.
std::string Detail(const v1::DesiredSet& set) {
  if (set.has_progress()) {
    return absl::StrCat(FormatBytes(set.progress().done_bytes()), " of ", FormatBytes(set.progress().total_bytes()));
  }
  if (set.state() != v1::DesiredSet::STATE_FAILED || !set.has_failure()) return "";
  return absl::StrCat(set.failure().reason(), ", attempt ", set.failed_attempts(), ", next at ",
                      TimeUtil::ToString(set.retry_time()));
}

void PrintFailure(const std::string& of, const v1::Failure& failure) {
  printf("%s: %s [%s]\n", of.c_str(), OneLine(failure.message()).c_str(), failure.reason().c_str());
}

void PrintSets(const v1::HealthResponse& health) {
  if (health.desired_sets().empty()) return;
  std::vector<std::vector<std::string>> rows = {{"DESIRED SET", "STATE", "FINGERPRINT", "MODEL", "DETAIL"}};
  for (const v1::DesiredSet& set : health.desired_sets()) {
    rows.push_back(
        {set.name(), StateName(set), set.fingerprint().substr(0, kShortFingerprint), set.model(), Detail(set)});
  }
  printf("%s", FormatTable(rows).c_str());
  for (const v1::DesiredSet& set : health.desired_sets()) {
    if (set.has_failure()) PrintFailure(set.name(), set.failure());
    for (const std::string& fingerprint : set.may_prove_to_be()) {
      printf("%s: may prove to be %s, which is not in the file any more and stays pinned until that is known\n",
             set.name().c_str(), fingerprint.substr(0, kShortFingerprint).c_str());
    }
  }
}

void PrintAliases(const v1::HealthResponse& health) {
  if (health.desired_aliases().empty()) return;
  std::vector<std::vector<std::string>> rows = {{"DESIRED ALIAS", "SET", "IN PLACE", "NAMES NOW"}};
  for (const v1::DesiredAlias& alias : health.desired_aliases()) {
    rows.push_back({alias.name(), alias.set(), alias.in_place() ? "yes" : "no",
                    alias.fingerprint().empty() ? "nothing" : alias.fingerprint().substr(0, kShortFingerprint)});
  }
  printf("\n%s", FormatTable(rows).c_str());
  for (const v1::DesiredAlias& alias : health.desired_aliases()) {
    if (alias.has_failure()) PrintFailure(alias.name(), alias.failure());
  }
}

// The parts of Health that this is about, in a Health of their own.
v1::HealthResponse OnlyDesired(const v1::HealthResponse& health) {
  v1::HealthResponse part;
  part.set_status(health.status());
  *part.mutable_desired_sets() = health.desired_sets();
  *part.mutable_desired_aliases() = health.desired_aliases();
  if (health.has_desired_failure()) *part.mutable_desired_failure() = health.desired_failure();
  return part;
}

}  // namespace

std::string StatusName(const v1::HealthResponse& health) {
  const bool has_failed = health.has_desired_failure() ||
                          std::any_of(health.desired_sets().begin(), health.desired_sets().end(),
                                      [](const auto& set) { return set.state() == v1::DesiredSet::STATE_FAILED; }) ||
                          std::any_of(health.desired_aliases().begin(), health.desired_aliases().end(),
                                      [](const auto& alias) { return !alias.in_place() && alias.has_failure(); });
  if (health.status() == v1::HealthResponse::STATUS_LOADING && health.load_count() == 0 && has_failed) {
    return "INCOMPLETE";
  }
  return WithoutPrefix(v1::HealthResponse::Status_Name(health.status()), "STATUS_");
}

bool HasAllDesired(const v1::HealthResponse& health) {
  return !health.has_desired_failure() &&
         std::all_of(health.desired_sets().begin(), health.desired_sets().end(),
                     [](const auto& set) { return set.state() == v1::DesiredSet::STATE_RESIDENT; }) &&
         std::all_of(health.desired_aliases().begin(), health.desired_aliases().end(),
                     [](const auto& alias) { return alias.in_place(); });
}

void PrintDesired(const v1::HealthResponse& health) {
  PrintSets(health);
  PrintAliases(health);
  if (!health.has_desired_failure()) return;
  const bool has_some = !health.desired_sets().empty() || !health.desired_aliases().empty();
  printf("the file of --desired was refused, and %s: %s [%s]\n",
         has_some ? "what was read before is in force" : "nothing is in force until it is mended and read again",
         OneLine(health.desired_failure().message()).c_str(), health.desired_failure().reason().c_str());
}

ExitCode RunDesired(const ServiceFlags& service) {
  const absl::StatusOr<v1::HealthResponse> health = AskHealth(service);
  if (!health.ok()) return PrintError(health.status(), service.json);
  const bool is_configured =
      !health->desired_sets().empty() || !health->desired_aliases().empty() || health->has_desired_failure();
  if (service.json) {
    PrintJson(OnlyDesired(*health));
  } else if (is_configured) {
    PrintDesired(*health);
  } else {
    printf("the service is configured to hold nothing (--desired)\n");
  }
  return HasAllDesired(*health) ? kDone : kNotReady;
}

ExitCode RunDesiredCheck(const std::string& file, bool json) {
  const absl::StatusOr<DesiredState> desired = ReadDesiredFile(RealFileSystem(), file);
  absl::Status status = desired.status();
  if (desired.ok()) status.Update(ToRegisterRequests(*desired, file).status());
  if (desired.ok()) status.Update(CheckModelNames(*desired, file));
  if (!status.ok()) return PrintError(status, json);
  if (json) {
    const nlohmann::ordered_json line = {
        {"ok", true}, {"sets", desired->sets.size()}, {"aliases", desired->aliases.size()}};
    printf("%s\n", line.dump().c_str());
  } else {
    printf("%s: valid: %s, %s\n", OneLine(file).c_str(),
           FormatCount(static_cast<int64_t>(desired->sets.size()), "set").c_str(),
           desired->aliases.size() == 1 ? "1 alias" : absl::StrCat(desired->aliases.size(), " aliases").c_str());
  }
  return kDone;
}

}  // namespace weightbroker::tool
