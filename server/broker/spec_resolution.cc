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
  resolved.fingerprint = ComputeFingerprint(resolved.spec, environment, *resolved.identity, HostDeviceFacts(),
                                            context.architectures_sha256);
  return resolved;
}

WeightSetRef FindSetOfGoneFiles(const ServiceContext& context, const v1::WeightSpec& spec,
                                const v1::Environment& environment) {
  auto complete = CompleteSpec(spec);
  const auto folder = context.resolver->ResolveGone(spec.model());
  if (!complete.ok() || !folder.ok() || !CheckEnvironment(environment).ok()) return nullptr;
  complete->set_model(*folder);
  for (const WeightSetRef& set : context.registry->FindByModel(*folder)) {
    const Fingerprint wanted =
        ComputeFingerprint(*complete, environment, set->identity(), HostDeviceFacts(), context.architectures_sha256);
    if (wanted.hash != set->fingerprint().hash) continue;
    const auto gone = CountGone(*context.file_system, set->identity());
    if (gone.ok() && *gone > 0) return set;
  }
  return nullptr;
}

std::optional<ClosestSet> FindClosest(const Registry& registry, const Fingerprint& requested,
                                      const std::string& model) {
  std::optional<ClosestSet> closest;
  for (const WeightSetRef& set : registry.FindByModel(model)) {
    auto differences = DiffFingerprints(requested, set->fingerprint());
    if (closest.has_value() && closest->differences.size() <= differences.size()) continue;
    closest = ClosestSet{set, std::move(differences)};
  }
  return closest;
}

absl::Status MismatchError(Metrics& metrics, const std::string& requested_fingerprint, const ClosestSet& closest) {
  const std::string& resident_fingerprint = closest.set->fingerprint().hash;
  std::map<std::string, std::string> metadata = {{"difference_count", absl::StrCat(closest.differences.size())},
                                                 {"requested_fingerprint", requested_fingerprint},
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
