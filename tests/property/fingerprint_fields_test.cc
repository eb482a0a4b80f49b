// Every field of everything that a fingerprint is over, one by one. The tables are compared with the messages'
// descriptors, so that a field that is added without a row here fails.
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/identity/fingerprint.h"
#include "common/plan/plan.h"
#include "tests/support/status_matchers.h"
#include "weightbroker/internal/v1/kept.pb.h"

namespace weightbroker {
namespace {

using ::weightbroker::testing::IsOk;

constexpr char kShard[] = "model.safetensors";

struct Inputs {
  v1::WeightSpec spec;
  v1::Environment environment;
  CheckpointIdentity identity;
  DeviceFacts facts = HostDeviceFacts();
  std::map<std::string, std::string> architectures;
};

// One field, and what becomes of it.
struct FieldCase {
  std::string field;  // of the message
  std::function<void(Inputs&)> change;
  std::string component;  // the only one that differs then; empty for a field that must make no difference
};

Inputs BaseInputs() {
  Inputs inputs;
  inputs.spec.set_model("/models/m");
  inputs.spec.set_quantization("fp8_block");
  inputs.environment.set_torch_version("2.11.0");
  inputs.identity.folder = "/models/m";
  inputs.identity.files.push_back({"config.json", {}, std::string(64, '1'), ""});
  FileStat stat;
  stat.device = 1;
  stat.inode = 2;
  stat.size_bytes = 3;
  stat.mtime_ns = 4;
  stat.ctime_ns = 5;
  inputs.identity.files.push_back({kShard, stat, "", std::string(64, '2')});
  return inputs;
}

// The same of weights that an engine has published.
Inputs EngineInputs() {
  Inputs inputs = BaseInputs();
  inputs.spec.set_layout("engine");
  inputs.spec.set_engine("vllm");
  inputs.spec.set_engine_version("0.9.1");
  return inputs;
}

Fingerprint Compute(const Inputs& inputs) {
  const auto spec = CompleteSpec(inputs.spec);
  EXPECT_THAT(spec, IsOk());
  EXPECT_THAT(CheckEnvironment(inputs.environment), IsOk());
  return ComputeFingerprint(*spec, inputs.environment, inputs.identity, inputs.facts,
                            HashArchitectures(inputs.architectures));
}

const std::vector<FieldCase>& SpecCases() {
  static const auto* const cases = new std::vector<FieldCase>{
      // The same files are the same weights, whatever leads to them.
      {"model", [](Inputs& inputs) { inputs.spec.set_model("/elsewhere"); }, ""},
      {"tensor_parallel_size", [](Inputs& inputs) { inputs.spec.set_tensor_parallel_size(2); },
       "spec.tensor_parallel_size"},
      {"quantization", [](Inputs& inputs) { inputs.spec.set_quantization("none"); }, "spec.quantization"},
      {"dtype", [](Inputs& inputs) { inputs.spec.set_dtype("F16"); }, "spec.dtype"},
      {"layout", [](Inputs& inputs) { inputs.spec.set_layout("fused"); }, "spec.layout"},
      {"pipeline_parallel_size", [](Inputs& inputs) { inputs.spec.set_pipeline_parallel_size(2); },
       "spec.pipeline_parallel_size"},
      {"expert_parallel_size",
       [](Inputs& inputs) {
         inputs.spec.set_data_parallel_size(4);
         inputs.spec.set_expert_parallel_size(2);
       },
       "spec.expert_parallel_size"},
      {"data_parallel_size", [](Inputs& inputs) { inputs.spec.set_data_parallel_size(4); }, "spec.data_parallel_size"},
      {"mtp_layers", [](Inputs& inputs) { inputs.spec.set_mtp_layers("drop"); }, "spec.mtp_layers"},
      {"unquantized_modules", [](Inputs& inputs) { inputs.spec.add_unquantized_modules("lm_head"); },
       "spec.unquantized_modules"},
      {"engine", [](Inputs& inputs) { inputs.spec.set_engine("sglang"); }, "spec.engine"},
      {"engine_version", [](Inputs& inputs) { inputs.spec.set_engine_version("0.9.2"); }, "spec.engine_version"},
  };
  return *cases;
}

const std::vector<FieldCase>& EnvironmentCases() {
  static const auto* const cases = new std::vector<FieldCase>{
      {"torch_version", [](Inputs& inputs) { inputs.environment.set_torch_version("any"); },
       "environment.torch_version"},
  };
  return *cases;
}

std::string OfShard(const std::string& part) { return std::string("checkpoint.files.") + kShard + "." + part; }

// What is known of a file: name and stat, then hashes.
const std::vector<FieldCase>& StatCases() {
  static const auto* const cases = new std::vector<FieldCase>{
      {"device", [](Inputs& inputs) { inputs.identity.files[1].stat.device = 9; }, OfShard("device")},
      {"inode", [](Inputs& inputs) { inputs.identity.files[1].stat.inode = 9; }, OfShard("inode")},
      {"size_bytes", [](Inputs& inputs) { inputs.identity.files[1].stat.size_bytes = 9; }, OfShard("size_bytes")},
      {"mtime_ns", [](Inputs& inputs) { inputs.identity.files[1].stat.mtime_ns = 9; }, OfShard("mtime_ns")},
      {"ctime_ns", [](Inputs& inputs) { inputs.identity.files[1].stat.ctime_ns = 9; }, OfShard("ctime_ns")},
  };
  return *cases;
}

const std::vector<FieldCase>& HashCases() {
  static const auto* const cases = new std::vector<FieldCase>{
      {"contents_sha256", [](Inputs& inputs) { inputs.identity.files[0].contents_sha256 = std::string(64, '9'); },
       "checkpoint.config.json.sha256"},
      {"header_sha256", [](Inputs& inputs) { inputs.identity.files[1].header_sha256 = std::string(64, '9'); },
       OfShard("header_sha256")},
  };
  return *cases;
}

std::vector<FieldCase> OtherCases() {
  std::vector<FieldCase> cases = {
      {"architectures", [](Inputs& inputs) { inputs.architectures["a.json"] = "{}"; }, "layout.architectures_sha256"}};
  for (const auto& [fact, value] : HostDeviceFacts()) {
    cases.push_back({fact, [fact = fact](Inputs& inputs) { inputs.facts[fact] = "9.0"; }, fact});
  }
  return cases;
}

bool IsOfEngines(const FieldCase& field) { return field.field == "engine" || field.field == "engine_version"; }

// Where a change needs another one to be allowed, that is part of what it is compared with.
Inputs BaseFor(const FieldCase& field) {
  Inputs base = IsOfEngines(field) ? EngineInputs() : BaseInputs();
  if (field.field == "expert_parallel_size") base.spec.set_data_parallel_size(4);
  return base;
}

std::vector<FieldCase> AllCases() {
  std::vector<FieldCase> all = OtherCases();
  for (const auto* cases : {&SpecCases(), &EnvironmentCases(), &StatCases(), &HashCases()}) {
    all.insert(all.end(), cases->begin(), cases->end());
  }
  return all;
}

std::set<std::string> FieldsOf(const google::protobuf::Descriptor& message, const std::set<std::string>& except = {}) {
  std::set<std::string> fields;
  for (int i = 0; i < message.field_count(); ++i) {
    if (except.count(message.field(i)->name()) == 0) fields.insert(message.field(i)->name());
  }
  return fields;
}

std::set<std::string> FieldsOf(const std::vector<FieldCase>& cases) {
  std::set<std::string> fields;
  for (const FieldCase& field : cases) fields.insert(field.field);
  return fields;
}

TEST(FingerprintFields, HasACaseForEveryFieldThatThereIs) {
  EXPECT_EQ(FieldsOf(SpecCases()), FieldsOf(*v1::WeightSpec::descriptor()));
  EXPECT_EQ(FieldsOf(EnvironmentCases()), FieldsOf(*v1::Environment::descriptor()));
  // The name is part of the component's own: see the last test.
  EXPECT_EQ(FieldsOf(StatCases()), FieldsOf(*internal::v1::FileIdentity::descriptor(), {"name"}));
  EXPECT_EQ(FieldsOf(HashCases()), FieldsOf(*internal::v1::KeptFile::descriptor(), {"identity"}));
}

TEST(FingerprintFields, DifferWithEachFieldWhichIsTheOneThatIsNamed) {
  int covered = 0;
  for (const FieldCase& field : AllCases()) {
    SCOPED_TRACE(field.field);
    Inputs inputs = BaseFor(field);
    const Fingerprint before = Compute(inputs);
    field.change(inputs);
    const Fingerprint after = Compute(inputs);
    ++covered;
    const auto differences = DiffFingerprints(after, before);
    if (field.component.empty()) {
      EXPECT_EQ(after.hash, before.hash);
      EXPECT_TRUE(differences.empty());
      continue;
    }
    EXPECT_NE(after.hash, before.hash);
    ASSERT_EQ(differences.size(), 1u);
    EXPECT_EQ(differences[0].field(), field.component);
    EXPECT_NE(differences[0].requested(), differences[0].resident());
  }
  std::printf("fields covered: %d (spec %zu, environment %zu, stat %zu, hashes %zu, device and layout %zu)\n", covered,
              SpecCases().size(), EnvironmentCases().size(), StatCases().size(), HashCases().size(),
              OtherCases().size());
}

TEST(FingerprintFields, GiveNoTwoChangesTheSameFingerprint) {
  std::map<std::string, std::string> seen;  // hash -> field
  for (const FieldCase& field : AllCases()) {
    if (field.component.empty()) continue;
    Inputs inputs = BaseFor(field);
    field.change(inputs);
    const auto [before, is_new] = seen.emplace(Compute(inputs).hash, field.field);
    EXPECT_TRUE(is_new) << field.field << " and " << before->second;
  }
}

TEST(FingerprintFields, AreAllNamedWhereSeveralDiffer) {
  Inputs inputs = BaseInputs();
  const Fingerprint before = Compute(inputs);
  std::set<std::string> expected;
  for (const FieldCase& field : AllCases()) {
    if (field.component.empty() || IsOfEngines(field)) continue;
    field.change(inputs);
    expected.insert(field.component);
  }
  expected.erase("spec.unquantized_modules");  // not allowed together with another quantization
  inputs.spec.clear_unquantized_modules();
  expected.insert("spec.data_parallel_size");
  std::set<std::string> named;
  for (const auto& difference : DiffFingerprints(Compute(inputs), before)) named.insert(difference.field());
  EXPECT_EQ(named, expected);
}

TEST(FingerprintFields, CountWhereAFileIsKnownByItsContentsWithoutItsStat) {
  Inputs inputs = BaseInputs();
  inputs.identity.files[1].contents_sha256 = std::string(64, '7');
  const std::string before = Compute(inputs).hash;
  for (const FieldCase& field : StatCases()) {
    Inputs changed = inputs;
    field.change(changed);
    EXPECT_EQ(Compute(changed).hash == before, field.field != "size_bytes") << field.field;
  }
}

TEST(FingerprintFields, IncludeTheNameOfEachFile) {
  Inputs inputs = BaseInputs();
  const Fingerprint before = Compute(inputs);
  inputs.identity.files[1].name = "other.safetensors";
  std::set<std::string> named;
  for (const auto& difference : DiffFingerprints(Compute(inputs), before)) named.insert(difference.field());
  EXPECT_EQ(named.size(), 12u) << "six parts of the one and six of the other";
  EXPECT_EQ(named.count("checkpoint.files.other.safetensors.inode"), 1u);
}

// What arrives as JSON, as from a tool, in whatever order and however it is spread out.
TEST(FingerprintFields, AreTheSameInAnyOrderOfKeysAndWithAnyWhiteSpace) {
  std::set<std::string> hashes;
  for (
      const std::string text :
      {R"({"model":"/models/m","tensorParallelSize":2,"quantization":"fp8_block","dtype":"BF16"})",
       "{\n  \"dtype\" : \"BF16\",\n\t\"quantization\":\"fp8_block\" ,\r\n \"tensorParallelSize\": 2, \"model\": "
       "\"\\/models\\/m\"\n}\n",
       R"({"quantization":"fp8_block","tensor_parallel_size":"2","layout":"","dtype":"B\u004616","model":"/models/m"})"}) {
    Inputs inputs = BaseInputs();
    inputs.spec.Clear();
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(text, &inputs.spec).ok()) << text;
    hashes.insert(Compute(inputs).hash);
  }
  EXPECT_EQ(hashes.size(), 1u);
}

TEST(FingerprintFields, AreTheSameInAnyOrderOfModulesFilesAndArchitectures) {
  Inputs inputs = BaseInputs();
  inputs.spec.add_unquantized_modules("lm_head");
  inputs.spec.add_unquantized_modules("mlp.gate");
  const std::string before = Compute(inputs).hash;
  inputs.spec.mutable_unquantized_modules()->SwapElements(0, 1);
  inputs.spec.add_unquantized_modules("lm_head");
  std::swap(inputs.identity.files[0], inputs.identity.files[1]);
  EXPECT_EQ(Compute(inputs).hash, before);
}

}  // namespace
}  // namespace weightbroker
