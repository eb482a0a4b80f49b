#include "client/tool/status_command.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client/tool/desired_command.h"
#include "client/tool/format.h"

namespace weightbroker::tool {
namespace {

using Json = nlohmann::ordered_json;

// The names of sets and aliases that are not as configured.
std::vector<std::string> MissingDesired(const v1::HealthResponse& health) {
  std::vector<std::string> missing;
  for (const v1::DesiredSet& set : health.desired_sets()) {
    if (set.state() != v1::DesiredSet::STATE_RESIDENT) missing.push_back(set.name());
  }
  for (const v1::DesiredAlias& alias : health.desired_aliases()) {
    if (!alias.in_place()) missing.push_back(alias.name());
  }
  return missing;
}

// Why the last attempt at each of them failed that has failed and is not there. What is there may have failed before.
Json DesiredFailures(const v1::HealthResponse& health) {
  Json failures = Json::array();
  for (const v1::DesiredSet& set : health.desired_sets()) {
    if (!set.has_failure() || set.state() == v1::DesiredSet::STATE_RESIDENT) continue;
    failures.push_back({{"set", set.name()}, {"reason", set.failure().reason()}, {"message", set.failure().message()}});
  }
  for (const v1::DesiredAlias& alias : health.desired_aliases()) {
    if (!alias.has_failure() || alias.in_place()) continue;
    failures.push_back(
        {{"alias", alias.name()}, {"reason", alias.failure().reason()}, {"message", alias.failure().message()}});
  }
  return failures;
}

// Why the file of --desired was refused when it was last read; null if it was not.
Json DesiredFailure(const v1::HealthResponse& health) {
  if (!health.has_desired_failure()) return nullptr;
  const v1::Failure& failure = health.desired_failure();
  return {{"reason", failure.reason()}, {"message", failure.message()}};
}

}  // namespace

ExitCode RunStatus(const ServiceFlags& service) {
  const absl::StatusOr<v1::HealthResponse> health = AskHealth(service);
  if (!health.ok()) return PrintError(health.status(), service.json);
  const bool ready = health->status() == v1::HealthResponse::STATUS_READY;
  const std::string status = StatusName(*health);
  const auto resident =
      std::count_if(health->weight_sets().begin(), health->weight_sets().end(),
                    [](const v1::WeightSet& set) { return set.state() == v1::WEIGHT_SET_STATE_RESIDENT; });
  if (service.json) {
    printf("%s\n", Json{{"ok", true},
                        {"ready", ready},
                        {"status", status},
                        {"resident_sets", resident},
                        {"leases", health->lease_count()},
                        {"loads", health->load_count()},
                        {"desired_sets", health->desired_sets_size()},
                        {"missing", MissingDesired(*health)},
                        {"failures", DesiredFailures(*health)},
                        {"desired_failure", DesiredFailure(*health)}}
                       .dump()
                       .c_str());
  } else {
    printf("%s: %s resident, %s, %s under way\n", status.c_str(), FormatCount(resident, "set").c_str(),
           FormatCount(health->lease_count(), "lease").c_str(), FormatCount(health->load_count(), "load").c_str());
    if (!HasAllDesired(*health)) PrintDesired(*health);
  }
  return ready ? kDone : kNotReady;
}

}  // namespace weightbroker::tool
