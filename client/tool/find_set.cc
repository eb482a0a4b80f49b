#include "client/tool/find_set.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tool/export_look.h"
#include "client/tool/output.h"
#include "common/base/alias_name.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/plan.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using client::Deadline;

constexpr size_t kLeastDigits = 8;

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

// The set that Export by the model would give, or why it gives none, in the service's own words. Export alone knows
// weights whose files are gone, and whether they may be had.
absl::StatusOr<std::string> FingerprintByExport(const Connection& connection, const SetFlags& flags,
                                                Deadline deadline) {
  v1::ExportRequest request;
  *request.mutable_spec() = SpecOf(flags);
  *request.mutable_environment() = EnvironmentOf(flags);
  request.set_rank(flags.rank.value_or(0));
  const absl::StatusOr<ShardLook> look = LookAtShard(connection, request, deadline);
  if (look.ok()) return look->header.fingerprint();
  // The set is there, though not with its first rank.
  if (HasReason(look.status(), Reason::kRankNotHere) && !flags.rank.has_value()) {
    return GetErrorDetails(look.status()).metadata["fingerprint"];
  }
  return look.status();
}

absl::StatusOr<std::string> FingerprintOfResident(const Connection& connection, const SetFlags& flags,
                                                  Deadline deadline) {
  v1::FingerprintRequest request;
  *request.mutable_spec() = SpecOf(flags);
  *request.mutable_environment() = EnvironmentOf(flags);
  v1::FingerprintResponse response;
  const absl::Status asked = connection.Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();
    return connection.service().Fingerprint(&context, request, &response);
  });
  if (ExitCodeFor(asked) == kUnavailable) return asked;
  if (!asked.ok() || !response.resident()) return FingerprintByExport(connection, flags, deadline);
  return response.fingerprint();
}

absl::StatusOr<std::string> FingerprintOfAlias(const Connection& connection, const std::string& alias,
                                               Deadline deadline) {
  v1::FingerprintRequest request;
  request.set_alias(alias);
  v1::FingerprintResponse response;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();
    return connection.service().Fingerprint(&context, request, &response);
  }));
  return response.fingerprint();
}

// One field, for a message: sizes that an older service left out are 1.
std::string ValueOf(const v1::WeightSpec& spec, const google::protobuf::FieldDescriptor& field) {
  const google::protobuf::Reflection& reflection = *spec.GetReflection();
  if (field.is_repeated()) {
    std::vector<std::string> values;
    for (int i = 0; i < reflection.FieldSize(spec, &field); ++i) {
      values.push_back(reflection.GetRepeatedString(spec, &field, i));
    }
    std::sort(values.begin(), values.end());  // a list of names that says the same in any order
    values.erase(std::unique(values.begin(), values.end()), values.end());
    return absl::StrJoin(values, ",");
  }
  if (field.cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_STRING) return reflection.GetString(spec, &field);
  return absl::StrCat(std::max(1, reflection.GetInt32(spec, &field)));
}

absl::Status Contradiction(const std::string& field, const std::string& said, const std::string& found,
                           const v1::WeightSet& set) {
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("the weight set ", set.fingerprint(), " has ", field, " ", Quote(found),
                                ", and the flags say ", Quote(said), ": leave the flag out, or name a model instead"),
                   {{"field", field}, {"requested", Printable(said)}, {"found", Printable(found)}});
}

}  // namespace

bool IsFingerprint(const std::string& weights) {
  return weights.size() >= kLeastDigits && weights.size() <= kFingerprintDigits &&
         weights.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool IsModel(const std::string& weights) { return weights.find_first_of(":/") != std::string::npos; }

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

absl::Status CheckFlagsFit(const SetFlags& flags, const v1::WeightSet& set) {
  std::vector<const google::protobuf::FieldDescriptor*> given;  // those with a value
  flags.spec.GetReflection()->ListFields(flags.spec, &given);
  for (const auto* const field : given) {
    const std::string said = ValueOf(flags.spec, *field);
    const std::string found = ValueOf(set.spec(), *field);
    if (said != found) return Contradiction(absl::StrCat("spec.", std::string(field->name())), said, found, set);
  }
  const std::string& found = set.environment().torch_version();
  if (flags.torch_version.empty() || flags.torch_version == found) return absl::OkStatus();
  return Contradiction("environment.torch_version", flags.torch_version, found, set);
}

absl::StatusOr<v1::WeightSet> FindSetByPrefix(const Connection& connection, const std::string& prefix,
                                              Deadline deadline) {
  ASSIGN_OR_RETURN(const v1::ListWeightSetsResponse list, List(connection, deadline));
  return FindByFingerprint(list, prefix);
}

absl::StatusOr<v1::WeightSet> FindResidentSet(const Connection& connection, const SetFlags& flags, Deadline deadline) {
  std::string fingerprint = flags.weights;
  const bool is_named = IsFingerprint(flags.weights) || IsAliasName(flags.weights);
  if (IsAliasName(flags.weights)) {
    ASSIGN_OR_RETURN(fingerprint, FingerprintOfAlias(connection, flags.weights, deadline));
  } else if (!is_named) {
    ASSIGN_OR_RETURN(fingerprint, FingerprintOfResident(connection, flags, deadline));
  }
  ASSIGN_OR_RETURN(const v1::ListWeightSetsResponse list, List(connection, deadline));
  ASSIGN_OR_RETURN(v1::WeightSet set, FindByFingerprint(list, fingerprint));
  if (is_named) RETURN_IF_ERROR(CheckFlagsFit(flags, set));
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
