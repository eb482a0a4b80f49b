// What is left when a process dies: nothing that anyone has to clean up.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>

#include "absl/strings/match.h"
#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using Clock = std::chrono::steady_clock;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

void WriteSmallModel(const Service& service) {
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service.NewModel("small"));
}

TEST(DeathOfAnEngine, EndsItsLeaseAtOnce) {
  const Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  Program engine("engine", service.EngineFlags("small", {"--hold_seconds", "600"}));
  ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors();
  ASSERT_EQ(service.Health()->lease_count(), 1);

  engine.Kill(SIGKILL);
  pollfd ended = {engine.pidfd(), POLLIN, 0};
  ASSERT_EQ(poll(&ended, 1, 10'000), 1);
  const auto reported = Clock::now();
  while (service.Health()->lease_count() != 0 && Clock::now() - reported < kPatience) {
  }
  const std::chrono::duration<double, std::milli> after = Clock::now() - reported;

  printf("lease gone %.2f ms after the kernel reported the engine's exit\n", after.count());
  RecordProperty("lease_gone_after_ms", std::to_string(after.count()));
  EXPECT_LT(after.count(), 1'000) << "20 ms are promised; the margin is for a busy machine";
}

TEST(DeathOfALoader, FailsItsLoadGivesTheMemoryBackAndLeavesTheNextLoadAlone) {
  const Service service;
  WriteSparseModel(service.NewModel("slow"));
  WriteSmallModel(service);
  const int memfds_before = service.CountMemfds();
  bool killed = false;

  const auto failed = service.Register("slow", [&](const LoadProgress& progress) {
    if (killed || progress.done_bytes == 0) return;
    for (const pid_t loader : service.Loaders()) killed = kill(loader, SIGKILL) == 0;
  });

  ASSERT_TRUE(killed) << "the load was over before it could be caught";
  EXPECT_THAT(failed, StatusIs(Reason::kLoaderFailed));
  EXPECT_THAT(service.Loaders(), IsEmpty());
  EXPECT_EQ(service.CountMemfds(), memfds_before);
  const auto health = service.Health();
  ASSERT_THAT(health, IsOk());
  EXPECT_EQ(health->reserved_bytes(), 0);
  EXPECT_EQ(health->load_count(), 0);
  EXPECT_THAT(service.Register("small"), IsOk());
  EXPECT_THAT(service.Register("slow"), IsOk()) << "also what has failed before";
}

TEST(FailureOfALoad, IsNotFollowedInTheLogByALoaderThatSomebodyKilled) {
  Service service;
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service.NewModel("bad"));
  std::filesystem::resize_file(service.ModelFolder("bad") + "/model.safetensors", 1000);

  EXPECT_THAT(service.Register("bad"), StatusIs(Reason::kCheckpointTruncated));

  EXPECT_TRUE(Eventually([&] { return absl::StrContains(service.program().Errors(), "event=loader.ended"); }));
  EXPECT_THAT(service.program().Errors(), Not(HasSubstr("SIGKILL")));
}

TEST(StallOfALoader, FailsItsLoadSayingHowFarItWasAndGivesTheMemoryBack) {
  Service service({"--loader_stall_timeout=3s"});
  WriteSparseModel(service.NewModel("slow"));
  const int memfds_before = service.CountMemfds();
  bool stopped = false;

  const auto failed = service.Register("slow", [&](const LoadProgress& progress) {
    if (stopped || progress.done_bytes == 0) return;
    for (const pid_t loader : service.Loaders()) stopped = kill(loader, SIGSTOP) == 0;
  });

  ASSERT_TRUE(stopped) << "the load was over before it could be caught";
  EXPECT_THAT(failed, StatusIs(Reason::kLoaderStalled, HasSubstr("in LOADING at ")));
  EXPECT_THAT(service.program().Errors(), HasSubstr("event=load.stalled"));
  EXPECT_TRUE(Eventually([&] { return service.Loaders().empty(); }));
  EXPECT_TRUE(Eventually([&] { return service.CountMemfds() == memfds_before; }));
  EXPECT_EQ(service.Health()->reserved_bytes(), 0);
}

TEST(DeathOfTheService, LeavesWhatIsMappedAndTellsTheEngine) {
  Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  const auto weights = service.Attach("small");
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();

  for (const pid_t pid : service.Processes()) kill(pid, SIGKILL);

  EXPECT_TRUE(Eventually([&] { return !weights->lease_status().ok(); }));
  // A broker that outlives its keeper by a moment still says goodbye.
  EXPECT_THAT(weights->lease_status().reason(), AnyOf("SERVICE_UNAVAILABLE", "DRAINING"));
  EXPECT_TRUE(weights->Verify().ok());
}

TEST(DeathOfACaller, LeavesTheLoadItAskedForGoingOn) {
  const Service service;
  WriteSparseModel(service.NewModel("slow"));
  Program tool("weightbroker", service.ToolFlags("register", {"models:slow", "--torch_version", "any"}));
  ASSERT_TRUE(Eventually([&] { return service.Health()->load_count() == 1; }));

  tool.Kill(SIGKILL);

  EXPECT_THAT(service.Register("slow"), IsOk());
  EXPECT_EQ(service.Health()->weight_sets(0).generation(), 1) << "joined, not started again";
}

}  // namespace
}  // namespace weightbroker::testing
