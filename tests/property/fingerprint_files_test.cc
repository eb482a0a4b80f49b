// The same files by every way that leads to them, and other files by the same way.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <set>
#include <string>

#include "common/identity/fingerprint.h"
#include "common/identity/sha256.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsSubsetOf;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

constexpr char kShard[] = "x.safetensors";
constexpr char kPrefix[] = "checkpoint.files.x.safetensors.";

CheckpointBuilder Model() {
  return CheckpointBuilder().Tensor("a", "BF16", {16}, kShard).Tensor("b", "F32", {4}, "y.safetensors").WithIndex();
}

CheckpointIdentity IdentityOf(const std::string& folder) {
  auto identity = ReadCheckpointIdentity(RealFileSystem(), folder);
  EXPECT_THAT(identity, IsOk());
  return identity.ok() ? *std::move(identity) : CheckpointIdentity();
}

Fingerprint FingerprintOf(const std::string& folder) {
  v1::WeightSpec spec;
  spec.set_model(folder);
  v1::Environment environment;
  environment.set_torch_version("any");
  return ComputeFingerprint(spec, environment, IdentityOf(folder), HostDeviceFacts());
}

std::set<std::string> FieldsThatDiffer(const Fingerprint& a, const Fingerprint& b) {
  std::set<std::string> fields;
  for (const auto& difference : DiffFingerprints(a, b)) fields.insert(difference.field());
  return fields;
}

// models--x--y: blobs named by their SHA-256, and a snapshot of links to them, as the hub's own cache has them.
std::string MakeHubCache(const std::string& root, const std::string& revision) {
  const std::string repository = root + "/models--x--y";
  fs::create_directories(repository + "/blobs");
  fs::create_directories(repository + "/snapshots/" + revision);
  const TemporaryFolder plain;
  Model().Write(plain.path());
  for (const auto& entry : fs::directory_iterator(plain.path())) {
    const std::string bytes = ReadFile(entry.path());
    const std::string blob = Sha256Hex(bytes);
    WriteFile(repository + "/blobs/" + blob, bytes);
    fs::create_symlink("../../blobs/" + blob,
                       repository + "/snapshots/" + revision + "/" + entry.path().filename().string());
  }
  return repository + "/snapshots/" + revision;
}

TEST(FingerprintFiles, AreTheSameByEveryPathThatLeadsToThem) {
  const TemporaryFolder root;
  fs::create_directory(root / "model");
  Model().Write(root / "model");
  fs::create_directory_symlink("model", root / "link");
  fs::create_directory_symlink("link", root / "link_to_link");
  fs::create_directory(root / "links");
  for (const auto& entry : fs::directory_iterator(root / "model")) {
    fs::create_symlink(entry.path(), root / "links" + "/" + entry.path().filename().string());
  }
  const std::string expected = FingerprintOf(root / "model").hash;
  for (const char* way : {"link", "link_to_link", "links", "./model/", "links/../model", "link_to_link/."}) {
    EXPECT_EQ(FingerprintOf(root / way).hash, expected) << way;
  }
}

TEST(FingerprintFiles, AreTheSameInEveryHubCacheAndRevisionThatHasThem) {
  const TemporaryFolder root;
  const std::string one = MakeHubCache(root / "one", "main");
  const std::string other = MakeHubCache(root / "two", "0123abc");
  fs::create_directory_symlink(one, root / "current");

  const Fingerprint expected = FingerprintOf(one);
  EXPECT_EQ(FingerprintOf(other).hash, expected.hash);
  EXPECT_EQ(FingerprintOf(root / "current").hash, expected.hash);
  EXPECT_EQ(expected.components.count(std::string(kPrefix) + "contents_sha256"), 1u);
  EXPECT_EQ(expected.components.count(std::string(kPrefix) + "inode"), 0u);
}

TEST(FingerprintFiles, DifferInTheirConfigHoweverSlightly) {
  const TemporaryFolder folder;
  Model().Write(folder.path());
  const Fingerprint before = FingerprintOf(folder.path());
  for (const char* name : {"config.json", "model.safetensors.index.json"}) {
    const std::string text = ReadFile(folder / name);
    WriteFile(folder / name, text + "\n");
    EXPECT_THAT(FieldsThatDiffer(FingerprintOf(folder.path()), before),
                ElementsAre(std::string("checkpoint.") + name + ".sha256"));
    WriteFile(folder / name, text);
  }
  EXPECT_EQ(FingerprintOf(folder.path()).hash, before.hash) << "JSON counts by its contents alone";
}

timespec MtimeOf(const std::string& path) {
  struct stat stat = {};
  EXPECT_EQ(::stat(path.c_str(), &stat), 0);
  return stat.st_mtim;
}

void SetMtime(const std::string& path, const timespec& mtime) {
  const timespec times[] = {{0, UTIME_OMIT}, mtime};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

// Changes one byte of the weights in place, and leaves size, inode and mtime as they were.
void ChangeOneByteUnseen(const std::string& path) {
  const timespec mtime = MtimeOf(path);
  std::string bytes = ReadFile(path);
  bytes.back() ^= 1;
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  close(fd);
  SetMtime(path, mtime);
}

TEST(FingerprintFiles, DifferByOneByteOfAShardEvenIfSizeAndMtimeAreRestored) {
  const TemporaryFolder folder;
  Model().Write(folder.path());
  const CheckpointIdentity identity = IdentityOf(folder.path());
  const Fingerprint before = FingerprintOf(folder.path());

  ChangeOneByteUnseen(folder / kShard);

  EXPECT_THAT(FieldsThatDiffer(FingerprintOf(folder.path()), before), ElementsAre(std::string(kPrefix) + "ctime_ns"));
  EXPECT_THAT(CheckUnchanged(RealFileSystem(), identity),
              AllOf(StatusIs(Reason::kCheckpointChanged), testing::HasMetadata("changed", "ctime_ns")));
  EXPECT_THAT(CountGone(RealFileSystem(), identity), StatusIs(Reason::kCheckpointChanged));
}

TEST(FingerprintFiles, DifferIfAShardIsReplacedByRename) {
  const TemporaryFolder folder;
  Model().Write(folder.path());
  const CheckpointIdentity identity = IdentityOf(folder.path());
  const Fingerprint before = FingerprintOf(folder.path());

  const timespec mtime = MtimeOf(folder / kShard);
  WriteFile(folder / "new", ReadFile(folder / kShard));
  SetMtime(folder / "new", mtime);
  fs::rename(folder / "new", folder / kShard);

  const auto fields = FieldsThatDiffer(FingerprintOf(folder.path()), before);
  EXPECT_THAT(fields, Contains(std::string(kPrefix) + "inode"));
  EXPECT_THAT(fields, IsSubsetOf({std::string(kPrefix) + "inode", std::string(kPrefix) + "ctime_ns"}));
  EXPECT_THAT(CheckUnchanged(RealFileSystem(), identity), StatusIs(Reason::kCheckpointChanged));
}

TEST(FingerprintFiles, ThatAreGoneAreCountedIfTheOthersAreUnchanged) {
  const TemporaryFolder root;
  fs::create_directory(root / "model");
  Model().Write(root / "model");
  const CheckpointIdentity identity = IdentityOf(root / "model");
  EXPECT_EQ(CountGone(RealFileSystem(), identity).value(), 0);

  fs::remove(root / "model/x.safetensors");
  EXPECT_EQ(CountGone(RealFileSystem(), identity).value(), 1);
  EXPECT_THAT(CheckUnchanged(RealFileSystem(), identity), StatusIs(Reason::kCheckpointChanged));

  WriteFile(root / "model/config.json", "{}");
  EXPECT_THAT(CountGone(RealFileSystem(), identity), StatusIs(Reason::kCheckpointChanged));

  fs::remove_all(root / "model");
  EXPECT_EQ(CountGone(RealFileSystem(), identity).value(), 4);
}

}  // namespace
}  // namespace weightbroker
