// What a broker believes of what another one had written down: all that proves to be right, and nothing else.

#include "server/broker/adoption.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/base/error.h"
#include "common/identity/sha256.h"
#include "common/memory/host_slab.h"
#include "server/broker/kept_records.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_loader.h"
#include "tests/unit/broker/kept_set.h"
#include "weightbroker/internal/v1/kept.pb.h"

namespace weightbroker {
namespace {

using internal::v1::KeptValue;
using internal::v1::LoadRecord;
using internal::v1::ShardRecord;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::MakeFakeShard;
using testing::MakeKeptShard;
using testing::MakeResidency;
using testing::MakeWeightSet;
using ::testing::Pair;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr size_t kInline = 1 << 20;

UniqueFd Duplicate(const UniqueFd& fd) { return UniqueFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)); }

// A shard's entry while it can still be spoilt: its record, and its descriptors in order.
struct Draft {
  std::string key;
  ShardRecord record;
  std::vector<UniqueFd> fds;
  int32_t version = kKeptVersion;
};

Draft MakeDraft(const NewWeightSet& set, int32_t rank = 0) {
  const Residency residency = MakeResidency();
  const auto shard = MakeKeptShard(rank);
  Draft draft;
  draft.key = ShardKey(set.fingerprint.hash, rank);
  draft.record = MakeShardRecord({set, residency, *shard, static_cast<int32_t>(set.placement.ranks.size())});
  for (const UniqueFd& fd : *shard->slab_fds) draft.fds.push_back(Duplicate(fd));
  draft.fds.push_back(Duplicate(shard->manifest->file().fd));
  return draft;
}

Draft MakeDraft(int32_t rank = 0, int32_t rank_count = 1) {
  return MakeDraft(MakeWeightSet("2.11.0", rank_count), rank);
}

KeeperEntry ToEntry(Draft draft) {
  KeptValue value;
  value.set_version(draft.version);
  value.set_record(draft.record.SerializeAsString());
  return {draft.key, value.SerializeAsString(), std::move(draft.fds)};
}

template <typename... Entries>
std::vector<KeeperEntry> List(Entries... entries) {
  std::vector<KeeperEntry> list;
  (list.push_back(std::move(entries)), ...);
  return list;
}

KeeperEntry LoadEntry(const NewWeightSet& set, int32_t attempt = 1) {
  return {KeptKey(kLoadKind, set.fingerprint.hash),
          EncodeRecord(MakeLoadRecord(set, attempt).SerializeAsString(), kInline)->value,
          {}};
}

KeeperEntry GenerationEntry(const std::string& fingerprint, int64_t generation) {
  internal::v1::GenerationRecord record;
  record.set_generation(generation);
  return {KeptKey(kGenerationKind, fingerprint), EncodeRecord(record.SerializeAsString(), kInline)->value, {}};
}

// The cause for which a shard's entry is refused that `spoil` has changed.
absl::Status RefusalOf(const std::function<void(Draft&)>& spoil) {
  Draft draft = MakeDraft();
  spoil(draft);
  const std::string key = draft.key;
  const CheckedEntries checked = CheckEntries(List(ToEntry(std::move(draft))));
  EXPECT_THAT(checked.adoption.sets, IsEmpty());
  EXPECT_EQ(checked.adoption.dropped_entries, 1);
  if (checked.refused.size() != 1) return absl::OkStatus();
  EXPECT_EQ(checked.refused[0].entry.key, key);
  return checked.refused[0].cause;
}

UniqueFd UnsealedMemfd(int64_t size_bytes) {
  UniqueFd fd(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), size_bytes), 0);
  return fd;
}

// ---- What is right.

TEST(Adoption, GivesASetBackAsItWasWrittenDown) {
  const NewWeightSet set = MakeWeightSet("2.11.0", 2);
  CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft(0, 2)), ToEntry(MakeDraft(1, 2))));
  ASSERT_THAT(checked.refused, IsEmpty());
  ASSERT_THAT(checked.adoption.sets, SizeIs(1));
  const Adoption::Set& adopted = checked.adoption.sets[0];
  EXPECT_EQ(adopted.request.fingerprint.hash, set.fingerprint.hash);
  EXPECT_EQ(adopted.request.fingerprint.components, set.fingerprint.components);
  EXPECT_EQ(adopted.request.spec.SerializeAsString(), set.spec.SerializeAsString());
  EXPECT_EQ(adopted.request.environment.torch_version(), "2.11.0");
  EXPECT_EQ(adopted.request.identity->folder, "/models/m");
  EXPECT_EQ(adopted.request.identity->folder_stat, set.identity->folder_stat);
  ASSERT_THAT(adopted.request.identity->files, SizeIs(1));
  EXPECT_EQ(adopted.request.identity->files[0].stat, set.identity->files[0].stat);
  EXPECT_EQ(adopted.request.identity->files[0].header_sha256, set.identity->files[0].header_sha256);
  EXPECT_EQ(adopted.residency.generation, 4);
  EXPECT_EQ(adopted.residency.register_time, MakeResidency().register_time);
  EXPECT_EQ(adopted.residency.resident_time, MakeResidency().resident_time);
  EXPECT_EQ(adopted.residency.load_seconds, 8.9);
  EXPECT_EQ(adopted.residency.read_bytes, 512);
  ASSERT_THAT(adopted.shards, SizeIs(2));
  EXPECT_EQ(adopted.request.placement.ranks, set.placement.ranks);
  EXPECT_EQ(adopted.request.placement.world_size, 2);
  EXPECT_EQ(adopted.shards[1]->rank, 1);
  EXPECT_EQ(adopted.shards[1]->tensor_count, 3);
  EXPECT_THAT(*adopted.shards[1]->slab_fds, SizeIs(1));
  EXPECT_THAT(adopted.shards[1]->manifest->frames(), SizeIs(1));
}

TEST(Adoption, KnowsAPublisherThatRunsStillAndOneThatHasExited) {
  const NewWeightSet set = MakeWeightSet();
  const auto shard = MakeKeptShard(0);
  shard->publisher = std::make_shared<const PublisherProcess>(PublisherProcess::Find(getpid()));
  Draft running = MakeDraft(set);
  running.record = MakeShardRecord({set, MakeResidency(), *shard, 1});
  Draft exited = MakeDraft(MakeWeightSet("2.12.0"));
  *exited.record.mutable_publisher() = running.record.publisher();
  exited.record.mutable_publisher()->set_start_ticks(running.record.publisher().start_ticks() - 1);

  const CheckedEntries checked = CheckEntries(List(ToEntry(std::move(running)), ToEntry(std::move(exited))));

  ASSERT_THAT(checked.adoption.sets, SizeIs(2));
  for (const Adoption::Set& adopted : checked.adoption.sets) {
    const PublisherProcess& publisher = *adopted.shards[0]->publisher;
    EXPECT_EQ(publisher.pid(), getpid());
    EXPECT_EQ(publisher.may_run(), adopted.request.environment.torch_version() == "2.11.0");
  }
}

TEST(Adoption, ComputesTheSameFingerprintFromWhatWasWrittenDown) {
  CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft())));
  ASSERT_THAT(checked.adoption.sets, SizeIs(1));
  const NewWeightSet& set = checked.adoption.sets[0].request;
  EXPECT_EQ(ComputeFingerprint(set.spec, set.environment, *set.identity, HostDeviceFacts()).hash, set.fingerprint.hash);
}

TEST(Adoption, FindsARecordThatIsInAMemfd) {
  Draft draft = MakeDraft();
  EncodedRecord encoded = EncodeRecord(draft.record.SerializeAsString(), /*max_inline_bytes=*/10).value();
  ASSERT_TRUE(encoded.memfd.valid());
  EXPECT_LT(encoded.value.size(), 100u);
  draft.fds.insert(draft.fds.begin(), std::move(encoded.memfd));
  CheckedEntries checked = CheckEntries(List(KeeperEntry{draft.key, encoded.value, std::move(draft.fds)}));
  EXPECT_THAT(checked.refused, IsEmpty());
  EXPECT_THAT(checked.adoption.sets, SizeIs(1));
}

TEST(Adoption, GivesSetsInTheOrderInWhichTheyBecameResident) {
  const NewWeightSet sets[] = {MakeWeightSet("a"), MakeWeightSet("b"), MakeWeightSet("c")};
  std::vector<KeeperEntry> entries;
  for (const int at : {2, 0, 1}) {
    Draft draft = MakeDraft(sets[at]);
    draft.record.mutable_resident_time()->set_seconds(1000 + at);
    entries.push_back(ToEntry(std::move(draft)));
  }
  const CheckedEntries checked = CheckEntries(std::move(entries));
  ASSERT_THAT(checked.adoption.sets, SizeIs(3));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(checked.adoption.sets[i].request.fingerprint.hash, sets[i].fingerprint.hash);
  }
}

// As one of two services on a node would hold it, each for its own GPUs.
TEST(Adoption, AdoptsASetOfWhichOnlySomeRanksAreHeldHere) {
  NewWeightSet set = MakeWeightSet("2.11.0", 4);
  set.placement.ranks = {{2, kHostDevice}, {3, kHostDevice}};
  const CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft(set, 2)), ToEntry(MakeDraft(set, 3))));
  EXPECT_THAT(checked.refused, IsEmpty());
  ASSERT_THAT(checked.adoption.sets, SizeIs(1));
  EXPECT_EQ(checked.adoption.sets[0].request.placement.ranks, set.placement.ranks);
  EXPECT_EQ(checked.adoption.sets[0].request.placement.world_size, 4);
}

TEST(Adoption, TakesARecordWithoutAPlacementForRankZeroOnTheHost) {
  Draft draft = MakeDraft();
  draft.record.mutable_weight_set()->clear_ranks();
  draft.record.mutable_weight_set()->clear_handle_kind();
  const CheckedEntries checked = CheckEntries(List(ToEntry(std::move(draft))));
  ASSERT_THAT(checked.adoption.sets, SizeIs(1));
  EXPECT_EQ(checked.adoption.sets[0].request.placement.ranks, AllOnHost(1).ranks);
  EXPECT_EQ(checked.adoption.sets[0].request.placement.handle_kind, v1::HANDLE_KIND_HOST_MEMFD);
}

TEST(Adoption, ResumesALoadWithTheRanksThatItWasBegunFor) {
  NewWeightSet set = MakeWeightSet("2.11.0", 4);
  set.placement.ranks = {{1, kHostDevice}, {3, kHostDevice}};
  const CheckedEntries checked = CheckEntries(List(LoadEntry(set)));
  ASSERT_THAT(checked.adoption.loads, SizeIs(1));
  EXPECT_EQ(checked.adoption.loads[0].request.placement.ranks, set.placement.ranks);
}

TEST(Adoption, GivesLoadsUnderWayWithTheirAttempts) {
  const CheckedEntries checked = CheckEntries(List(LoadEntry(MakeWeightSet(), 5)));
  ASSERT_THAT(checked.adoption.loads, SizeIs(1));
  EXPECT_EQ(checked.adoption.loads[0].attempt, 5);
  EXPECT_EQ(checked.adoption.loads[0].request.fingerprint.hash, MakeWeightSet().fingerprint.hash);
}

TEST(Adoption, StartsNoLoadAgainWhoseSetIsThere) {
  const NewWeightSet set = MakeWeightSet();
  const CheckedEntries checked = CheckEntries(List(LoadEntry(set), ToEntry(MakeDraft())));
  EXPECT_THAT(checked.adoption.loads, IsEmpty());
  EXPECT_THAT(checked.adoption.sets, SizeIs(1));
  EXPECT_THAT(checked.finished_load_keys, ElementsAre(KeptKey(kLoadKind, set.fingerprint.hash)));
}

TEST(Adoption, TakesTheHighestGenerationThatAnyEntryNames) {
  const std::string hash = MakeWeightSet().fingerprint.hash;
  const std::string other(64, '1');
  const CheckedEntries checked =
      CheckEntries(List(ToEntry(MakeDraft()), GenerationEntry(hash, 3), GenerationEntry(other, 9)));
  EXPECT_THAT(checked.adoption.generations, ElementsAre(Pair(other, 9), Pair(hash, 4)));
}

TEST(Adoption, GivesAliasesAsTheyWereWrittenDown) {
  const KeptAlias kept{"model@live", std::string(64, 'a'), std::string(64, 'b'), MakeResidency().resident_time};
  const KeeperEntry entry = {
      KeptKey(kAliasKind, kept.name), EncodeRecord(MakeAliasRecord(kept).SerializeAsString(), kInline)->value, {}};
  CheckedEntries checked = CheckEntries(List(KeeperEntry{entry.key, entry.value, {}}));
  ASSERT_THAT(checked.adoption.aliases, SizeIs(1));
  const KeptAlias& found = checked.adoption.aliases[0];
  EXPECT_EQ(found.name, kept.name);
  EXPECT_EQ(found.fingerprint, kept.fingerprint);
  EXPECT_EQ(found.previous_fingerprint, kept.previous_fingerprint);
  EXPECT_EQ(found.move_time, kept.move_time);
  EXPECT_THAT(CheckEntries(List(KeeperEntry{"alias/no alias", entry.value, {}})).refused, SizeIs(1));
}

TEST(Adoption, KnowsForWhomASetIsPinned) {
  for (const Pins pins : {Pins{.by_caller = true}, Pins{.by_desired_state = true}, Pins{true, true}}) {
    NewWeightSet set = MakeWeightSet();
    set.pins = pins;
    const CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft(set))));
    ASSERT_THAT(checked.adoption.sets, SizeIs(1));
    EXPECT_EQ(checked.adoption.sets[0].request.pins, pins);
  }
}

// ---- What is not. Each differs from a right one in one thing.

TEST(Adoption, RefusesNothingOfAnEntryThatIsRight) {
  const CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft())));
  EXPECT_EQ(checked.adoption.sets.size(), 1u);
  EXPECT_EQ(checked.adoption.dropped_entries, 0);
  EXPECT_THAT(checked.refused, IsEmpty());
}

TEST(Adoption, RefusesAManifestWithAnotherDigest) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { (*draft.record.mutable_manifest_sha256())[3] ^= 1; }),
              StatusIs(Reason::kProtocolError, HasSubstr("manifest has another SHA-256")));
}

TEST(Adoption, RefusesAManifestOfAnotherShard) {
  EXPECT_THAT(RefusalOf([](Draft& draft) {
                testing::FakeShard other = MakeFakeShard(4);
                draft.fds.back() = std::move(other.fds.back());
                draft.record.set_manifest_bytes(other.sealed.manifest_bytes());
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("manifest has another SHA-256")));
}

TEST(Adoption, RefusesAManifestThatEndsEarly) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.record.set_manifest_bytes(draft.record.manifest_bytes() + 1); }),
              StatusIs(Reason::kProtocolError, HasSubstr("manifest ends")));
}

TEST(Adoption, RefusesAManifestWhoseFramesDoNotAddUp) {
  EXPECT_THAT(RefusalOf([](Draft& draft) {
                const std::string bytes = "\xff\xff\xff\x7f no frame";
                draft.fds.back() = CreateSealedMemfd("manifest", std::as_bytes(std::span(bytes))).value();
                draft.record.set_manifest_bytes(static_cast<int64_t>(bytes.size()));
                draft.record.set_manifest_sha256(Sha256Bytes(bytes));
              }),
              StatusIs(Reason::kProtocolError));
}

TEST(Adoption, RefusesAManifestOfAnImpossibleSize) {
  for (const int64_t size : {int64_t{-1}, int64_t{1} << 40}) {
    EXPECT_THAT(RefusalOf([size](Draft& draft) { draft.record.set_manifest_bytes(size); }),
                StatusIs(Reason::kProtocolError));
  }
}

TEST(Adoption, RefusesASlabThatIsShorterThanItSays) {
  EXPECT_THAT(RefusalOf([](Draft& draft) {
                v1::Slab& slab = *draft.record.mutable_slabs(0);
                slab.set_size_bytes(slab.size_bytes() + 4096);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("slab 0")));
}

TEST(Adoption, RefusesASlabThatIsNotSealed) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.fds[0] = UnsealedMemfd(draft.record.slabs(0).size_bytes()); }),
              StatusIs(Reason::kProtocolError, HasSubstr("not sealed")));
}

TEST(Adoption, RefusesASlabThatIsNoMemfd) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.fds[0].reset(open("/dev/null", O_RDONLY | O_CLOEXEC)); }),
              StatusIs(Reason::kProtocolError, HasSubstr("no memfd")));
}

TEST(Adoption, RefusesASlabOfAKindThatItDoesNotKnow) {
  EXPECT_THAT(
      RefusalOf([](Draft& draft) { draft.record.mutable_slabs(0)->set_handle_kind(static_cast<v1::HandleKind>(77)); }),
      StatusIs(Reason::kProtocolError, HasSubstr("slab 0")));
}

TEST(Adoption, RefusesAMissingDescriptor) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.fds.pop_back(); }),
              StatusIs(Reason::kProtocolError, HasSubstr("descriptors")));
}

TEST(Adoption, RefusesADescriptorTooMany) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.fds.push_back(UnsealedMemfd(1)); }),
              StatusIs(Reason::kProtocolError, HasSubstr("descriptors")));
}

TEST(Adoption, RefusesARecordOfAVersionThatItDoesNotKnow) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.version = kKeptVersion + 1; }),
              StatusIs(Reason::kProtocolError, HasSubstr(absl::StrCat("version ", kKeptVersion + 1))));
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.version = 0; }),
              StatusIs(Reason::kProtocolError, HasSubstr("version 0")));
}

TEST(Adoption, RefusesAFingerprintThatIsNotThatOfItsComponents) {
  EXPECT_THAT(RefusalOf([](Draft& draft) {
                draft.record.mutable_weight_set()->mutable_components(2)->set_value("something else");
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("fingerprint")));
}

TEST(Adoption, RefusesARecordOfAnotherFingerprintThanItsKeys) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.key = ShardKey(std::string(64, 'b'), 0); }),
              StatusIs(Reason::kProtocolError, HasSubstr("in its key")));
}

TEST(Adoption, RefusesARecordOfAnotherRankThanItsKeys) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.record.set_rank(1); }),
              StatusIs(Reason::kProtocolError, HasSubstr("rank")));
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.record.set_rank_count(0); }),
              StatusIs(Reason::kProtocolError, HasSubstr("rank")));
}

TEST(Adoption, RefusesAShardThatIsNotWhereItsSetsRanksArePlaced) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.record.set_device("GPU-a"); }),
              StatusIs(Reason::kProtocolError, HasSubstr("rank 0 on GPU-a")));
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.record.mutable_weight_set()->mutable_ranks(0)->set_rank(1); }),
              StatusIs(Reason::kProtocolError, HasSubstr("rank 1 of 1")));
}

TEST(Adoption, RefusesAGenerationThatNoSetCanHave) {
  EXPECT_THAT(RefusalOf([](Draft& draft) { draft.record.set_generation(0); }),
              StatusIs(Reason::kProtocolError, HasSubstr("generation")));
}

TEST(Adoption, RefusesAllShardsOfASetOfWhichARankIsMissing) {
  const std::string hash = MakeWeightSet("2.11.0", 3).fingerprint.hash;
  const CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft(0, 3)), ToEntry(MakeDraft(2, 3))));
  EXPECT_THAT(checked.adoption.sets, IsEmpty());
  ASSERT_THAT(checked.refused, SizeIs(2));
  EXPECT_EQ(checked.refused[0].entry.key, ShardKey(hash, 0));
  EXPECT_EQ(checked.refused[1].entry.key, ShardKey(hash, 2));
  EXPECT_THAT(checked.refused[0].cause, StatusIs(Reason::kProtocolError, HasSubstr("0-2, only 0, 2 are there")));
  // Not so soon that the kernel frees the memory before the keeper has been told.
  EXPECT_NE(checked.refused[0].shard, nullptr);
}

TEST(Adoption, RefusesAllShardsOfASetOfWhichARankIsSpoilt) {
  Draft spoilt = MakeDraft(1, 2);
  spoilt.fds[0] = UnsealedMemfd(spoilt.record.slabs(0).size_bytes());
  const CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft(0, 2)), ToEntry(std::move(spoilt))));
  EXPECT_THAT(checked.adoption.sets, IsEmpty());
  EXPECT_THAT(checked.refused, SizeIs(2));
}

TEST(Adoption, RefusesShardsOfDifferentGenerations) {
  Draft older = MakeDraft(1, 2);
  older.record.set_generation(3);
  const CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft(0, 2)), ToEntry(std::move(older))));
  EXPECT_THAT(checked.adoption.sets, IsEmpty());
  EXPECT_THAT(checked.refused, SizeIs(2));
}

TEST(Adoption, KeepsTheGenerationOfASetThatItRefuses) {
  const CheckedEntries checked = CheckEntries(List(ToEntry(MakeDraft(0, 2))));
  EXPECT_THAT(checked.adoption.generations, ElementsAre(Pair(MakeWeightSet("2.11.0", 2).fingerprint.hash, 4)));
}

TEST(Adoption, AdoptsTheOtherSetsBesideOneThatItRefuses) {
  Draft spoilt = MakeDraft(MakeWeightSet("a"));
  spoilt.version = 9;
  const CheckedEntries checked = CheckEntries(List(ToEntry(std::move(spoilt)), ToEntry(MakeDraft(MakeWeightSet("b")))));
  ASSERT_THAT(checked.adoption.sets, SizeIs(1));
  EXPECT_EQ(checked.adoption.sets[0].request.environment.torch_version(), "b");
}

TEST(Adoption, RefusesGarbage) {
  const std::string hash = MakeWeightSet().fingerprint.hash;
  const std::string values[] = {"", "garbage", std::string(5000, '\xff'), std::string("\x08\x01", 2),
                                std::string("\x08\x01\x12\x03\xff\xff\xff", 7)};
  for (const std::string& value : values) {
    for (const std::string& key : {ShardKey(hash, 0), KeptKey(kLoadKind, hash)}) {
      const CheckedEntries checked = CheckEntries(List(KeeperEntry{key, value, {}}));
      EXPECT_THAT(checked.refused, SizeIs(1)) << key;
    }
  }
}

TEST(Adoption, RefusesKeysThatItWouldNotWrite) {
  const std::string hash = MakeWeightSet().fingerprint.hash;
  for (const std::string& key :
       {std::string("x"), std::string("shard"), "shard/" + hash, "shard/" + hash + "/x", "shard/" + hash + "/00",
        "shard/" + hash + "/-1", "load/" + hash + "/0", "later/" + hash}) {
    Draft draft = MakeDraft();
    draft.key = key;
    EXPECT_THAT(CheckEntries(List(ToEntry(std::move(draft)))).refused, SizeIs(1)) << key;
  }
}

TEST(Adoption, RefusesARecordInAMemfdThatIsNotTheOneWrittenDown) {
  const std::string record = MakeDraft().record.SerializeAsString();
  const auto entry = [&](const std::string& contents, bool with_fd) {
    EncodedRecord encoded = EncodeRecord(record, 10).value();
    KeeperEntry made{ShardKey(MakeWeightSet().fingerprint.hash, 0), encoded.value, {}};
    if (with_fd) made.fds.push_back(CreateSealedMemfd("record", std::as_bytes(std::span(contents))).value());
    return made;
  };
  std::string changed = record;
  changed[20] ^= 1;
  EXPECT_THAT(CheckEntries(List(entry(changed, true))).refused[0].cause,
              StatusIs(Reason::kProtocolError, HasSubstr("another SHA-256")));
  EXPECT_THAT(CheckEntries(List(entry(record.substr(1), true))).refused[0].cause,
              StatusIs(Reason::kProtocolError, HasSubstr("ends after")));
  EXPECT_THAT(CheckEntries(List(entry(record, false))).refused[0].cause,
              StatusIs(Reason::kProtocolError, HasSubstr("there is none")));
}

TEST(Adoption, RefusesALoadWhoseFingerprintIsNotItsOwn) {
  NewWeightSet set = MakeWeightSet();
  set.fingerprint.components["spec.dtype"] = "F64";
  EXPECT_THAT(CheckEntries(List(LoadEntry(set))).refused, SizeIs(1));
}

}  // namespace
}  // namespace weightbroker
