#include "common/desired/desired_request.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
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

// Whether its shards lie on the host or on GPUs, as far as the file says so.
enum class DeviceKind { kHost, kGpu, kOpen };

DeviceKind KindOfDevices(const v1::RegisterRequest& request) {
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
  if (count == 0) return DeviceKind::kOpen;
  return on_host == count ? DeviceKind::kHost : on_host == 0 ? DeviceKind::kGpu : DeviceKind::kOpen;
}

// The same spec is two weight sets on the host and on GPUs: what a device is belongs to the fingerprint. What is left
// open may come to be either.
bool MayBeTheSame(DeviceKind first, DeviceKind second) {
  return first == second || first == DeviceKind::kOpen || second == DeviceKind::kOpen;
}

// One way to write each model. ".." stays: after a symbolic link it leads elsewhere than it seems to.
std::string NormalModel(const std::string& model) {
  const bool is_path = model[0] == '/';
  const size_t path = is_path ? 0 : model.find(':') + 1;
  const std::vector<std::string> parts =
      absl::StrSplit(model.substr(path), '/', [](absl::string_view part) { return !part.empty() && part != "."; });
  return absl::StrCat(model.substr(0, path), is_path ? "/" : "", absl::StrJoin(parts, "/"));
}

// What is loaded, wherever that is.
std::string Weights(v1::WeightSpec complete, const v1::Environment& environment) {
  complete.set_model(NormalModel(complete.model()));
  v1::RegisterRequest loaded;
  *loaded.mutable_spec() = std::move(complete);
  *loaded.mutable_environment() = environment;
  return loaded.SerializeAsString();
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
                   ", or may be, whatever their ranks, devices and handle kinds: a service holds a weight set once, so "
                   "name all of its ranks in one set, or have one say that it is on the host and the other that it is "
                   "on GPUs"),
      sets[second].name, "each set once");
}

}  // namespace

absl::StatusOr<std::vector<v1::RegisterRequest>> ToRegisterRequests(const DesiredState& desired,
                                                                    const std::string& file) {
  std::vector<v1::RegisterRequest> requests;
  struct Known {
    DeviceKind kind;
    size_t index;
  };
  std::multimap<std::string, Known> known;  // by the weights
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
    const std::string weights = Weights(*complete, request.environment());
    const DeviceKind kind = KindOfDevices(request);
    const auto [begin, end] = known.equal_range(weights);
    const auto same =
        std::find_if(begin, end, [&](const auto& other) { return MayBeTheSame(other.second.kind, kind); });
    if (same != end) return SameWeights(desired.sets, same->second.index, requests.size(), file);
    known.insert({weights, {kind, requests.size()}});
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace weightbroker
