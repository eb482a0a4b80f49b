#include "server/broker/gpu_fault_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "tests/support/fake_gpu_events.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using testing::FakeGpuEvents;
using testing::GpuTrouble;
using ::testing::HasSubstr;

template <typename Condition>
bool Eventually(Condition done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!done() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  return done();
}

TEST(GpuFaultWatch, TellsOfFaultsAndNotOfWhatProgramsDidWrong) {
  GpuTrouble trouble;
  Mutex mutex;
  std::vector<uint64_t> xids;
  const GpuFaultWatch watch([&] { return std::make_unique<FakeGpuEvents>(&trouble); },
                            [&](const GpuEvent& event) {
                              MutexLock lock(mutex);
                              xids.push_back(event.xid);
                            });

  trouble.Happen({.uuid = "GPU-1", .xid = 31});
  trouble.Happen({.uuid = "GPU-1", .xid = 79});

  EXPECT_TRUE(Eventually([&] {
    MutexLock lock(mutex);
    return !xids.empty();
  }));
  MutexLock lock(mutex);
  EXPECT_THAT(xids, ::testing::ElementsAre(79u));
  EXPECT_FALSE(watch.unwatched());
}

TEST(GpuFaultWatch, SaysOnceThatFaultsAreNotWatched) {
  ::testing::internal::CaptureStderr();
  bool unwatched = false;
  {
    const GpuFaultWatch watch(
        []() -> absl::StatusOr<std::unique_ptr<GpuEventSource>> {
          return MakeError(Reason::kGpuUnavailable, "there is no driver");
        },
        [](const GpuEvent&) {});
    unwatched = Eventually([&] { return watch.unwatched(); });
  }
  EXPECT_TRUE(unwatched);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("event=gpu.faults_unwatched"));
}

TEST(GpuFaultWatch, HasNothingToSayWhereThereIsNoGpu) {
  ::testing::internal::CaptureStderr();
  std::atomic<bool> asked = false;
  {
    const GpuFaultWatch watch(
        [&]() -> absl::StatusOr<std::unique_ptr<GpuEventSource>> {
          asked = true;
          return std::unique_ptr<GpuEventSource>();
        },
        [](const GpuEvent&) {});
    EXPECT_TRUE(Eventually([&] { return asked.load(); }));
    EXPECT_FALSE(watch.unwatched());
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(GpuFaultWatch, DoesNothingWithoutASource) { EXPECT_FALSE(GpuFaultWatch(nullptr, nullptr).unwatched()); }

}  // namespace
}  // namespace weightbroker
