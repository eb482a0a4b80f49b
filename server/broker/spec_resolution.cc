#include "server/broker/spec_resolution.h"

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/plan/plan.h"

namespace weightbroker {
namespace {

// Of the differences, in the message and in the metadata; both are cut near 1,400 bytes when they are sent, and this
// one says what has been left out.
constexpr size_t kMaxDifferenceBytes = 900;

std::string Quoted(const std::string& value) { return value.empty() ? "absent" : absl::StrCat("\"", value, "\""); }

std::string Sentence(const v1::FingerprintDifference& difference) {
  return absl::StrCat(difference.field(), " is ", Quoted(difference.requested()), " where the resident one has ",
                      Quoted(difference.resident()));
}

// The spec's fingerprint on the devices of each set, computed once for sets whose devices are alike.
class FingerprintsByFacts {
 public:
  explicit FingerprintsByFacts(const ResolvedSpec& resolved) : resolved_(resolved) {}

  const Fingerprint& For(const WeightSetEntry& set) {
    const DeviceFacts facts = DeviceFactsOf(set.fingerprint());
    const auto known = computed_.find(facts);
    return known != computed_.end() ? known->second
                                    : computed_.emplace(facts, resolved_.FingerprintOn(facts)).first->second;
  }

 private:
  const ResolvedSpec& resolved_;
  std::map<DeviceFacts, Fingerprint> computed_;
};

}  // namespace

absl::StatusOr<ResolvedSpec> ResolveSpec(const ServiceContext& context, const v1::WeightSpec& spec,
                                         const v1::Environment& environment) {
  ResolvedSpec resolved;
  RETURN_IF_ERROR(CheckEnvironment(environment));
  resolved.environment = environment;
  ASSIGN_OR_RETURN(resolved.spec, CompleteSpec(spec));
  ASSIGN_OR_RETURN(const std::string folder, context.resolver->Resolve(spec.model()));
  resolved.spec.set_model(folder);
  ASSIGN_OR_RETURN(resolved.identity, context.identities->Get(folder));
  resolved.architectures_sha256 = context.architectures_sha256;
  return resolved;
}

Fingerprint ResolvedSpec::FingerprintOn(const DeviceFacts& facts) const {
  return ComputeFingerprint(spec, environment, *identity, facts, architectures_sha256);
}

std::vector<WeightSetRef> FindSetsOfGoneFiles(const ServiceContext& context, const v1::WeightSpec& spec,
                                              const v1::Environment& environment) {
  std::vector<WeightSetRef> sets;
  auto complete = CompleteSpec(spec);
  const auto folder = context.resolver->ResolveGone(spec.model());
  if (!complete.ok() || !folder.ok() || !CheckEnvironment(environment).ok()) return sets;
  complete->set_model(*folder);
  for (const WeightSetRef& set : context.registry->FindByModel(*folder)) {
    const Fingerprint wanted = ComputeFingerprint(*complete, environment, set->identity(),
                                                  DeviceFactsOf(set->fingerprint()), context.architectures_sha256);
    if (wanted.hash != set->fingerprint().hash) continue;
    const auto gone = CountGone(*context.file_system, set->identity());
    if (gone.ok() && *gone > 0) sets.push_back(set);
  }
  return sets;
}

SetsOfSpec FindSets(const Registry& registry, const ResolvedSpec& resolved) {
  SetsOfSpec found;
  FingerprintsByFacts fingerprints(resolved);
  for (const WeightSetRef& set : registry.Sets()) {
    if (fingerprints.For(*set).hash == set->fingerprint().hash) found.same.push_back(set);
  }
  if (!found.same.empty()) return found;
  for (const WeightSetRef& set : registry.FindByModel(resolved.spec.model())) {
    const Fingerprint& requested = fingerprints.For(*set);
    auto differences = DiffFingerprints(requested, set->fingerprint());
    if (found.closest.has_value() && found.closest->differences.size() <= differences.size()) continue;
    found.closest = ClosestSet{set, requested.hash, std::move(differences)};
  }
  return found;
}

absl::Status MismatchError(Metrics& metrics, const ClosestSet& closest) {
  const std::string& resident_fingerprint = closest.set->fingerprint().hash;
  std::map<std::string, std::string> metadata = {{"difference_count", absl::StrCat(closest.differences.size())},
                                                 {"requested_fingerprint", closest.requested_fingerprint},
                                                 {"resident_fingerprint", resident_fingerprint}};
  std::string message = absl::StrCat("what is asked for is not what is resident of this model, ", resident_fingerprint,
                                     "; differing fields: ", closest.differences.size());
  std::set<std::string> labels;
  size_t message_bytes = 0;
  size_t metadata_bytes = 0;
  size_t left_out = 0;
  for (const v1::FingerprintDifference& difference : closest.differences) {
    labels.insert(MismatchFieldLabel(difference.field()));
    const std::string sentence = Sentence(difference);
    message_bytes += sentence.size();
    if (message_bytes <= kMaxDifferenceBytes) absl::StrAppend(&message, "; ", sentence);
    metadata_bytes += 2 * difference.field().size() + difference.requested().size() + difference.resident().size() + 40;
    if (message_bytes > kMaxDifferenceBytes || metadata_bytes > kMaxDifferenceBytes) ++left_out;
    if (metadata_bytes > kMaxDifferenceBytes) continue;
    metadata[absl::StrCat(difference.field(), ".requested")] = difference.requested();
    metadata[absl::StrCat(difference.field(), ".resident")] = difference.resident();
  }
  if (left_out > 0) {
    absl::StrAppend(&message, "; ", left_out, " more: call Fingerprint to see them all");
    metadata["differences_left_out"] = absl::StrCat(left_out);
  }
  for (const std::string& label : labels) metrics.CountFingerprintMismatch(label);
  return MakeError(Reason::kFingerprintMismatch, message, metadata);
}

}  // namespace weightbroker
