// The vault over a keeper's protocol: what it writes down is what another broker adopts.

#include "server/broker/keeper_vault.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <utility>
#include <vector>

#include "server/broker/adoption.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/kept_set.h"
#include "tests/unit/broker/scripted_keeper.h"
#include "weightbroker/internal/v1/kept.pb.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::MakeKeptShard;
using testing::MakeResidency;
using testing::MakeWeightSet;
using testing::ScriptedKeeper;
using ::testing::SizeIs;
using testing::StatusIs;

ino_t InodeOf(const UniqueFd& fd) {
  struct stat status = {};
  EXPECT_EQ(fstat(fd.get(), &status), 0);
  return status.st_ino;
}

KeeperInheritance Inherit(std::vector<KeeperEntry> entries, int dropped_entries = 0) {
  return {.listening_socket = {}, .entries = std::move(entries), .dropped_entries = dropped_entries};
}

class KeeperVaultTest : public ::testing::Test {
 protected:
  absl::Status Keep(ShardVault& vault, const NewWeightSet& set, const Shard& shard) {
    return vault.Keep({set, residency_, shard, 1});
  }

  ScriptedKeeper keeper_;
  const std::unique_ptr<KeeperClient> client_ = keeper_.Connect();
  KeeperVault vault_{client_.get(), {}};
  const NewWeightSet set_ = MakeWeightSet();
  const std::string hash_ = set_.fingerprint.hash;
  const Residency residency_ = MakeResidency();
};

TEST_F(KeeperVaultTest, WritesAShardDownWithItsSlabsAndThenItsManifest) {
  const auto shard = MakeKeptShard(0);
  ASSERT_THAT(Keep(vault_, set_, *shard), IsOk());
  const KeeperEntry entry = keeper_.Take("shard/" + hash_ + "/0");
  ASSERT_THAT(entry.fds, SizeIs(2));
  EXPECT_EQ(InodeOf(entry.fds[0]), InodeOf(shard->slab_fds->front()));
  EXPECT_EQ(InodeOf(entry.fds[1]), InodeOf(shard->manifest->file().fd));
}

TEST_F(KeeperVaultTest, GivesTheNextBrokerWhatThisOneWroteDown) {
  ASSERT_THAT(Keep(vault_, set_, *MakeKeptShard(0)), IsOk());
  ASSERT_THAT(vault_.KeepLoad(MakeWeightSet("other"), 2), IsOk());
  ASSERT_THAT(vault_.KeepGeneration(std::string(64, '7'), 9), IsOk());
  std::vector<KeeperEntry> entries;
  for (const std::string& key : {"shard/" + hash_ + "/0", "load/" + MakeWeightSet("other").fingerprint.hash,
                                 "generation/" + std::string(64, '7')}) {
    ASSERT_TRUE(keeper_.Has(key)) << key;
    entries.push_back(keeper_.Take(key));
  }

  KeeperVault next(client_.get(), Inherit(std::move(entries)));
  const Adoption adoption = next.TakeAdoption();
  EXPECT_EQ(adoption.dropped_entries, 0);
  ASSERT_THAT(adoption.sets, SizeIs(1));
  EXPECT_EQ(adoption.sets[0].request.fingerprint.hash, hash_);
  EXPECT_EQ(adoption.sets[0].residency.generation, 4);
  ASSERT_THAT(adoption.loads, SizeIs(1));
  EXPECT_EQ(adoption.loads[0].attempt, 2);
  EXPECT_EQ(adoption.generations.at(std::string(64, '7')), 9);
  EXPECT_THAT(next.TakeAdoption().sets, IsEmpty());
}

TEST_F(KeeperVaultTest, PutsTheRecordOfACheckpointOfManyFilesIntoAMemfd) {
  NewWeightSet large = MakeWeightSet();
  auto identity = std::make_shared<CheckpointIdentity>(*large.identity);
  for (int i = 0; i < 200; ++i) {
    identity->files.push_back({.name = "model-" + std::to_string(i) + ".safetensors",
                               .stat = {},
                               .contents_sha256 = {},
                               .header_sha256 = std::string(64, 'a')});
  }
  large.fingerprint = ComputeFingerprint(large.spec, large.environment, *identity, HostDeviceFacts());
  large.identity = identity;
  ASSERT_THAT(Keep(vault_, large, *MakeKeptShard(0)), IsOk());
  KeeperEntry entry = keeper_.Take(ShardKey(large.fingerprint.hash, 0));
  EXPECT_LT(entry.value.size(), 200u);
  EXPECT_THAT(entry.fds, SizeIs(3));
  std::vector<KeeperEntry> entries;
  entries.push_back(std::move(entry));
  const Adoption adoption = KeeperVault(client_.get(), Inherit(std::move(entries))).TakeAdoption();
  ASSERT_THAT(adoption.sets, SizeIs(1));
  EXPECT_THAT(adoption.sets[0].request.identity->files, SizeIs(201));
}

TEST_F(KeeperVaultTest, TellsTheNextBrokerOfAQuarantineInARecordThatAnOlderOneDoesNotRead) {
  const auto shard = MakeKeptShard(0);
  ASSERT_THAT(vault_.Keep({set_, residency_, *shard, 1, "it is damaged"}), IsOk());
  std::vector<KeeperEntry> entries;
  entries.push_back(keeper_.Take("shard/" + hash_ + "/0"));
  internal::v1::KeptValue value;
  ASSERT_TRUE(value.ParseFromString(entries[0].value));
  EXPECT_EQ(value.version(), 2);

  const Adoption adoption = KeeperVault(client_.get(), Inherit(std::move(entries))).TakeAdoption();

  ASSERT_THAT(adoption.sets, SizeIs(1));
  EXPECT_EQ(adoption.sets[0].quarantines.at(0), "it is damaged");
}

TEST_F(KeeperVaultTest, SaysThatTheKeeperRefused) {
  keeper_.Refuse(ShardKey(hash_, 0));
  EXPECT_THAT(Keep(vault_, set_, *MakeKeptShard(0)), StatusIs(Reason::kKeeperRefused, HasSubstr("full")));
}

TEST_F(KeeperVaultTest, SaysThatTheKeeperHasGone) {
  keeper_.Close();
  EXPECT_THAT(Keep(vault_, set_, *MakeKeptShard(0)), StatusIs(Reason::kServiceUnavailable));
  EXPECT_THAT(vault_.Forget(hash_, 0), StatusIs(Reason::kServiceUnavailable));
}

TEST_F(KeeperVaultTest, ForgetsByTheSameKeys) {
  ASSERT_THAT(vault_.Forget(hash_, 3), IsOk());
  ASSERT_THAT(vault_.ForgetLoad(hash_), IsOk());
  ASSERT_THAT(vault_.ForgetGeneration(hash_), IsOk());
  EXPECT_THAT(keeper_.dropped(), ElementsAre("shard/" + hash_ + "/3", "load/" + hash_, "generation/" + hash_));
}

TEST_F(KeeperVaultTest, HasTheKeeperForgetWhatDoesNotProveToBeRight) {
  std::vector<KeeperEntry> entries;
  entries.push_back({"shard/" + hash_ + "/0", "garbage", {}});
  entries.push_back({"what/is/this", "", {}});
  KeeperVault next(client_.get(), Inherit(std::move(entries)));
  EXPECT_EQ(next.TakeAdoption().dropped_entries, 2);
  EXPECT_THAT(keeper_.dropped(), ElementsAre("shard/" + hash_ + "/0", "what/is/this"));
}

TEST_F(KeeperVaultTest, TellsTheKeeperWhichEntryItReadsAndThenWhichSetOrLoadIsTakenUp) {
  const std::string other = MakeWeightSet("other").fingerprint.hash;
  ASSERT_THAT(Keep(vault_, set_, *MakeKeptShard(0)), IsOk());
  ASSERT_THAT(vault_.KeepLoad(MakeWeightSet("other"), 2), IsOk());
  std::vector<KeeperEntry> entries;
  for (const std::string& key : {ShardKey(hash_, 0), KeptKey(kLoadKind, other)}) entries.push_back(keeper_.Take(key));
  KeeperVault next(client_.get(), Inherit(std::move(entries)));
  next.TakeAdoption();
  next.TakingUp(hash_);
  next.TakingUp(other);
  next.TakingUp("");
  ASSERT_THAT(next.Forget(hash_, 0), IsOk());  // answered once all before it has been read
  EXPECT_THAT(keeper_.taken_up(),
              ElementsAre("shard/" + hash_ + "/0", "load/" + other, "", "shard/" + hash_ + "/0", "load/" + other, ""));
}

TEST_F(KeeperVaultTest, CountsWhatTheKeeperDroppedBecauseBrokersDiedOfIt) {
  EXPECT_EQ(KeeperVault(client_.get(), Inherit({}, 3)).TakeAdoption().dropped_entries, 3);
}

TEST_F(KeeperVaultTest, HasTheKeeperForgetALoadThatHadEnded) {
  ASSERT_THAT(Keep(vault_, set_, *MakeKeptShard(0)), IsOk());
  ASSERT_THAT(vault_.KeepLoad(set_, 1), IsOk());
  std::vector<KeeperEntry> entries;
  for (const std::string& key : {ShardKey(hash_, 0), KeptKey(kLoadKind, hash_)}) entries.push_back(keeper_.Take(key));
  KeeperVault next(client_.get(), Inherit(std::move(entries)));
  const Adoption adoption = next.TakeAdoption();
  EXPECT_THAT(adoption.loads, IsEmpty());
  EXPECT_EQ(adoption.dropped_entries, 0);
  EXPECT_THAT(keeper_.dropped(), ElementsAre("load/" + hash_));
}

}  // namespace
}  // namespace weightbroker
