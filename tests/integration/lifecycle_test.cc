// From start to shutdown: one service a socket, leases that pin, and a quiet end.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "common/base/unique_fd.h"
#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

void WriteSmallModel(const Service& service) {
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service.NewModel("small"));
}

TEST(SecondService, IsRefusedAndLeavesTheFirstUndisturbed) {
  const Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  const auto weights = service.Attach("small");
  ASSERT_TRUE(weights.ok());

  const Finished second = RunProgram("weightbrokerd", {"--socket", service.socket(), "--metrics_address", "127.0.0.1:0",
                                                       "--model_roots", "models=" + service.ModelFolder("")});

  EXPECT_FALSE(second.exit.success());
  EXPECT_THAT(second.errors, HasSubstr("a service is already running on " + service.socket()));
  EXPECT_FALSE(weights->lease_lost());
  EXPECT_EQ(service.Health()->lease_count(), 1);
  EXPECT_TRUE(service.Attach("small").ok());
}

TEST(Log, IsNotWaitedForThoughNobodyReadsIt) {
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  const UniqueFd read_end(fds[0]);
  UniqueFd write_end(fds[1]);
  ASSERT_GT(fcntl(write_end.get(), F_SETPIPE_SZ, 4096), 0);
  Service service({}, write_end.get());
  write_end.reset();
  WriteSmallModel(service);
  for (int i = 0; i < 100; ++i) ASSERT_THAT(service.Unregister("0123abcd", false), StatusIs(Reason::kWeightSetUnknown));
  ASSERT_THAT(service.Register("small"), IsOk()) << "a loader that waits for its log";
  EXPECT_TRUE(service.Attach("small").ok());
  service.program().Kill(SIGTERM);
  EXPECT_TRUE(service.program().Wait().success());
}

TEST(Limits, ABrokerServesAndHasModelsLoadedWithFewOpenFiles) {
  const TemporaryFolder folder;
  const std::string broker = folder / "broker";
  WriteFile(broker, "#!/bin/sh\nulimit -n 256\nexec " WEIGHTBROKER_BIN_DIR "/weightbroker-broker \"$@\"\n");
  std::filesystem::permissions(broker, std::filesystem::perms::owner_all);
  const Service service({"--broker_path=" + broker});
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  EXPECT_TRUE(service.Attach("small").ok());
}

TEST(Sigterm, DrainsAndEndsWithoutAnError) {
  Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  const auto weights = service.Attach("small");
  ASSERT_TRUE(weights.ok());

  service.program().Kill(SIGTERM);
  const ExitStatus exit = service.program().Wait();

  EXPECT_TRUE(exit.success()) << exit.ToString() << "\n" << service.program().Errors();
  EXPECT_TRUE(Eventually([&] { return !weights->lease_status().ok(); }));
  EXPECT_EQ(weights->lease_status().reason(), "DRAINING") << weights->lease_status().ToString();
  EXPECT_TRUE(weights->Verify().ok()) << "what is mapped outlives the service";
}

TEST(Unregister, IsRefusedWhileAnEngineHoldsALease) {
  const Service service;
  WriteSmallModel(service);
  const auto set = service.Register("small");
  ASSERT_THAT(set, IsOk());
  const auto weights = service.Attach("small");
  ASSERT_TRUE(weights.ok());

  EXPECT_THAT(service.Unregister(set->fingerprint(), /*force=*/false), StatusIs(Reason::kLeased));
  EXPECT_FALSE(weights->lease_lost());
}

TEST(Unregister, ByForceEndsTheLeaseAndKeepsTheMappingValid) {
  const Service service;
  WriteSmallModel(service);
  const auto set = service.Register("small");
  ASSERT_THAT(set, IsOk());
  const auto weights = service.Attach("small");
  ASSERT_TRUE(weights.ok());

  const auto forced = service.Unregister(set->fingerprint(), /*force=*/true);

  ASSERT_THAT(forced, IsOk());
  EXPECT_EQ(forced->ended_lease_count(), 1);
  EXPECT_TRUE(Eventually([&] { return weights->lease_lost(); }));
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_EQ(service.Attach("small").status().reason(), "NOT_RESIDENT");
  const auto again = service.Register("small");
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->generation(), 2);
}

TEST(Unregister, GivesTheMemoryBack) {
  const Service service;
  WriteSmallModel(service);
  const int memfds_before = service.CountMemfds();
  const auto set = service.Register("small");
  ASSERT_THAT(set, IsOk());
  EXPECT_GT(service.CountMemfds(), memfds_before);

  ASSERT_THAT(service.Unregister(set->fingerprint().substr(0, 8), /*force=*/false), IsOk());

  EXPECT_TRUE(Eventually([&] { return service.CountMemfds() == memfds_before; }));
  EXPECT_EQ(service.Health()->reserved_bytes(), 0);
}

TEST(Attaching, FailsNamingEveryFieldThatDiffers) {
  const Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());

  const Status status = service.Attach("small", "2.11.0").status();

  EXPECT_EQ(status.reason(), "FINGERPRINT_MISMATCH");
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.metadata(), Contains(::testing::Pair("environment.torch_version.requested", "2.11.0")));
  EXPECT_THAT(status.metadata(), Contains(::testing::Pair("environment.torch_version.resident", "any")));
}

TEST(Attaching, LoadsAnotherSetWhereAskedToRegisterWhatIsMissing) {
  const Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());

  const Finished engine =
      RunProgram("engine", {"--socket", service.socket(), "--model", "models:small", "--torch_version", "2.11.0",
                            "--register", "--fallback", "fail", "--json"});

  ASSERT_TRUE(engine.exit.success()) << engine.errors;
  EXPECT_EQ(service.Health()->weight_sets_size(), 2);
}

}  // namespace
}  // namespace weightbroker::testing
