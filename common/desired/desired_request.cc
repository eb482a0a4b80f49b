#include "common/desired/desired_request.h"

#include <algorithm>
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
  return request;
}

// Whether its shards lie on the host or on GPUs, as far as the file says so. The same spec there is two weight sets:
// what a device is belongs to the fingerprint.
std::string KindOfDevices(const v1::RegisterRequest& request) {
  size_t on_host = 0;
  size_t count = 0;
  if (!request.devices().empty()) {
    count = static_cast<size_t>(request.devices_size());
    on_host = static_cast<size_t>(std::count(request.devices().begin(), request.devices().end(), "host"));
  } else {
    const auto& kinds = request.handle_kinds();
    count = static_cast<size_t>(kinds.size());
    on_host = static_cast<size_t>(std::count(kinds.begin(), kinds.end(), v1::HANDLE_KIND_HOST_MEMFD));
  }
  if (count == 0) return "any";
  return on_host == count ? "host" : on_host == 0 ? "GPU" : "both";
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

absl::Status SameWeights(const std::vector<DesiredSet>& sets, size_t first, size_t second, const std::string& file) {
  return DesiredStateError(
      file, absl::StrCat("/sets/", second),
      absl::StrCat(Quote(sets[second].name), " is the same weights as ", Quote(sets[first].name), " at /sets/", first,
                   ", whatever their ranks, devices and handle kinds: a service holds a weight set once, so name all "
                   "of its ranks in one set"),
      sets[second].name, "each set once");
}

}  // namespace

absl::StatusOr<std::vector<v1::RegisterRequest>> ToRegisterRequests(const DesiredState& desired,
                                                                    const std::string& file) {
  std::vector<v1::RegisterRequest> requests;
  std::map<std::string, size_t> known;  // what is loaded, and on which kind of devices, to the index of the set
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
    v1::RegisterRequest loaded;
    *loaded.mutable_spec() = *complete;
    *loaded.mutable_environment() = request.environment();
    const std::string identity = absl::StrCat(KindOfDevices(request), " ", loaded.SerializeAsString());
    if (const auto [other, is_new] = known.emplace(identity, requests.size()); !is_new) {
      return SameWeights(desired.sets, other->second, requests.size(), file);
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace weightbroker
