#include "common/identity/fingerprint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "common/identity/sha256.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

v1::WeightSpec CompleteSpecFor(const std::string& model) {
  v1::WeightSpec spec;
  spec.set_model(model);
  spec.set_tensor_parallel_size(1);
  spec.set_quantization("auto");
  spec.set_dtype("BF16");
  spec.set_layout("hf");
  return spec;
}

v1::Environment EnvironmentWith(const std::string& torch_version) {
  v1::Environment environment;
  environment.set_torch_version(torch_version);
  return environment;
}

Fingerprint FingerprintOf(const std::string& folder) {
  const auto identity = ReadCheckpointIdentity(RealFileSystem(), folder);
  EXPECT_THAT(identity, IsOk());
  return ComputeFingerprint(CompleteSpecFor(folder), EnvironmentWith("2.4.0"), *identity, HostDeviceFacts());
}

// The identity of the example in docs/fingerprint-format.md: one shard of a hub cache, one of a plain folder.
CheckpointIdentity ExampleIdentity() {
  CheckpointIdentity identity{.folder = "/models/example", .files = {}};
  identity.files.push_back({"config.json", {}, std::string(64, '1'), ""});
  FileStat stat;
  stat.size_bytes = 4976698672;
  identity.files.push_back({"model-00001-of-00002.safetensors", stat, std::string(64, '2'), std::string(64, '3')});
  stat.size_bytes = 1168138808;
  stat.device = 65024;
  stat.inode = 1315;
  stat.mtime_ns = 1735689600123456789;
  stat.ctime_ns = 1735689601987654321;
  identity.files.push_back({"model-00002-of-00002.safetensors", stat, "", std::string(64, '4')});
  identity.files.push_back({"model.safetensors.index.json", {}, std::string(64, '5'), ""});
  return identity;
}

// The text between a line "```<language>" after `heading` and the next "```".
std::string CodeBlockAfter(const std::string& page, const std::string& heading, const std::string& language) {
  const std::string opening = "```" + language + "\n";
  const size_t begin = page.find(opening, page.find(heading)) + opening.size();
  return page.substr(begin, page.find("\n```", begin) - begin);
}

TEST(Fingerprint, IsWhatTheFormatPagesWorkedExampleSays) {
  const std::string page = ReadFile(std::string(WEIGHTBROKER_TEST_DATA) + "/../../docs/fingerprint-format.md");
  const std::string components = CodeBlockAfter(page, "## A worked example", "json");
  const std::string canonical = CodeBlockAfter(page, "Without white space", "text");
  const std::string hash = CodeBlockAfter(page, "its SHA-256", "text");

  const Fingerprint fingerprint = ComputeFingerprint(CompleteSpecFor("/models/example"), EnvironmentWith("2.4.0+cu124"),
                                                     ExampleIdentity(), HostDeviceFacts());

  EXPECT_EQ(nlohmann::json(fingerprint.components).dump(2), components);
  EXPECT_EQ(nlohmann::json(fingerprint.components).dump(), canonical);
  EXPECT_EQ(Sha256Hex(canonical), hash);
  EXPECT_EQ(fingerprint.hash, hash);
}

TEST(Fingerprint, IsTheSameThroughASymbolicLinkToTheFolder) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "model");
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder / "model");
  std::filesystem::create_directory_symlink("model", folder / "link");

  EXPECT_EQ(FingerprintOf(folder / "model").hash, FingerprintOf(folder / "link").hash);
}

TEST(Fingerprint, IsTheSameThroughSymbolicLinksToTheFiles) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "model");
  std::filesystem::create_directory(folder / "links");
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder / "model");
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::create_symlink(folder / "model" + "/" + name, folder / "links" + "/" + name);
  }

  EXPECT_EQ(FingerprintOf(folder / "model").hash, FingerprintOf(folder / "links").hash);
}

TEST(Fingerprint, IsTheSameForCopiesOfTheSameBlobsInTwoHubCaches) {
  const TemporaryFolder folder;
  const std::string sha(64, 'b');
  for (const std::string cache : {"one", "two"}) {
    std::filesystem::create_directories(folder / cache + "/blobs");
    std::filesystem::create_directories(folder / cache + "/snapshots/main");
    WriteFile(folder / cache + "/blobs/" + sha, CheckpointBuilder().Tensor("a", "BF16", {16}).FileBytes());
    WriteFile(folder / cache + "/snapshots/main/config.json", testing::kPlainConfig);
    std::filesystem::create_symlink("../../blobs/" + sha, folder / cache + "/snapshots/main/model.safetensors");
  }

  EXPECT_EQ(FingerprintOf(folder / "one/snapshots/main").hash, FingerprintOf(folder / "two/snapshots/main").hash);
}

TEST(Fingerprint, IsTheSameForAHubCacheAndAPlainFolderThatLeadToTheSameBlobs) {
  const TemporaryFolder folder;
  const std::string blob = folder / "cache/blobs/" + std::string(64, 'c');
  std::filesystem::create_directories(folder / "cache/blobs");
  std::filesystem::create_directories(folder / "cache/snapshots/main");
  std::filesystem::create_directories(folder / "plain");
  WriteFile(blob, CheckpointBuilder().Tensor("a", "BF16", {16}).FileBytes());
  for (const std::string place : {"cache/snapshots/main", "plain"}) {
    WriteFile(folder / place + "/config.json", testing::kPlainConfig);
    std::filesystem::create_symlink(blob, folder / place + "/model.safetensors");
  }

  EXPECT_EQ(FingerprintOf(folder / "cache/snapshots/main").hash, FingerprintOf(folder / "plain").hash);
}

TEST(Fingerprint, ChangesWithTheWeightsEvenIfTheHeaderStays) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  const Fingerprint before = FingerprintOf(folder.path());
  std::string bytes = ReadFile(folder / "model.safetensors");
  bytes.back() ^= 1;
  WriteFile(folder / "model.safetensors", bytes);

  EXPECT_NE(FingerprintOf(folder.path()).hash, before.hash);
}

TEST(Fingerprint, ChangesWithTheConfigAndSaysSo) {
  const TemporaryFolder folder;
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder.path());
  const Fingerprint before = FingerprintOf(folder.path());
  WriteFile(folder / "config.json", R"({"rope_theta": 1})");
  const Fingerprint after = FingerprintOf(folder.path());

  const auto differences = DiffFingerprints(after, before);

  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0].field(), "checkpoint.config.json.sha256");
  EXPECT_EQ(differences[0].requested(), Sha256Hex(R"({"rope_theta": 1})"));
  EXPECT_EQ(differences[0].resident(), Sha256Hex(testing::kPlainConfig));
}

TEST(Fingerprint, ChangesWithEachFieldOfSpecEnvironmentAndDevice) {
  const CheckpointIdentity identity = ExampleIdentity();
  const auto field_changed = [&](const v1::WeightSpec& spec, const v1::Environment& environment,
                                 const DeviceFacts& facts) {
    const Fingerprint plain =
        ComputeFingerprint(CompleteSpecFor("/m"), EnvironmentWith("2.4.0"), identity, HostDeviceFacts());
    const Fingerprint changed = ComputeFingerprint(spec, environment, identity, facts);
    EXPECT_NE(changed.hash, plain.hash);
    const auto differences = DiffFingerprints(changed, plain);
    return differences.size() == 1 ? differences[0].field() : "";
  };
  const v1::Environment environment = EnvironmentWith("2.4.0");
  v1::WeightSpec spec = CompleteSpecFor("/m");
  spec.set_dtype("F16");
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.dtype");
  spec = CompleteSpecFor("/m");
  spec.set_quantization("none");
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.quantization");
  spec = CompleteSpecFor("/m");
  spec.set_layout("fused");
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.layout");
  spec = CompleteSpecFor("/m");
  spec.set_tensor_parallel_size(2);
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.tensor_parallel_size");
  spec = CompleteSpecFor("/m");
  spec.set_pipeline_parallel_size(2);
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.pipeline_parallel_size");
  spec = CompleteSpecFor("/m");
  spec.set_expert_parallel_size(2);
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.expert_parallel_size");
  spec = CompleteSpecFor("/m");
  spec.set_data_parallel_size(2);
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.data_parallel_size");
  spec = CompleteSpecFor("/m");
  spec.set_mtp_layers("drop");
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.mtp_layers");
  spec = CompleteSpecFor("/m");
  spec.add_unquantized_modules("lm_head");
  EXPECT_EQ(field_changed(spec, environment, HostDeviceFacts()), "spec.unquantized_modules");
  spec = CompleteSpecFor("/m");
  EXPECT_EQ(field_changed(spec, EnvironmentWith("any"), HostDeviceFacts()), "environment.torch_version");
  DeviceFacts facts = HostDeviceFacts();
  facts["device.compute_capability"] = "9.0";
  EXPECT_EQ(field_changed(spec, environment, facts), "device.compute_capability");
}

TEST(Fingerprint, DependsOnTheArchitectureFilesThatWereAdded) {
  const auto with = [](const std::map<std::string, std::string>& files) {
    return ComputeFingerprint(CompleteSpecFor("/m"), EnvironmentWith("any"), ExampleIdentity(), HostDeviceFacts(),
                              HashArchitectures(files));
  };
  EXPECT_EQ(with({}).components.count("layout.architectures_sha256"), 0u);
  const auto differences = DiffFingerprints(with({{"a.json", "{}"}}), with({{"a.json", "{} "}}));
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0].field(), "layout.architectures_sha256");
}

TEST(Fingerprint, IsTheSameWhetherWhatWasAddedLaterIsAtItsDefaultOrAbsent) {
  v1::WeightSpec spec = CompleteSpecFor("/m");
  const std::string before =
      ComputeFingerprint(spec, EnvironmentWith("any"), ExampleIdentity(), HostDeviceFacts()).hash;
  spec.set_pipeline_parallel_size(1);
  spec.set_expert_parallel_size(1);
  spec.set_data_parallel_size(1);
  spec.set_mtp_layers("keep");
  EXPECT_EQ(ComputeFingerprint(spec, EnvironmentWith("any"), ExampleIdentity(), HostDeviceFacts()).hash, before);
}

TEST(Fingerprint, DoesNotDependOnThePath) {
  CheckpointIdentity elsewhere = ExampleIdentity();
  elsewhere.folder = "/elsewhere";
  EXPECT_EQ(
      ComputeFingerprint(CompleteSpecFor("/a"), EnvironmentWith("any"), ExampleIdentity(), HostDeviceFacts()).hash,
      ComputeFingerprint(CompleteSpecFor("/b"), EnvironmentWith("any"), elsewhere, HostDeviceFacts()).hash);
}

TEST(Fingerprint, DiffListsPartsThatOnlyOneSideHasSortedByField) {
  const Fingerprint requested{.hash = "1", .components = {{"a", "1"}, {"c", "same"}, {"d", "x"}}};
  const Fingerprint resident{.hash = "2", .components = {{"b", "2"}, {"c", "same"}, {"d", "y"}}};

  const auto differences = DiffFingerprints(requested, resident);

  ASSERT_EQ(differences.size(), 3u);
  EXPECT_EQ(differences[0].field() + differences[0].requested() + differences[0].resident(), "a1");
  EXPECT_EQ(differences[1].field() + differences[1].requested() + differences[1].resident(), "b2");
  EXPECT_EQ(differences[2].field() + differences[2].requested() + differences[2].resident(), "dxy");
  EXPECT_THAT(DiffFingerprints(requested, requested), IsEmpty());
}

TEST(Environment, MustNameTheTorchVersion) {
  EXPECT_THAT(CheckEnvironment({}), StatusIs(Reason::kEnvironmentRequired, HasSubstr("\"any\"")));
  EXPECT_THAT(CheckEnvironment(EnvironmentWith("any")), IsOk());
  EXPECT_THAT(CheckEnvironment(EnvironmentWith("2.4.0+cu124")), IsOk());
}

TEST(Environment, IsRefusedIfOverlongOrNotPrintable) {
  EXPECT_THAT(CheckEnvironment(EnvironmentWith(std::string(128, 'x'))), IsOk());
  EXPECT_THAT(CheckEnvironment(EnvironmentWith(std::string(129, 'x'))), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(CheckEnvironment(EnvironmentWith("2.4\n")), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(CheckEnvironment(EnvironmentWith("\xff")), StatusIs(Reason::kInvalidArgument));
}

}  // namespace
}  // namespace weightbroker
