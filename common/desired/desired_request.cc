#include "common/desired/desired_request.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/identity/fingerprint.h"
#include "common/plan/plan.h"

namespace weightbroker {
namespace {

v1::RegisterRequest ToRequest(const DesiredSet& set) {
  v1::RegisterRequest request;
  v1::WeightSpec& spec = *request.mutable_spec();
  spec.set_model(set.model);
  spec.set_tensor_parallel_size(set.tensor_parallel_size);
  spec.set_pipeline_parallel_size(set.pipeline_parallel_size);
  spec.set_expert_parallel_size(set.expert_parallel_size);
  spec.set_data_parallel_size(set.data_parallel_size);
  spec.set_quantization(set.quantization);
  *spec.mutable_unquantized_modules() = {set.unquantized_modules.begin(), set.unquantized_modules.end()};
  spec.set_dtype(set.dtype);
  spec.set_layout(set.layout);
  spec.set_mtp_layers(set.mtp_layers);
  request.mutable_environment()->set_torch_version(set.torch_version);
  *request.mutable_devices() = {set.devices.begin(), set.devices.end()};
  *request.mutable_ranks() = {set.ranks.begin(), set.ranks.end()};
  for (const std::string& name : set.handle_kinds) {
    v1::HandleKind kind = v1::HANDLE_KIND_UNSPECIFIED;
    v1::HandleKind_Parse(absl::StrCat("HANDLE_KIND_", name), &kind);  // one of those that the file may name
    request.add_handle_kinds(kind);
  }
  request.set_pinned(true);
  return request;
}

// What is wrong with it whatever the model is; with the spec completed.
absl::StatusOr<v1::WeightSpec> CheckRequest(const v1::RegisterRequest& request) {
  RETURN_IF_ERROR(CheckEnvironment(request.environment()));
  return CompleteSpec(request.spec());
}

absl::Status CheckRanks(const v1::RegisterRequest& request, int32_t world_size, const std::string& file,
                        const std::string& pointer) {
  for (int i = 0; i < request.ranks_size(); ++i) {
    const int32_t rank = request.ranks(i);
    if (rank < world_size) continue;
    return DesiredStateError(file, absl::StrCat(pointer, "/ranks/", i),
                             absl::StrCat("is ", rank, ", and the set's ranks are 0 to ", world_size - 1),
                             absl::StrCat(rank), absl::StrCat("0 to ", world_size - 1));
  }
  const int held = request.ranks().empty() ? world_size : request.ranks_size();
  if (request.devices().empty() || request.devices_size() == held) return absl::OkStatus();
  return DesiredStateError(file, absl::StrCat(pointer, "/devices"),
                           absl::StrCat("names ", request.devices_size(), " devices, and the set has ", held,
                                        " ranks here: name one for each, or none"),
                           absl::StrCat(request.devices_size()), absl::StrCat(held));
}

}  // namespace

absl::StatusOr<std::vector<v1::RegisterRequest>> ToRegisterRequests(const DesiredState& desired,
                                                                    const std::string& file) {
  std::vector<v1::RegisterRequest> requests;
  std::map<std::string, std::string> known;  // requests with completed specs, to the name of the set
  for (const DesiredSet& set : desired.sets) {
    const std::string pointer = absl::StrCat("/sets/", requests.size());
    v1::RegisterRequest request = ToRequest(set);
    const absl::StatusOr<v1::WeightSpec> complete = CheckRequest(request);
    if (!complete.ok()) {
      auto metadata = GetErrorDetails(complete.status()).metadata;
      return DesiredStateError(file, pointer, std::string(complete.status().message()), metadata["found"],
                               metadata["allowed"]);
    }
    RETURN_IF_ERROR(CheckRanks(request, WorldSize(*complete), file, pointer));
    v1::RegisterRequest completed = request;
    *completed.mutable_spec() = *complete;
    const auto [other, is_new] = known.emplace(completed.SerializeAsString(), set.name);
    if (!is_new) {
      return DesiredStateError(file, pointer, absl::StrCat("is the same as the set \"", other->second, "\""), set.name,
                               "each set once");
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace weightbroker
