// Publications with scripted loaders: who becomes the publisher, what ends one, and what is left then.

#include "server/broker/publication_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/mutex.h"
#include "common/memory/writable_slab.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_loader.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using testing::FakeLoader;
using testing::FakeLoaderSpawner;
using testing::FakeShard;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::MakeFakeShard;
using testing::StatusIs;

constexpr uid_t kUid = 1000;

NewWeightSet Wanted(int32_t rank_count = 1) {
  NewWeightSet wanted;
  wanted.spec.set_model("/models/m");
  wanted.spec.set_layout("engine");
  wanted.fingerprint.hash = std::string(64, 'a');
  wanted.placement = AllOnHost(rank_count);
  return wanted;
}

int CountOpenFds() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// What a call comes back with, once it does.
template <typename Result>
class Awaited {
 public:
  void Set(Result result) {
    MutexLock lock(mutex_);
    result_ = std::move(result);
    changed_.NotifyAll();
  }
  Result Get() {
    MutexLock lock(mutex_);
    while (!result_.has_value()) changed_.Wait(mutex_);
    return *std::move(result_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::optional<Result> result_;
};

// Makes slabs and seals as a loader does, for `tensor_count` tensors.
void PublishWell(FakeLoader& loader) {
  const FakeShard shard = MakeFakeShard(2);
  while (true) {
    const auto command = loader.NextCommand();
    if (!command.has_value()) return;
    if (command->has_commit()) return loader.HandOver(shard, loader.request().ranks(0).rank());
    std::vector<WritableSlab> slabs;
    internal::v1::LoadEvent event;
    std::vector<int> fds;
    for (const int64_t size : command->allocate().slab_bytes()) {
      slabs.push_back(WritableSlab::Create(size).value());
      v1::Slab& slab = *event.mutable_allocated()->add_slabs();
      slab.set_size_bytes(slabs.back().size_bytes());
      slab.set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
      fds.push_back(slabs.back().fd());
    }
    event.mutable_allocated();
    loader.SendRaw(event.SerializeAsString(), fds);
  }
}

class PublicationManagerTest : public ::testing::Test {
 protected:
  ~PublicationManagerTest() override { publications_.reset(); }

  void Start(FakeLoaderSpawner::Script script, std::chrono::milliseconds timeout = std::chrono::minutes(10),
             int max_publications = 4) {
    fds_before_ = CountOpenFds();
    registry_ = Registry::Create({.host_memory = [] { return HostMemory{.available_bytes = int64_t{1} << 30}; }});
    spawner_ = std::make_unique<FakeLoaderSpawner>(std::move(script));
    publications_ = std::make_unique<PublicationManager>(PublicationManagerOptions{
        .registry = registry_,
        .spawner = spawner_.get(),
        .max_publications = max_publications,
        .timeout = timeout,
        .heartbeat = std::chrono::milliseconds(10),
        .on_finished = [this](const WeightSetRef&, const absl::Status& result) { results_.push_back(result); }});
  }

  PublicationManager::Begun Begin(int32_t rank = 0, int32_t rank_count = 1) {
    return publications_->Begin({.set = Wanted(rank_count), .rank = rank, .uid = kUid}).value();
  }

  static absl::StatusOr<WritableMemory> Allocate(Publication& publication, const std::vector<int64_t>& sizes) {
    Awaited<absl::StatusOr<WritableMemory>> result;
    publication.Allocate(sizes, [&](absl::StatusOr<WritableMemory> memory) { result.Set(std::move(memory)); });
    return result.Get();
  }

  static absl::Status Commit(Publication& publication) {
    Awaited<absl::Status> result;
    publication.Commit("", [&](const absl::Status& status) { result.Set(status); });
    return result.Get();
  }

  void ExpectNothingLeft() {
    publications_->Shutdown();
    EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
    EXPECT_EQ(spawner_->running_count(), 0);
    EXPECT_EQ(CountOpenFds(), fds_before_);
  }

  int fds_before_ = 0;
  std::vector<absl::Status> results_;  // of sets; read once everything has ended
  std::shared_ptr<Registry> registry_;
  std::unique_ptr<FakeLoaderSpawner> spawner_;
  std::unique_ptr<PublicationManager> publications_;
};

TEST_F(PublicationManagerTest, MakesASetResidentOfWhatItsPublisherCommits) {
  Start(PublishWell);
  const auto begun = Begin();
  ASSERT_NE(begun.publication, nullptr);
  const auto memory = Allocate(*begun.publication, {4096, 8192});
  ASSERT_THAT(memory, IsOk());
  EXPECT_EQ(memory->first_slab, 0);
  EXPECT_EQ(memory->fds->size(), 2u);
  EXPECT_EQ(registry_->View(begun.set).state, v1::WEIGHT_SET_STATE_LOADING);
  EXPECT_EQ(registry_->Totals().reserved_bytes, 12288);
  EXPECT_EQ(Allocate(*begun.publication, {4096})->first_slab, 2);
  ASSERT_THAT(Commit(*begun.publication), IsOk());
  EXPECT_EQ(registry_->View(begun.set).state, v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_THAT(Commit(*begun.publication), StatusIs(Reason::kPublicationUnknown));
  publications_->Shutdown();
  EXPECT_THAT(results_, ::testing::ElementsAre(IsOk()));
}

TEST_F(PublicationManagerTest, LetsOnePublishAndTheOthersFollow) {
  Start(PublishWell);
  const auto first = Begin();
  const auto second = Begin();
  EXPECT_NE(first.publication, nullptr);
  EXPECT_EQ(second.publication, nullptr);
  EXPECT_EQ(second.set, first.set);
  ASSERT_THAT(Allocate(*first.publication, {4096}), IsOk());
  ASSERT_THAT(Commit(*first.publication), IsOk());
  EXPECT_EQ(Begin().publication, nullptr);  // it is there
}

TEST_F(PublicationManagerTest, FindsAPublicationByItsTokenForItsUserAlone) {
  Start(PublishWell);
  const auto begun = Begin();
  const std::string token = begun.publication->facts().token;
  EXPECT_THAT(publications_->Find(token, kUid), IsOk());
  EXPECT_THAT(publications_->Find(token, kUid + 1), StatusIs(Reason::kPublicationUnknown));
  EXPECT_THAT(publications_->Find("", kUid), StatusIs(Reason::kPublicationUnknown));
}

TEST_F(PublicationManagerTest, LeavesNothingOfAPublisherThatLeaves) {
  Start(PublishWell);
  const auto begun = Begin();
  ASSERT_THAT(Allocate(*begun.publication, {4096}), IsOk());
  publications_->Abandon(begun.publication);
  EXPECT_THAT(Allocate(*begun.publication, {4096}), StatusIs(Reason::kPublisherGone));
  ExpectNothingLeft();
  EXPECT_THAT(registry_->View(begun.set).failure, StatusIs(Reason::kPublisherGone));
}

TEST_F(PublicationManagerTest, LetsTheNextPublishAfterOneThatLeft) {
  Start(PublishWell);
  publications_->Abandon(Begin().publication);
  std::shared_ptr<Publication> next;
  while (next == nullptr) next = Begin().publication;
  ASSERT_THAT(Allocate(*next, {4096}), IsOk());
  EXPECT_THAT(Commit(*next), IsOk());
}

TEST_F(PublicationManagerTest, GivesUpAPublisherThatTakesTooLong) {
  Start(PublishWell, std::chrono::milliseconds(20));
  const auto begun = Begin();
  while (registry_->View(begun.set).state != v1::WEIGHT_SET_STATE_FAILED) std::this_thread::yield();
  EXPECT_THAT(registry_->View(begun.set).failure, StatusIs(Reason::kPublisherGone, HasSubstr("longer than it may")));
  ExpectNothingLeft();
}

TEST_F(PublicationManagerTest, TellsWhoeverWaitsForALoaderThatItHasDied) {
  Start([](FakeLoader& loader) {
    (void)loader.NextCommand();
    loader.Die("killed by SIGSEGV");
  });
  const auto begun = Begin();
  EXPECT_THAT(Allocate(*begun.publication, {4096}), StatusIs(Reason::kLoaderFailed, HasSubstr("SIGSEGV")));
  ExpectNothingLeft();
}

TEST_F(PublicationManagerTest, PassesARefusalOnAndGoesOn) {
  Start([](FakeLoader& loader) {
    (void)loader.NextCommand();
    loader.Refuse(MakeError(Reason::kMemoryExhausted, "no room"));
    PublishWell(loader);
  });
  const auto begun = Begin();
  EXPECT_THAT(Allocate(*begun.publication, {4096}), StatusIs(Reason::kMemoryExhausted));
  EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
  EXPECT_THAT(Allocate(*begun.publication, {4096}), IsOk());
  EXPECT_THAT(Commit(*begun.publication), IsOk());
}

TEST_F(PublicationManagerTest, RefusesMoreMemoryThanThereIsBeforeTheLoaderIsAsked) {
  Start(PublishWell);
  const auto begun = Begin();
  EXPECT_THAT(Allocate(*begun.publication, {int64_t{1} << 31}), StatusIs(Reason::kMemoryExhausted));
  EXPECT_THAT(Allocate(*begun.publication, {-1}), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(Allocate(*begun.publication, {int64_t{1} << 62, int64_t{1} << 62}), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(Allocate(*begun.publication, std::vector<int64_t>(129, 1)), StatusIs(Reason::kTooManyRequests));
  EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
}

TEST_F(PublicationManagerTest, DistrustsALoaderThatAnswersWhatNobodyAsked) {
  for (const auto& script :
       std::vector<FakeLoaderSpawner::Script>{[](FakeLoader& loader) { loader.HandOver(MakeFakeShard(1)); },
                                              [](FakeLoader& loader) {
                                                (void)loader.NextCommand();
                                                loader.Refuse(MakeError(Reason::kMemoryExhausted, "no room"));
                                                loader.Refuse(MakeError(Reason::kMemoryExhausted, "no room"));
                                              },
                                              [](FakeLoader& loader) { loader.Plan(1, 1); },
                                              [](FakeLoader& loader) {
                                                (void)loader.NextCommand();
                                                internal::v1::LoadEvent event;
                                                event.mutable_allocated()->add_slabs()->set_size_bytes(4096);
                                                loader.SendRaw(event.SerializeAsString(), {0});
                                              }}) {
    Start(script);
    const auto begun = Begin();
    (void)Allocate(*begun.publication, {4096});
    while (registry_->View(begun.set).state != v1::WEIGHT_SET_STATE_FAILED) std::this_thread::yield();
    // The fake ends once it has answered, which may be seen first, or met by what is sent to it.
    EXPECT_THAT(registry_->View(begun.set).failure,
                AnyOf(StatusIs(Reason::kProtocolError), StatusIs(Reason::kLoaderFailed),
                      StatusIs(Reason::kServiceUnavailable)));
    ExpectNothingLeft();
  }
}

TEST_F(PublicationManagerTest, DistrustsALoaderWhoseSlabsAreOfAnotherKindThanTheSet) {
  Start(PublishWell);
  NewWeightSet wanted = Wanted();
  wanted.placement.handle_kind = v1::HANDLE_KIND_CUDA_VMM_FD;
  const auto begun = publications_->Begin({.set = std::move(wanted), .rank = 0, .uid = kUid}).value();
  EXPECT_THAT(Allocate(*begun.publication, {4096}),
              StatusIs(Reason::kProtocolError, AllOf(HasSubstr("HOST_MEMFD"), HasSubstr("CUDA_VMM_FD"))));
  ExpectNothingLeft();
}

TEST_F(PublicationManagerTest, MakesRanksResidentTogether) {
  Start(PublishWell);
  const auto first = Begin(0, 2);
  const auto second = Begin(1, 2);
  ASSERT_NE(second.publication, nullptr);
  ASSERT_THAT(Allocate(*first.publication, {4096}), IsOk());
  ASSERT_THAT(Allocate(*second.publication, {4096}), IsOk());
  ASSERT_THAT(Commit(*first.publication), IsOk());
  EXPECT_EQ(registry_->View(first.set).state, v1::WEIGHT_SET_STATE_LOADING);
  ASSERT_THAT(Commit(*second.publication), IsOk());
  EXPECT_EQ(registry_->View(first.set).state, v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(PublicationManagerTest, GivesBackACommittedRankIfAnotherOnesPublisherLeaves) {
  Start(PublishWell);
  const auto first = Begin(0, 2);
  const auto second = Begin(1, 2);
  ASSERT_THAT(Allocate(*first.publication, {4096}), IsOk());
  ASSERT_THAT(Commit(*first.publication), IsOk());
  publications_->Abandon(second.publication);
  ExpectNothingLeft();
  EXPECT_EQ(registry_->View(first.set).state, v1::WEIGHT_SET_STATE_FAILED);
}

TEST_F(PublicationManagerTest, GivesBackACommittedRankWhosePublisherLeavesBeforeTheSetIsResident) {
  Start(PublishWell);
  const auto first = Begin(0, 2);
  const auto second = Begin(1, 2);
  ASSERT_THAT(Allocate(*first.publication, {4096}), IsOk());
  ASSERT_THAT(Commit(*first.publication), IsOk());
  publications_->Abandon(first.publication);
  EXPECT_EQ(registry_->View(first.set).state, v1::WEIGHT_SET_STATE_FAILED);
  // What the other rank's publisher hears depends on whether its own publication has been told yet.
  EXPECT_THAT(Allocate(*second.publication, {4096}),
              AnyOf(StatusIs(Reason::kPublisherGone), StatusIs(Reason::kCancelled)));
  ExpectNothingLeft();
}

TEST_F(PublicationManagerTest, EndsWhatAnOperatorCancels) {
  Start(PublishWell);
  const auto begun = Begin();
  publications_->Cancel(begun.set, MakeError(Reason::kCancelled, "an operator said so"));
  EXPECT_THAT(registry_->View(begun.set).failure, StatusIs(Reason::kCancelled));
  ExpectNothingLeft();
}

TEST_F(PublicationManagerTest, RefusesRanksThatAreNotHeldHereAndMoreThanThereMayBe) {
  Start(PublishWell, std::chrono::minutes(10), /*max_publications=*/1);
  EXPECT_THAT(publications_->Begin({.set = Wanted(), .rank = 1, .uid = kUid}).status(), StatusIs(Reason::kRankNotHere));
  EXPECT_THAT(registry_->Totals().CountLoads(), 0);
  const auto begun = Begin(0, 2);
  EXPECT_THAT(publications_->Begin({.set = Wanted(2), .rank = 1, .uid = kUid}).status(),
              StatusIs(Reason::kTooManyRequests));
  publications_->Shutdown();
  EXPECT_THAT(publications_->Begin({.set = Wanted(), .rank = 0, .uid = kUid}).status(), StatusIs(Reason::kDraining));
}

}  // namespace
}  // namespace weightbroker
