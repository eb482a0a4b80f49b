#include "common/identity/fingerprint.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/json.h"
#include "common/identity/sha256.h"

namespace weightbroker {
namespace {

// Goes up whenever the same files and spec would come out as other components: see docs/fingerprint-format.md.
constexpr char kFingerprintVersion[] = "1";
// Goes up whenever the same spec and files would come out as other bytes in memory: names, fusion, order, alignment,
// what a built-in architecture file says.
constexpr char kLayoutRevision[] = "1";

constexpr char kDevicePrefix[] = "device.";

constexpr size_t kMaxEnvironmentBytes = 128;

void AddFile(const FileIdentity& file, std::map<std::string, std::string>& components) {
  if (file.header_sha256.empty()) {  // JSON: small enough to be known whole
    components[absl::StrCat("checkpoint.", file.name, ".sha256")] = file.contents_sha256;
    return;
  }
  const std::string prefix = absl::StrCat("checkpoint.files.", file.name, ".");
  components[prefix + "header_sha256"] = file.header_sha256;
  components[prefix + "size_bytes"] = absl::StrCat(file.stat.size_bytes);
  if (!file.contents_sha256.empty()) {
    components[prefix + "contents_sha256"] = file.contents_sha256;
    return;
  }
  components[prefix + "device"] = absl::StrCat(file.stat.device);
  components[prefix + "inode"] = absl::StrCat(file.stat.inode);
  components[prefix + "mtime_ns"] = absl::StrCat(file.stat.mtime_ns);
  components[prefix + "ctime_ns"] = absl::StrCat(file.stat.ctime_ns);
}

// What was added to the spec later is left out at its default, so that what was resident before is still the same.
void AddUnlessDefault(const std::string& field, const std::string& value, const std::string& default_value,
                      std::map<std::string, std::string>& components) {
  if (!value.empty() && value != default_value) components[field] = value;
}

void AddSplit(const v1::WeightSpec& spec, std::map<std::string, std::string>& components) {
  const auto add_size = [&](const std::string& field, int32_t size) {
    AddUnlessDefault(field, absl::StrCat(std::max(size, 1)), "1", components);
  };
  add_size("spec.pipeline_parallel_size", spec.pipeline_parallel_size());
  add_size("spec.expert_parallel_size", spec.expert_parallel_size());
  add_size("spec.data_parallel_size", spec.data_parallel_size());
  AddUnlessDefault("spec.mtp_layers", spec.mtp_layers(), "keep", components);
  AddUnlessDefault("spec.unquantized_modules", absl::StrJoin(spec.unquantized_modules(), ","), "", components);
}

bool IsPrintableAscii(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

std::string ValueOf(const Fingerprint& fingerprint, const std::string& field) {
  const auto found = fingerprint.components.find(field);
  return found == fingerprint.components.end() ? "" : found->second;
}

}  // namespace

DeviceFacts HostDeviceFacts() {
  return {{"device.kind", "host"}, {"device.compute_capability", "none"}, {"device.driver_version", "none"}};
}

DeviceFacts GpuDeviceFacts(const std::string& compute_capability, const std::string& driver_version) {
  return {{"device.kind", "cuda"},
          {"device.compute_capability", compute_capability},
          {"device.driver_version", driver_version}};
}

DeviceFacts DeviceFactsOf(const Fingerprint& fingerprint) {
  DeviceFacts facts;
  for (const auto& [field, value] : fingerprint.components) {
    if (field.rfind(kDevicePrefix, 0) == 0) facts[field] = value;
  }
  return facts;
}

std::string HashComponents(const std::map<std::string, std::string>& components) {
  const auto text = CanonicalJson(nlohmann::json(components));
  if (!text.ok()) {
    // Names come from checked JSON and the rest is ASCII, so this is a fault in the program; a made-up hash would be
    // worse.
    std::fprintf(stderr, "a fingerprint component has no canonical text: %s\n", text.status().ToString().c_str());
    std::abort();
  }
  return Sha256Hex(*text);
}

Fingerprint ComputeFingerprint(const v1::WeightSpec& spec, const v1::Environment& environment,
                               const CheckpointIdentity& identity, const DeviceFacts& device_facts,
                               const std::string& architectures) {
  Fingerprint fingerprint;
  auto& components = fingerprint.components;
  components = device_facts;
  components["fingerprint.version"] = std::string(kFingerprintVersion);
  components["layout.revision"] = std::string(kLayoutRevision);
  components["spec.tensor_parallel_size"] = absl::StrCat(spec.tensor_parallel_size());
  components["spec.quantization"] = spec.quantization();
  components["spec.dtype"] = spec.dtype();
  components["spec.layout"] = spec.layout();
  if (!spec.engine().empty()) {
    components["spec.engine"] = spec.engine();
    components["spec.engine_version"] = spec.engine_version();
  }
  AddSplit(spec, components);
  AddUnlessDefault("layout.architectures_sha256", architectures, "", components);
  components["environment.torch_version"] = environment.torch_version();
  for (const FileIdentity& file : identity.files) AddFile(file, components);
  fingerprint.hash = HashComponents(components);
  return fingerprint;
}

std::string HashArchitectures(const std::map<std::string, std::string>& texts) {
  return texts.empty() ? "" : HashComponents(texts);
}

absl::Status CheckEnvironment(const v1::Environment& environment) {
  const std::string& torch_version = environment.torch_version();
  if (torch_version.empty()) {
    return MakeError(
        Reason::kEnvironmentRequired,
        "environment.torch_version is required: give the engine's torch version, or the word \"any\" if its "
        "weights do not depend on it",
        {{"field", "environment.torch_version"}});
  }
  if (torch_version.size() > kMaxEnvironmentBytes || !IsPrintableAscii(torch_version)) {
    return MakeError(Reason::kInvalidArgument,
                     absl::StrCat("environment.torch_version must be at most ", kMaxEnvironmentBytes,
                                  " bytes of printable ASCII; it has ", torch_version.size(), " bytes"),
                     {{"field", "environment.torch_version"},
                      {"found_bytes", absl::StrCat(torch_version.size())},
                      {"limit_bytes", absl::StrCat(kMaxEnvironmentBytes)}});
  }
  return absl::OkStatus();
}

std::vector<v1::FingerprintDifference> DiffFingerprints(const Fingerprint& requested, const Fingerprint& resident) {
  std::set<std::string> fields;
  for (const auto& [field, value] : requested.components) fields.insert(field);
  for (const auto& [field, value] : resident.components) fields.insert(field);
  std::vector<v1::FingerprintDifference> differences;
  for (const std::string& field : fields) {
    const std::string wanted = ValueOf(requested, field);
    const std::string found = ValueOf(resident, field);
    if (wanted == found) continue;
    v1::FingerprintDifference& difference = differences.emplace_back();
    difference.set_field(field);
    difference.set_requested(wanted);
    difference.set_resident(found);
  }
  return differences;
}

}  // namespace weightbroker
