// The input is two sets of what a fingerprint is over, one after the other; and, read differently, a JSON text.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "common/base/json.h"
#include "common/identity/fingerprint.h"
#include "common/identity/sha256.h"
#include "common/plan/plan.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"

namespace weightbroker {
namespace {

constexpr const char* kQuantizations[] = {"", "auto", "none", "fp8", "fp8_block", "awq"};
constexpr const char* kDtypes[] = {"", "auto", "BF16", "F16", "F32", "F64"};
constexpr const char* kLayouts[] = {"", "hf", "fused", "engine", "torch"};
constexpr const char* kMtpPolicies[] = {"", "keep", "drop", "some"};

template <size_t N>
std::string TakeWord(const char* const (&words)[N], std::string_view& input) {
  return words[TakeInteger<uint8_t>(input) % N];
}

// Strings in a request are UTF-8, or protobuf refuses it.
std::string TakeUtf8(std::string_view& input) {
  const std::string_view text = TakeText(input);
  return std::string(std::all_of(text.begin(), text.end(), [](char c) { return c >= 0; }) ? text : "");
}

struct Inputs {
  v1::WeightSpec spec;
  v1::Environment environment;
  CheckpointIdentity identity;
};

v1::WeightSpec TakeSpec(std::string_view& input) {
  v1::WeightSpec spec;
  spec.set_model("/model");
  spec.set_tensor_parallel_size(TakeInteger<int8_t>(input));
  spec.set_pipeline_parallel_size(TakeInteger<int8_t>(input));
  spec.set_expert_parallel_size(TakeInteger<int8_t>(input));
  spec.set_data_parallel_size(TakeInteger<int8_t>(input));
  spec.set_quantization(TakeWord(kQuantizations, input));
  spec.set_dtype(TakeWord(kDtypes, input));
  spec.set_layout(TakeWord(kLayouts, input));
  spec.set_mtp_layers(TakeWord(kMtpPolicies, input));
  spec.set_engine(TakeUtf8(input));
  spec.set_engine_version(TakeUtf8(input));
  for (int modules = TakeInteger<uint8_t>(input) % 4; modules > 0; --modules) {
    spec.add_unquantized_modules(TakeUtf8(input));
  }
  return spec;
}

FileIdentity TakeFile(std::string_view& input) {
  FileIdentity file;
  file.name = TakeUtf8(input);
  const auto flags = TakeInteger<uint8_t>(input);
  file.stat.size_bytes = TakeInteger<uint16_t>(input);
  file.stat.device = TakeInteger<int8_t>(input);
  file.stat.inode = TakeInteger<int8_t>(input);
  file.stat.mtime_ns = TakeInteger<int64_t>(input);
  file.stat.ctime_ns = TakeInteger<int8_t>(input);
  // A file of JSON is known by its contents; a shard by its header, and by its contents or its stat.
  const std::string hash = Sha256Hex(std::string(1, static_cast<char>(flags / 4)));
  if (flags % 4 != 0) file.header_sha256 = hash;
  if (flags % 4 < 2) file.contents_sha256 = hash;
  return file;
}

Inputs TakeInputs(std::string_view& input) {
  Inputs inputs;
  inputs.spec = TakeSpec(input);
  inputs.environment.set_torch_version(TakeUtf8(input));
  std::map<std::string, FileIdentity> files;  // a folder has no two of one name
  for (int count = TakeInteger<uint8_t>(input) % 4; count > 0; --count) {
    FileIdentity file = TakeFile(input);
    files.emplace(file.name, file);
  }
  for (auto& [name, file] : files) inputs.identity.files.push_back(std::move(file));
  return inputs;
}

// What a fingerprint is over, told in another way: equal if and only if nothing that counts differs.
std::string Everything(const v1::WeightSpec& spec, const Inputs& inputs) {
  std::string text = spec.SerializeAsString() + '\0' + inputs.environment.SerializeAsString();
  for (const FileIdentity& file : inputs.identity.files) {
    text.append(1, '\0').append(file.name).append(1, '\0').append(file.header_sha256).append(1, '\0');
    text.append(file.contents_sha256);
    if (file.header_sha256.empty()) continue;
    text.append(1, '\0').append(std::to_string(file.stat.size_bytes));
    if (!file.contents_sha256.empty()) continue;
    for (const int64_t value : {file.stat.device, file.stat.inode, file.stat.mtime_ns, file.stat.ctime_ns}) {
      text.append(1, '\0').append(std::to_string(value));
    }
  }
  return text;
}

void CheckCanonical(const Fingerprint& fingerprint) {
  const auto text = CanonicalJson(nlohmann::json(fingerprint.components));
  FUZZ_CHECK(text.ok());
  FUZZ_CHECK(Sha256Hex(*text) == fingerprint.hash);
  const auto parsed = ParseStrictJson(*text);
  FUZZ_CHECK(parsed.ok());
  const auto components = parsed->get<std::map<std::string, std::string>>();
  FUZZ_CHECK(components == fingerprint.components);
  FUZZ_CHECK(HashComponents(components) == fingerprint.hash);
}

Fingerprint Compute(const v1::WeightSpec& spec, const Inputs& inputs) {
  const Fingerprint fingerprint = ComputeFingerprint(spec, inputs.environment, inputs.identity, HostDeviceFacts());
  CheckCanonical(fingerprint);
  CheckpointIdentity turned = inputs.identity;
  std::reverse(turned.files.begin(), turned.files.end());
  turned.folder = "/elsewhere";
  FUZZ_CHECK(ComputeFingerprint(spec, inputs.environment, turned, HostDeviceFacts()).hash == fingerprint.hash);
  return fingerprint;
}

void CompareTwo(std::string_view input) {
  const Inputs one = TakeInputs(input);
  const Inputs two = TakeInputs(input);
  const auto one_spec = CompleteSpec(one.spec);
  const auto two_spec = CompleteSpec(two.spec);
  if (!one_spec.ok()) CheckRefusal(one_spec.status());
  if (!one_spec.ok() || !two_spec.ok()) return;
  FUZZ_CHECK(CompleteSpec(*one_spec)->SerializeAsString() == one_spec->SerializeAsString());
  if (!CheckEnvironment(one.environment).ok() || !CheckEnvironment(two.environment).ok()) return;
  const Fingerprint a = Compute(*one_spec, one);
  const Fingerprint b = Compute(*two_spec, two);
  const bool are_same = Everything(*one_spec, one) == Everything(*two_spec, two);
  FUZZ_CHECK((a.hash == b.hash) == are_same);
  const auto differences = DiffFingerprints(a, b);
  FUZZ_CHECK(differences.empty() == are_same);
  for (const v1::FingerprintDifference& difference : differences) {
    FUZZ_CHECK(difference.requested() != difference.resident());
  }
}

// The canonical text of a value is one of its texts, and the same for all of them.
void Canonicalize(std::string_view text) {
  const auto value = ParseStrictJson(text);
  if (!value.ok()) return;
  const auto canonical = CanonicalJson(*value);
  if (!canonical.ok()) return;  // a floating-point value is in it
  const auto again = ParseStrictJson(*canonical);
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(*again == *value);
  FUZZ_CHECK(*CanonicalJson(*again) == *canonical);
  const auto spread_out = ParseStrictJson(value->dump(2, '\t', /*ensure_ascii=*/true));
  FUZZ_CHECK(spread_out.ok());
  FUZZ_CHECK(*CanonicalJson(*spread_out) == *canonical);
}

}  // namespace
}  // namespace weightbroker

FUZZ_TARGET(fingerprint) {
  using namespace weightbroker;
  CompareTwo(input);
  Canonicalize(input);
}
