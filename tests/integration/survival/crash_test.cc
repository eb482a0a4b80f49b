// SIGKILL of the broker before, after and once answered, of every message between it and the keeper, while it loads a
// model: the next broker finishes the load, nothing is lost that was resident, and nothing is left behind.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

// A broker's messages in its order: hello, ready; for a load put (the load), spawn_loader, put (the generation), put
// (the shard), drop (the load); for a release drop (the shard).
class CrashTest : public ::testing::TestWithParam<const char*> {
 protected:
  CrashTest() : token_(folder_ / "token") {
    WriteFile(token_, "once");
    setenv("WEIGHTBROKER_TEST_CRASH_AT", (std::string("keeper_message:") + GetParam()).c_str(), 1);
    setenv("WEIGHTBROKER_TEST_CRASH_TOKEN", token_.c_str(), 1);
    service_ = std::make_unique<Service>(std::vector<std::string>{"--broker_ping_interval=50ms"});
    unsetenv("WEIGHTBROKER_TEST_CRASH_AT");
    unsetenv("WEIGHTBROKER_TEST_CRASH_TOKEN");
    CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service_->NewModel("small"));
    memfds_before_ = service_->CountMemfds();
  }

  const TemporaryFolder folder_;
  const std::string token_;
  std::unique_ptr<Service> service_;
  int memfds_before_ = 0;
};

TEST_P(CrashTest, LosesNothingThatWasResidentAndLeavesNothingBehind) {
  absl::StatusOr<v1::WeightSet> set = service_->Register("small");
  ASSERT_TRUE(Eventually([&] {
    if (!set.ok()) set = service_->Register("small");
    return set.ok();
  })) << set.status();
  // A generation that was written down is not given out again, though nobody may have seen it.
  EXPECT_GE(set->generation(), 1);
  EXPECT_LE(set->generation(), 2);

  auto weights = service_->Attach("small");
  ASSERT_TRUE(Eventually([&] {
    if (!weights.ok()) weights = service_->Attach("small");
    return weights.ok();
  })) << weights.status().message();
  EXPECT_EQ(weights->generation(), set->generation());
  EXPECT_TRUE(weights->Verify().ok());

  auto released = service_->Unregister(set->fingerprint(), /*force=*/true);
  // The answer may have been lost with its broker: then the set is gone, or is still there.
  EXPECT_TRUE(Eventually([&] {
    if (!released.ok()) released = service_->Unregister(set->fingerprint(), /*force=*/true);
    return released.ok() || HasReason(released.status(), Reason::kWeightSetUnknown);
  })) << released.status();
  EXPECT_TRUE(Eventually([&] { return !std::filesystem::exists(token_); })) << "it never came to that point";
  ASSERT_TRUE(WaitForStatus(*service_, v1::HealthResponse::STATUS_IDLE));
  EXPECT_EQ(service_->Health()->reserved_bytes(), 0);
  EXPECT_TRUE(Eventually([&] { return service_->CountMemfds() == memfds_before_; }))
      << service_->CountMemfds() << " memfds are left of " << memfds_before_;
  EXPECT_THAT(service_->Loaders(), IsEmpty());
  EXPECT_THAT(service_->Processes(), SizeIs(2));  // keeper and broker
}

std::string NameOf(const ::testing::TestParamInfo<const char*>& param) {
  std::string name = param.param;
  for (char& c : name) c = c == ':' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(EveryMessage, CrashTest,
                         ::testing::Values("hello:before:1", "hello:after:1", "welcome:before:1", "welcome:after:1",
                                           "end_of_entries:before:1", "end_of_entries:after:1", "ready:before:1",
                                           "ready:after:1", "put:before:1", "put:after:1", "put:acked:1",
                                           "spawn_loader:before:1", "spawn_loader:after:1", "spawn_loader:acked:1",
                                           "spawned:before:1", "spawned:after:1", "put:before:2", "put:after:2",
                                           "put:acked:2", "put:before:3", "put:after:3", "put:acked:3", "drop:before:1",
                                           "drop:after:1", "drop:acked:1", "drop:before:2", "drop:after:2",
                                           "drop:acked:2", "exited:before:1", "exited:after:1", "ack:before:1",
                                           "ack:after:1", "ack:after:2", "ack:after:3", "ping:before:1", "ping:after:1",
                                           "pong:before:1", "pong:after:1"),
                         NameOf);

// The broker that has a set dies by the test's hand; its successor dies at the point while it takes over.
class AdoptionCrashTest : public ::testing::TestWithParam<const char*> {};

TEST_P(AdoptionCrashTest, LeavesTheSetToTheBrokerAfterTheNext) {
  const TemporaryFolder folder;
  const std::string token = folder / "token";
  setenv("WEIGHTBROKER_TEST_CRASH_AT", (std::string("keeper_message:") + GetParam()).c_str(), 1);
  setenv("WEIGHTBROKER_TEST_CRASH_TOKEN", token.c_str(), 1);
  const Service service;
  unsetenv("WEIGHTBROKER_TEST_CRASH_AT");
  unsetenv("WEIGHTBROKER_TEST_CRASH_TOKEN");
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service.NewModel("small"));
  ASSERT_THAT(service.Register("small"), IsOk());
  // A loader that is about to end still has descriptors of what it has loaded.
  ASSERT_TRUE(Eventually([&] { return service.Loaders().empty(); }));
  const int memfds = service.CountMemfds();

  WriteFile(token, "once");
  ASSERT_TRUE(KillBroker(service, SIGKILL));
  ASSERT_TRUE(Eventually([&] { return !std::filesystem::exists(token); })) << "it never came to that point";
  auto weights = service.Attach("small");
  ASSERT_TRUE(Eventually([&] {
    if (!weights.ok()) weights = service.Attach("small");
    return weights.ok();
  })) << weights.status().message();
  EXPECT_EQ(weights->generation(), 1);
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_TRUE(Eventually([&] { return service.CountMemfds() == memfds; }));
}

INSTANTIATE_TEST_SUITE_P(EveryMessage, AdoptionCrashTest,
                         ::testing::Values("welcome:before:1", "entry:before:1", "entry:after:1", "entry:after:2",
                                           "end_of_entries:before:1", "end_of_entries:after:1", "ready:before:1",
                                           "ready:after:1"),
                         NameOf);

}  // namespace
}  // namespace weightbroker::testing
