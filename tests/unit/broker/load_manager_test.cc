#include "server/broker/load_manager.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <thread>

#include "common/base/mutex.h"
#include "common/memory/host_slab.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/broker/fake_loader.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::FakeLoader;
using testing::FakeLoaderSpawner;
using testing::FakeShard;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::LoadsWell;
using testing::MakeFakeShard;
using testing::MakeManifest;
using testing::StatusIs;

NewWeightSet Wanted(char digit) {
  NewWeightSet wanted;
  wanted.spec.set_model("/models/m");
  wanted.fingerprint.hash = std::string(64, digit);
  return wanted;
}

NewWeightSet WantedRanks(const std::vector<int32_t>& ranks) {
  NewWeightSet wanted = Wanted('a');
  wanted.placement.world_size = 4;
  wanted.placement.ranks.clear();
  for (const int32_t rank : ranks) wanted.placement.ranks.push_back({rank, kHostDevice});
  return wanted;
}

int CountOpenFds() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

class LoadManagerTest : public ::testing::Test {
 protected:
  void Start(FakeLoaderSpawner::Script script, int max_concurrent_loads = 2, int max_waiting_loads = 8,
             std::chrono::milliseconds stall_timeout = std::chrono::milliseconds(0)) {
    fds_before_ = CountOpenFds();
    registry_ = Registry::Create({.host_memory = [] { return HostMemory{int64_t{1} << 40, "machine"}; }});
    spawner_ = std::make_unique<FakeLoaderSpawner>(std::move(script));
    loads_ = std::make_unique<LoadManager>(
        LoadManagerOptions{.registry = registry_,
                           .spawner = spawner_.get(),
                           .reading = reading_,
                           .max_concurrent_loads = max_concurrent_loads,
                           .max_waiting_loads = max_waiting_loads,
                           .heartbeat = std::chrono::milliseconds(20),
                           .stall_timeout = stall_timeout,
                           .on_degraded = [this](std::string_view how) { degraded_.emplace_back(how); },
                           .on_finished = [this](const WeightSetRef&, const absl::Status&) { ++finished_; }});
  }

  WeightSetRef Load(char digit = 'a') { return loads_->Load(Wanted(digit)).value(); }

  // Waits until the load has ended, one way or the other.
  WeightSetView Await(const WeightSetRef& set) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < deadline) {
      const WeightSetView view = registry_->View(set);
      if (view.state == v1::WEIGHT_SET_STATE_RESIDENT || view.state == v1::WEIGHT_SET_STATE_FAILED) return view;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "the load did not end";
    return registry_->View(set);
  }

  // Runs one load with `script` to its failure, and checks that it leaves nothing behind.
  absl::Status FailureOf(FakeLoaderSpawner::Script script,
                         std::chrono::milliseconds stall_timeout = std::chrono::milliseconds(0)) {
    Start(std::move(script), 2, 8, stall_timeout);
    const WeightSetView view = Await(Load());
    EXPECT_EQ(view.state, v1::WEIGHT_SET_STATE_FAILED);
    loads_->Shutdown();
    EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
    EXPECT_EQ(spawner_->running_count(), 0);
    EXPECT_EQ(CountOpenFds(), fds_before_);
    return view.failure;
  }

  int fds_before_ = 0;
  std::atomic<int> finished_{0};
  ReadingOptions reading_;
  std::vector<std::string> degraded_;  // written by a load's thread
  std::shared_ptr<Registry> registry_;
  std::unique_ptr<FakeLoaderSpawner> spawner_;
  std::unique_ptr<LoadManager> loads_;
};

// ---- Loads that go well.

TEST_F(LoadManagerTest, MakesAResidentSetOfWhatTheLoaderHandsOver) {
  Start(LoadsWell(3));
  const WeightSetRef set = Load();
  ASSERT_EQ(Await(set).state, v1::WEIGHT_SET_STATE_RESIDENT);
  const auto shard = registry_->Look(set, 0, {});
  ASSERT_THAT(shard, IsOk());
  EXPECT_EQ((*shard)->tensor_count, 3);
  EXPECT_EQ((*shard)->slab_fds->size(), 1u);
  EXPECT_EQ((*shard)->manifest->frames().size(), 1u);
}

TEST_F(LoadManagerTest, LogsHowFarALoadIs) {
  Start([](FakeLoader& loader) {
    FakeShard shard = MakeFakeShard(2);
    if (!loader.PlanFor(shard)) return;
    loader.Progress(v1::WEIGHT_SET_STATE_LOADING, 100);
    loader.Progress(v1::WEIGHT_SET_STATE_VERIFYING, 512);
    loader.HandOver(shard);
  });
  ::testing::internal::CaptureStderr();
  const WeightSetView view = Await(Load());
  loads_->Shutdown();
  const std::string log = ::testing::internal::GetCapturedStderr();
  ASSERT_EQ(view.state, v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_THAT(log, HasSubstr("event=load.progress"));
  EXPECT_THAT(log, HasSubstr("state=VERIFYING done_bytes=512 total_bytes="));
}

TEST_F(LoadManagerTest, TellsTheLoaderHowToRead) {
  reading_ = {.reader_threads = 3, .reads_per_thread = 5, .chunk_bytes = 8 << 20, .method = "pread"};
  internal::v1::LoadRequest request;
  Start([&](FakeLoader& loader) {
    request = loader.request();
    LoadsWell(1)(loader);
  });
  ASSERT_EQ(Await(Load()).state, v1::WEIGHT_SET_STATE_RESIDENT);
  loads_->Shutdown();
  EXPECT_EQ(request.reader_threads(), 3);
  EXPECT_EQ(request.reads_per_thread(), 5);
  EXPECT_EQ(request.chunk_bytes(), 8 << 20);
  EXPECT_EQ(request.read_method(), "pread");
}

TEST_F(LoadManagerTest, TellsOfALoadThatWasSlowerThanItCouldBe) {
  const auto load_with = [this](const char* wanted, const char* method, int64_t unpinned_bytes) {
    degraded_.clear();
    reading_.method = wanted;
    Start([&](FakeLoader& loader) {
      FakeShard shard = MakeFakeShard(2);
      shard.sealed.mutable_report()->set_read_method(method);
      shard.sealed.mutable_report()->set_unpinned_bytes(unpinned_bytes);
      if (loader.PlanFor(shard)) loader.HandOver(shard);
    });
    EXPECT_EQ(Await(Load()).state, v1::WEIGHT_SET_STATE_RESIDENT);
    loads_->Shutdown();
    return degraded_;
  };
  EXPECT_THAT(load_with("", "io_uring", 0), ::testing::IsEmpty());
  EXPECT_THAT(load_with("", "buffered", 0), ::testing::IsEmpty());
  EXPECT_THAT(load_with("", "pread", 0), ::testing::ElementsAre("no_io_uring"));
  EXPECT_THAT(load_with("pread", "pread", 0), ::testing::IsEmpty()) << "as it was asked to";
  EXPECT_THAT(load_with("", "io_uring", 4096), ::testing::ElementsAre("not_pinned"));
}

TEST_F(LoadManagerTest, MakesAllRanksResidentTogetherOnceTheLastIsHandedOver) {
  std::atomic<bool> go_on{false};
  Start([&](FakeLoader& loader) {
    const FakeShard shard = MakeFakeShard(2);
    if (!loader.Plan(2 * shard.sealed.slabs(0).size_bytes(), 4)) return;
    loader.HandOver(shard, 0);
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    loader.HandOver(shard, 1);
  });
  const WeightSetRef set = loads_->Load(WantedRanks({0, 1})).value();
  EXPECT_THAT(registry_->Acquire(set, 0, {}, nullptr), StatusIs(Reason::kStillLoading));
  go_on = true;
  ASSERT_EQ(Await(set).state, v1::WEIGHT_SET_STATE_RESIDENT);
  for (const int32_t rank : {0, 1}) EXPECT_EQ(registry_->Look(set, rank, {}).value()->rank, rank);
}

TEST_F(LoadManagerTest, TellsTheLoaderWhichRanksToMakeAndWhere) {
  std::string ranks;
  Start([&](FakeLoader& loader) {
    for (const auto& placed : loader.request().ranks()) ranks += absl::StrCat(placed.rank(), "@", placed.device(), " ");
    LoadsWell()(loader);
  });
  const WeightSetRef set = loads_->Load(WantedRanks({1, 3})).value();
  ASSERT_EQ(Await(set).state, v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_EQ(ranks, "1@host 3@host ");
}

TEST_F(LoadManagerTest, KeepsNothingOfTheOtherRanksIfTheLoaderDiesAfterOne) {
  Start([](FakeLoader& loader) {
    const FakeShard shard = MakeFakeShard(2);
    loader.Plan(2 * shard.sealed.slabs(0).size_bytes(), 4);
    loader.HandOver(shard, 0);
    loader.Die("killed by SIGKILL");
  });
  const WeightSetRef set = loads_->Load(WantedRanks({0, 1})).value();
  const WeightSetView view = Await(set);
  EXPECT_EQ(view.state, v1::WEIGHT_SET_STATE_FAILED);
  EXPECT_THAT(view.failure, StatusIs(Reason::kLoaderFailed, HasSubstr("SIGKILL")));
  loads_->Shutdown();
  EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
  EXPECT_EQ(CountOpenFds(), fds_before_);
}

TEST_F(LoadManagerTest, RefusesRanksThatItDidNotAskForOrNotInTheirOrder) {
  for (const std::vector<int32_t>& handed_over : {std::vector<int32_t>{1}, {0, 0}, {0, 2}}) {
    Start([&handed_over](FakeLoader& loader) {
      const FakeShard shard = MakeFakeShard(2);
      loader.Plan(2 * shard.sealed.slabs(0).size_bytes(), 4);
      for (const int32_t rank : handed_over) loader.HandOver(shard, rank);
    });
    const WeightSetView view = Await(loads_->Load(WantedRanks({0, 1})).value());
    EXPECT_THAT(view.failure, StatusIs(Reason::kProtocolError, HasSubstr("was due")));
    loads_->Shutdown();
  }
}

TEST_F(LoadManagerTest, RefusesAPlanForOtherRanks) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                internal::v1::LoadEvent event;
                event.mutable_planned()->add_shards()->set_rank(1);
                loader.SendRaw(event.SerializeAsString());
                loader.WaitForTheEnd();
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("not ranks 0")));
}

TEST_F(LoadManagerTest, TellsTheLoaderWhatToLoad) {
  std::string model;
  Start([&](FakeLoader& loader) {
    model = loader.request().spec().model();
    LoadsWell()(loader);
  });
  Await(Load());
  EXPECT_EQ(model, "/models/m");
}

TEST_F(LoadManagerTest, SpawnsOneLoaderForAFingerprintHoweverManyAsk) {
  Start(LoadsWell());
  const WeightSetRef first = Load();
  EXPECT_EQ(Load(), first);
  Await(first);
  EXPECT_EQ(Load(), first);
  EXPECT_EQ(spawner_->spawn_count(), 1);
}

TEST_F(LoadManagerTest, LoadsAnewAfterAFailure) {
  std::atomic<int> attempts{0};
  Start([&](FakeLoader& loader) {
    if (++attempts > 1) LoadsWell()(loader);
  });
  EXPECT_EQ(Await(Load()).state, v1::WEIGHT_SET_STATE_FAILED);
  EXPECT_EQ(Await(Load()).state, v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(LoadManagerTest, GivesSignsOfLifeWhileTheLoaderSaysNothing) {
  std::atomic<bool> go_on{false};
  Start([&](FakeLoader& loader) {
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    LoadsWell()(loader);
  });
  const WeightSetRef set = Load();
  std::atomic<int> signs{0};
  const Subscription subscription = registry_->Subscribe(set, [&] {
    if (++signs == 3) go_on = true;
  });
  EXPECT_EQ(Await(set).state, v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(LoadManagerTest, RunsNoMoreLoadersAtOnceThanAllowed) {
  std::atomic<int> running{0};
  std::atomic<int> most{0};
  Start(
      [&](FakeLoader& loader) {
        most = std::max(most.load(), ++running);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        --running;
        LoadsWell()(loader);
      },
      /*max_concurrent_loads=*/1);
  const WeightSetRef sets[] = {Load('a'), Load('b'), Load('c')};
  for (const WeightSetRef& set : sets) EXPECT_EQ(Await(set).state, v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_EQ(most, 1);
}

TEST_F(LoadManagerTest, RefusesMoreLoadsThanMayWait) {
  Start([](FakeLoader& loader) { loader.WaitForTheEnd(); }, /*max_concurrent_loads=*/1, /*max_waiting_loads=*/1);
  Load('a');
  const WeightSetRef waiting = Load('b');
  EXPECT_THAT(loads_->Load(Wanted('c')), StatusIs(Reason::kTooManyRequests));
  EXPECT_THAT(loads_->Load(Wanted('b')), IsOk());  // joining needs no room
}

TEST_F(LoadManagerTest, CountsEachLoadOnce) {
  Start(LoadsWell());
  Await(Load('a'));
  Await(Load('b'));
  loads_->Shutdown();
  EXPECT_EQ(finished_, 2);
}

// ---- Loaders that stall.

TEST_F(LoadManagerTest, KillsALoaderThatNeverPlans) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) { loader.WaitForTheEnd(); }, std::chrono::milliseconds(100)),
              StatusIs(Reason::kLoaderStalled, HasSubstr("in ALLOCATING at 0 of 0 bytes")));
}

TEST_F(LoadManagerTest, KillsALoaderThatStopsInMidLoadSayingHowFarItWas) {
  const absl::Status failure = FailureOf(
      [](FakeLoader& loader) {
        loader.Plan(4096, 2);
        loader.Progress(v1::WEIGHT_SET_STATE_LOADING, 100);
        loader.WaitForTheEnd();
      },
      std::chrono::milliseconds(100));
  EXPECT_THAT(failure, StatusIs(Reason::kLoaderStalled, HasSubstr("--loader_stall_timeout")));
  EXPECT_THAT(failure, HasMetadata("state", "LOADING"));
  EXPECT_THAT(failure, HasMetadata("done_bytes", "100"));
}

TEST_F(LoadManagerTest, TakesNoRepetitionForProgress) {
  EXPECT_THAT(FailureOf(
                  [](FakeLoader& loader) {
                    loader.Plan(4096, 2);
                    for (int i = 0; i < 1'000; ++i) {
                      loader.Progress(v1::WEIGHT_SET_STATE_LOADING, 100);
                      std::this_thread::sleep_for(std::chrono::milliseconds(5));
                    }
                  },
                  std::chrono::milliseconds(300)),
              StatusIs(Reason::kLoaderStalled));
}

TEST_F(LoadManagerTest, LeavesALoaderAloneThatIsSlowAndGetsOn) {
  const FakeShard shard = MakeFakeShard(2);
  Start(
      [&](FakeLoader& loader) {
        loader.PlanFor(shard);
        for (int i = 1; i <= 20; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          loader.Progress(v1::WEIGHT_SET_STATE_LOADING, i);
        }
        loader.HandOver(shard);
      },
      2, 8, std::chrono::milliseconds(1'500));
  EXPECT_EQ(Await(Load()).state, v1::WEIGHT_SET_STATE_RESIDENT);
}

// ---- Loaders that die.

TEST_F(LoadManagerTest, FailsWithHowTheLoaderDiedBeforeItPlanned) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) { loader.Die("killed by SIGSEGV"); }),
              StatusIs(Reason::kLoaderFailed, HasSubstr("killed by SIGSEGV")));
}

TEST_F(LoadManagerTest, FailsWithHowTheLoaderDiedInMidLoad) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                loader.Plan(4096, 2);
                loader.Progress(v1::WEIGHT_SET_STATE_LOADING, 100);
                loader.Die("killed by SIGKILL");
              }),
              StatusIs(Reason::kLoaderFailed, HasSubstr("killed by SIGKILL")));
}

TEST_F(LoadManagerTest, FailsWhenTheLoaderDiesWhileItVerifies) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                loader.Plan(4096, 2);
                loader.Progress(v1::WEIGHT_SET_STATE_VERIFYING, 512);
              }),
              StatusIs(Reason::kLoaderFailed));
}

TEST_F(LoadManagerTest, PassesOnTheLoadersOwnError) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                loader.Fail(MakeError(Reason::kCheckpointTruncated, "model.safetensors: is truncated"));
              }),
              StatusIs(Reason::kCheckpointTruncated, HasSubstr("model.safetensors")));
}

TEST_F(LoadManagerTest, RefusesMemoryThatIsNotThere) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) { loader.Plan(int64_t{1} << 50, 2); }),
              StatusIs(Reason::kMemoryExhausted));
}

// ---- Loaders that lie.

TEST_F(LoadManagerTest, RefusesGarbage) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) { loader.SendRaw("\xff\xff\xff garbage"); }),
              StatusIs(Reason::kProtocolError, HasSubstr("not a LoadEvent")));
}

TEST_F(LoadManagerTest, RefusesAFailureWithoutAnError) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) { loader.Fail(absl::OkStatus()); }), StatusIs(Reason::kProtocolError));
}

TEST_F(LoadManagerTest, RefusesAShardThatWasNotPlanned) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) { loader.HandOver(MakeFakeShard(2)); }),
              StatusIs(Reason::kProtocolError, HasSubstr("not planned")));
}

TEST_F(LoadManagerTest, RefusesASecondPlan) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                loader.Plan(4096, 2);
                loader.Plan(4096, 2);
              }),
              StatusIs(Reason::kProtocolError));
}

TEST_F(LoadManagerTest, RefusesAShardLargerThanWhatWasGranted) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                loader.Plan(256, 20'000);
                loader.HandOver(MakeFakeShard(20'000));
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("granted 256 bytes")));
}

TEST_F(LoadManagerTest, RefusesASlabOfAnotherSizeThanItsDescriptorHas) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(2);
                loader.Plan(1 << 20, 2);
                shard.sealed.mutable_slabs(0)->set_size_bytes(shard.sealed.slabs(0).size_bytes() * 2);
                loader.HandOver(shard);
              }),
              StatusIs(Reason::kProtocolError));
}

TEST_F(LoadManagerTest, RefusesASlabThatIsNotSealed) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(2);
                loader.PlanFor(shard);
                const int64_t size_bytes = shard.sealed.slabs(0).size_bytes();
                UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
                ASSERT_EQ(ftruncate(unsealed.get(), size_bytes), 0);
                shard.fds[0] = std::move(unsealed);
                loader.HandOver(shard);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("seal")));
}

TEST_F(LoadManagerTest, RefusesAFileInPlaceOfASlab) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(2);
                loader.PlanFor(shard);
                shard.fds[0] = UniqueFd(open("/dev/zero", O_RDONLY | O_CLOEXEC));
                loader.HandOver(shard);
              }),
              StatusIs(Reason::kProtocolError));
}

TEST_F(LoadManagerTest, RefusesAMissingDescriptor) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(2);
                loader.PlanFor(shard);
                shard.fds.pop_back();
                loader.HandOver(shard);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("1 descriptors for 1 slabs and a manifest")));
}

TEST_F(LoadManagerTest, RefusesDescriptorsBeforeTheEnd) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                internal::v1::LoadEvent event;
                event.mutable_planned()->set_slab_bytes(1);
                loader.SendRaw(event.SerializeAsString(), {0});
                loader.WaitForTheEnd();
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("descriptors before")));
}

TEST_F(LoadManagerTest, RefusesAManifestWithAnotherHash) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(2);
                loader.PlanFor(shard);
                shard.sealed.set_manifest_sha256(std::string(32, 'x'));
                loader.HandOver(shard);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("SHA-256")));
}

TEST_F(LoadManagerTest, RefusesAManifestWithAnotherNumberOfTensors) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(3);
                loader.Plan(1 << 20, 4);
                shard.sealed.set_tensor_count(4);
                loader.HandOver(shard);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("3 tensors but 4")));
}

TEST_F(LoadManagerTest, RefusesAManifestWhoseTensorsLieOutsideTheSlab) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(2);
                FakeShard larger = MakeFakeShard(100);  // its manifest reaches beyond two tensors' slab
                loader.Plan(1 << 20, 100);
                larger.fds[0] = std::move(shard.fds[0]);
                larger.sealed.mutable_slabs(0)->set_size_bytes(shard.sealed.slabs(0).size_bytes());
                loader.HandOver(larger);
              }),
              StatusIs(Reason::kProtocolError, HasSubstr("of a slab of")));
}

TEST_F(LoadManagerTest, RefusesAManifestThatIsNotFramed) {
  EXPECT_THAT(FailureOf([](FakeLoader& loader) {
                FakeShard shard = MakeFakeShard(2);
                loader.PlanFor(shard);
                shard.fds[1] = MakeManifest("not frames", &shard.sealed);
                loader.HandOver(shard);
              }),
              StatusIs(Reason::kProtocolError));
}

// ---- Loads that are ended.

TEST_F(LoadManagerTest, EndsALoadWithTheCauseGivenAndItsMemoryBack) {
  Start([](FakeLoader& loader) {
    loader.Plan(4096, 2);
    loader.WaitForTheEnd();
  });
  const WeightSetRef set = Load();
  while (registry_->View(set).state != v1::WEIGHT_SET_STATE_LOADING) std::this_thread::yield();
  loads_->Cancel(set, MakeError(Reason::kCancelled, "an operator said so"));
  EXPECT_THAT(registry_->View(set).failure, StatusIs(Reason::kCancelled, HasSubstr("operator")));
  EXPECT_EQ(registry_->Totals().reserved_bytes, 0);
  EXPECT_EQ(spawner_->running_count(), 0);
  EXPECT_EQ(CountOpenFds(), fds_before_);
}

TEST_F(LoadManagerTest, EndsALoadThatWaitsForItsTurn) {
  Start([](FakeLoader& loader) { loader.WaitForTheEnd(); }, /*max_concurrent_loads=*/1);
  Load('a');
  const WeightSetRef waiting = Load('b');
  loads_->Cancel(waiting, MakeError(Reason::kCancelled, "an operator said so"));
  EXPECT_THAT(registry_->View(waiting).failure, StatusIs(Reason::kCancelled));
}

TEST_F(LoadManagerTest, CancellingAResidentSetDoesNothing) {
  Start(LoadsWell());
  const WeightSetRef set = Load();
  Await(set);
  loads_->Cancel(set, MakeError(Reason::kCancelled, "too late"));
  EXPECT_EQ(registry_->View(set).state, v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(LoadManagerTest, ShutdownEndsEveryLoadAndStartsNoMore) {
  Start([](FakeLoader& loader) { loader.WaitForTheEnd(); }, /*max_concurrent_loads=*/1);
  const WeightSetRef running = Load('a');
  const WeightSetRef waiting = Load('b');
  loads_->Shutdown();
  EXPECT_THAT(registry_->View(running).failure, StatusIs(Reason::kDraining));
  EXPECT_THAT(registry_->View(waiting).failure, StatusIs(Reason::kDraining));
  EXPECT_THAT(loads_->Load(Wanted('c')), StatusIs(Reason::kDraining));
}

// ---- Loaders that are processes.

class ProcessLoaderTest : public ::testing::Test {
 protected:
  // Loads with the program at `path` to the end.
  absl::Status FailureOf(const std::string& path) {
    Start(path);
    const WeightSetRef set = loads_->Load(Wanted('a')).value();
    while (registry_->View(set).state != v1::WEIGHT_SET_STATE_FAILED) std::this_thread::yield();
    return registry_->View(set).failure;
  }

  void Start(const std::string& path) {
    spawner_ = NewProcessLoaderSpawner(path);
    loads_ = std::make_unique<LoadManager>(LoadManagerOptions{.registry = registry_, .spawner = spawner_.get()});
  }

  // A program that holds its control socket and does nothing.
  std::string WriteSleeper() {
    const std::string path = folder_ / "sleeper";
    std::ofstream(path) << "#!/bin/sh\nexec sleep 1000\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }

  const testing::TemporaryFolder folder_;
  const std::shared_ptr<Registry> registry_ = Registry::Create({});
  std::unique_ptr<LoaderSpawner> spawner_;
  std::unique_ptr<LoadManager> loads_;
};

TEST_F(ProcessLoaderTest, SaysWithWhatCodeALoaderExited) {
  EXPECT_THAT(FailureOf("/bin/false"), StatusIs(Reason::kLoaderFailed, HasSubstr("exit code 1")));
}

TEST_F(ProcessLoaderTest, SaysThatALoaderCannotBeStarted) {
  EXPECT_THAT(FailureOf("/no/such/program"), StatusIs(Reason::kSystemError, HasSubstr("/no/such/program")));
}

TEST_F(ProcessLoaderTest, KillsALoaderThatIsCancelledAndLeavesNoChild) {
  ::testing::internal::CaptureStderr();
  Start(WriteSleeper());
  const WeightSetRef set = loads_->Load(Wanted('a')).value();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  loads_->Cancel(set, MakeError(Reason::kCancelled, "an operator said so"));
  EXPECT_THAT(registry_->View(set).failure, StatusIs(Reason::kCancelled));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("event=loader.killed"), HasSubstr("the load is ended: an operator said so")));
}

// "killed by SIGKILL" stands in the keeper's log, and reads like the kernel's work.
TEST(EndLoader, LetsALoaderEndByItselfThatHasSaidThatItFailed) {
  const testing::TemporaryFolder folder;
  const auto start = [&](const std::string& script) {
    std::ofstream(folder / "loader") << "#!/bin/sh\n" << script << "\n";
    std::filesystem::permissions(folder / "loader", std::filesystem::perms::owner_all);
    return NewProcessLoaderSpawner(folder / "loader")->Spawn({}).value();
  };
  ::testing::internal::CaptureStderr();
  const SpawnedLoader failed = start("sleep 0.2; exit 1");
  EndLoader(*failed.process, /*has_said_so=*/true, "not needed", std::chrono::seconds(30));
  EXPECT_EQ(failed.process->WaitForEnd(std::chrono::milliseconds(0)), "exit code 1");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ::testing::internal::CaptureStderr();
  const SpawnedLoader stuck = start("exec sleep 1000");
  EndLoader(*stuck.process, /*has_said_so=*/true, "it stays", std::chrono::milliseconds(100));
  EXPECT_EQ(stuck.process->WaitForEnd(std::chrono::seconds(30)), "killed by SIGKILL");
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), AllOf(HasSubstr("event=loader.killed"), HasSubstr("it stays")));
}

}  // namespace
}  // namespace weightbroker
