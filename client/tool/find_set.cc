#include "client/tool/find_set.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tool/export_look.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using client::Deadline;

constexpr size_t kLeastDigits = 8;
constexpr size_t kFingerprintDigits = 64;

absl::StatusOr<v1::ListWeightSetsResponse> List(const Connection& connection, Deadline deadline) {
  v1::ListWeightSetsResponse list;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    list.Clear();
    return connection.admin_service().ListWeightSets(&context, {}, &list);
  }));
  return list;
}

absl::StatusOr<v1::WeightSet> FindByFingerprint(const v1::ListWeightSetsResponse& list, const std::string& prefix) {
  std::vector<const v1::WeightSet*> found;
  for (const v1::WeightSet& set : list.weight_sets()) {
    if (set.fingerprint().compare(0, prefix.size(), prefix) == 0) found.push_back(&set);
  }
  if (found.empty()) {
    return MakeError(Reason::kWeightSetUnknown,
                     absl::StrCat("no weight set's fingerprint begins with ", Quote(prefix),
                                  "; weightbroker list shows those that there are"),
                     {{"fingerprint", Printable(prefix)}});
  }
  if (found.size() > 1) {
    return MakeError(Reason::kWeightSetAmbiguous,
                     absl::StrCat(found.size(), " weight sets' fingerprints begin with ", Quote(prefix),
                                  ": give more digits; weightbroker list --json shows them all"),
                     {{"fingerprint", Printable(prefix)}, {"matches", absl::StrCat(found.size())}});
  }
  return *found.front();
}

// What Export says of a model that is not resident, in the service's own words.
absl::Status WhyNotResident(const Connection& connection, const SetFlags& flags, Deadline deadline) {
  v1::ExportRequest request;
  *request.mutable_spec() = SpecOf(flags);
  *request.mutable_environment() = EnvironmentOf(flags);
  request.set_rank(flags.rank.value_or(0));
  return LookAtShard(connection, request, deadline).status();
}

absl::StatusOr<std::string> FingerprintOfResident(const Connection& connection, const SetFlags& flags,
                                                  Deadline deadline) {
  v1::FingerprintRequest request;
  *request.mutable_spec() = SpecOf(flags);
  *request.mutable_environment() = EnvironmentOf(flags);
  v1::FingerprintResponse response;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();
    return connection.service().Fingerprint(&context, request, &response);
  }));
  // If it has become resident since, the list will have it.
  if (!response.resident()) RETURN_IF_ERROR(WhyNotResident(connection, flags, deadline));
  return response.fingerprint();
}

}  // namespace

bool IsFingerprint(const std::string& weights) {
  return weights.size() >= kLeastDigits && weights.size() <= kFingerprintDigits &&
         weights.find_first_not_of("0123456789abcdef") == std::string::npos;
}

v1::WeightSpec SpecOf(const SetFlags& flags) {
  v1::WeightSpec spec = flags.spec;
  spec.set_model(flags.weights);
  return spec;
}

v1::Environment EnvironmentOf(const SetFlags& flags) {
  v1::Environment environment;
  environment.set_torch_version(flags.torch_version);
  return environment;
}

absl::StatusOr<v1::WeightSet> FindResidentSet(const Connection& connection, const SetFlags& flags, Deadline deadline) {
  std::string fingerprint = flags.weights;
  if (!IsFingerprint(flags.weights)) {
    ASSIGN_OR_RETURN(fingerprint, FingerprintOfResident(connection, flags, deadline));
  }
  ASSIGN_OR_RETURN(const v1::ListWeightSetsResponse list, List(connection, deadline));
  ASSIGN_OR_RETURN(v1::WeightSet set, FindByFingerprint(list, fingerprint));
  if (set.state() != v1::WEIGHT_SET_STATE_RESIDENT) {
    return MakeError(Reason::kNotResident,
                     absl::StrCat("the weight set ", set.fingerprint(), " is not resident but ",
                                  v1::WeightSetState_Name(set.state()), "; weightbroker register waits until it is"),
                     {{"fingerprint", set.fingerprint()}, {"state", v1::WeightSetState_Name(set.state())}});
  }
  return set;
}

std::vector<int32_t> RanksOf(const v1::WeightSet& set, const SetFlags& flags) {
  if (flags.rank.has_value()) return {*flags.rank};
  std::vector<int32_t> ranks;
  for (const v1::Shard& shard : set.shards()) ranks.push_back(shard.rank());
  return ranks;
}

}  // namespace weightbroker::tool
