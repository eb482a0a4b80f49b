#include "server/broker/wanted_set.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/plan/plan.h"

namespace weightbroker {

absl::StatusOr<Placement> PlaceRequest(const ServiceContext& context, const v1::RegisterRequest& request,
                                       const v1::WeightSpec& spec) {
  auto placement = PlaceRanks(request, WorldSize(spec), context.devices->Served());
  const std::string why = context.devices->refusal();
  const auto is_on_gpu = [](int kind) {
    return kind == v1::HANDLE_KIND_CUDA_VMM_FD || kind == v1::HANDLE_KIND_CUDA_IPC;
  };
  const auto& kinds = request.handle_kinds();
  if (why.empty() || !HasReason(placement.status(), Reason::kHandleKindUnsupported) ||
      std::none_of(kinds.begin(), kinds.end(), is_on_gpu)) {
    return placement;
  }
  // Whoever asked for a GPU should read why there is none, and not only that there is none.
  return MakeError(Reason::kGpuUnavailable, absl::StrCat(placement.status().message(), "; no GPU is served: ", why),
                   GetErrorDetails(placement.status()).metadata);
}

absl::StatusOr<NewWeightSet> WantSet(const ServiceContext& context, const v1::RegisterRequest& request,
                                     const ResolvedSpec& resolved) {
  ASSIGN_OR_RETURN(const Placement placement, PlaceRequest(context, request, resolved.spec));
  return NewWeightSet{.spec = resolved.spec,
                      .environment = resolved.environment,
                      .fingerprint = resolved.FingerprintOn(context.devices->FactsOf(placement.ranks)),
                      .identity = resolved.identity,
                      .placement = placement,
                      .pins = {.by_caller = request.pinned()}};
}

absl::StatusOr<WeightSetRef> LoadDesired(const ServiceContext& context, const v1::RegisterRequest& request) {
  ASSIGN_OR_RETURN(const ResolvedSpec resolved, ResolveSpec(context, request.spec(), request.environment()));
  ASSIGN_OR_RETURN(NewWeightSet wanted, WantSet(context, request, resolved));
  wanted.pins.by_desired_state = true;
  ASSIGN_OR_RETURN(WeightSetRef set, context.loads->Load(std::move(wanted)));
  RETURN_IF_ERROR(context.registry->CheckNotQuarantined(set));
  RETURN_IF_ERROR(CheckHeld(request, set->placement()));
  RETURN_IF_ERROR(context.registry->Pin(set, PinOwner::kDesiredState));
  return set;
}

absl::StatusOr<std::string> FindDesiredFingerprint(const ServiceContext& context, const v1::RegisterRequest& request) {
  const auto resolved = ResolveSpec(context, request.spec(), request.environment());
  if (!resolved.ok()) {
    const auto sets = FindSetsOfGoneFiles(context, request.spec(), request.environment());
    if (sets.empty()) return resolved.status();
    // Of several versions the one that is in use already, else the one that came last.
    const auto worth = [&](const WeightSetRef& set) {
      const v1::WeightSet described = context.registry->Describe(set);
      return std::tuple(CheckHeld(request, set->placement()).ok(), context.registry->View(set).pins.by_desired_state,
                        !described.aliases().empty());
    };
    const auto best =
        std::max_element(sets.rbegin(), sets.rend(), [&](const auto& a, const auto& b) { return worth(a) < worth(b); });
    return (*best)->fingerprint().hash;
  }
  ASSIGN_OR_RETURN(const NewWeightSet wanted, WantSet(context, request, *resolved));
  return wanted.fingerprint.hash;
}

bool MayProveToBe(const ServiceContext& context, const v1::RegisterRequest& request, const WeightSetEntry& set) {
  absl::StatusOr<v1::WeightSpec> spec = CompleteSpec(request.spec());
  absl::StatusOr<std::string> folder = context.resolver->Resolve(request.spec().model());
  if (!folder.ok()) folder = context.resolver->ResolveGone(request.spec().model());
  if (!spec.ok() || !folder.ok()) return false;
  spec->set_model(*folder);
  return spec->SerializeAsString() == set.spec().SerializeAsString() &&
         request.environment().SerializeAsString() == set.environment().SerializeAsString();
}

}  // namespace weightbroker
