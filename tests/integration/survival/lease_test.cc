// Leases of engines that are processes of their own, over the ends of brokers: renewed while the weight set is there,
// counted right by Health and by the metrics, and lost when it is not.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Whether a thread of one of them has not ended yet. A zombie has, and has closed its files and let go of the socket's
// lock; but the first thread of a process may be one while others, which share its files, are still on their way.
bool IsAlive(const std::vector<pid_t>& processes) {
  for (const pid_t pid : processes) {
    std::error_code error;
    std::filesystem::directory_iterator thread("/proc/" + std::to_string(pid) + "/task", error);
    for (; !error && thread != std::filesystem::directory_iterator(); thread.increment(error)) {
      std::ifstream status(thread->path() / "status");
      for (std::string line; std::getline(status, line);) {
        if (line.rfind("State:", 0) == 0 && line.find('Z') == std::string::npos) return true;
      }
    }
  }
  return false;
}

class LeaseTest : public ::testing::Test {
 protected:
  LeaseTest()
      : metrics_port_(FreePort()),
        service_({"--metrics_address=127.0.0.1:" + std::to_string(metrics_port_), "--broker_ping_interval=50ms",
                  "--broker_ping_timeout=500ms"}) {
    CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service_.NewModel("small"));
    fingerprint_ = service_.Register("small")->fingerprint();
  }

  void StartEngines(int count) {
    for (int i = 0; i < count; ++i) {
      engines_.push_back(std::make_unique<Program>("engine", service_.EngineFlags("small", {"--hold_seconds", "600"})));
    }
    for (const auto& engine : engines_) ASSERT_TRUE(engine->WaitForLine("attached")) << engine->Errors();
  }

  // Whether Health, its weight set and the metrics come to say so; they must never say more.
  bool Counts(int leases) {
    int most = 0;
    const bool right = Eventually([&] {
      const auto health = service_.Health();
      if (!health.ok()) return false;
      most = std::max(most, health->lease_count());
      return health->lease_count() == leases && health->weight_sets(0).shards(0).lease_count() == leases &&
             ReadMetric(metrics_port_, "weightbroker_leases") == leases;
    });
    EXPECT_LE(most, static_cast<int>(engines_.size()));
    return right;
  }

  const int metrics_port_;
  const Service service_;
  std::string fingerprint_;
  std::vector<std::unique_ptr<Program>> engines_;
};

TEST_F(LeaseTest, AreRenewedAfterEveryKillAndNeitherForgottenNorCountedTwice) {
  StartEngines(4);
  ASSERT_TRUE(Counts(4));
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(KillBroker(service_, SIGKILL));
    ASSERT_TRUE(Counts(4)) << "after " << i + 1 << " kills";
  }
  // Renewed leases end as others do.
  engines_[0]->Kill(SIGKILL);
  engines_[1]->Kill(SIGTERM);
  EXPECT_TRUE(Counts(2));
  EXPECT_THAT(engines_[3]->Errors(), HasSubstr("the lease was renewed"));
  EXPECT_THAT(engines_[3]->Errors(), Not(HasSubstr("lost")));
}

TEST_F(LeaseTest, AreRenewedWhenABrokerHangsAndWhenOneIsAskedToEnd) {
  StartEngines(2);
  ASSERT_TRUE(KillBroker(service_, SIGSTOP));
  ASSERT_TRUE(Counts(2));
  ASSERT_TRUE(KillBroker(service_, SIGTERM));
  EXPECT_TRUE(Counts(2));
}

TEST_F(LeaseTest, KeepAnOperatorFromReleasingTheSetUnderTheNextBroker) {
  StartEngines(1);
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  ASSERT_TRUE(Counts(1));
  EXPECT_THAT(service_.Unregister(fingerprint_, /*force=*/false), StatusIs(Reason::kLeased, HasSubstr("has 1 lease:")));
}

TEST_F(LeaseTest, AreLostWhenTheSetIsReleasedByForceAndMemoryStaysReadable) {
  const auto weights = service_.Attach("small");
  ASSERT_TRUE(weights.ok());
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  ASSERT_TRUE(Eventually([&] { return service_.Health().ok() && service_.Health()->lease_count() == 1; }));

  ASSERT_THAT(service_.Unregister(fingerprint_, /*force=*/true), IsOk());
  ASSERT_THAT(service_.Register("small"), IsOk());  // the same contents in other memory

  ASSERT_TRUE(Eventually([&] { return weights->lease_lost(); }));
  EXPECT_EQ(weights->lease_status().reason(), "DRAINING");
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_EQ(service_.Health()->lease_count(), 0);
}

TEST_F(LeaseTest, AreLostWithAServiceThatHasLostItsWeights) {
  const auto weights = service_.Attach("small");
  ASSERT_TRUE(weights.ok());
  const std::vector<pid_t> processes = service_.Processes();
  for (const pid_t pid : processes) kill(pid, SIGKILL);
  ASSERT_TRUE(Eventually([&] { return !IsAlive(processes); }));

  Program another("weightbrokerd", {"--socket", service_.socket(), "--model_roots",
                                    "models=" + service_.ModelFolder(""), "--metrics_address", ""});
  ASSERT_TRUE(Eventually([&] { return service_.Health().ok(); })) << another.Errors();

  ASSERT_TRUE(Eventually([&] { return weights->lease_lost(); })) << another.Errors();
  // A broker that outlives its keeper by a moment still says goodbye.
  EXPECT_THAT(weights->lease_status().reason(), AnyOf("NOT_RESIDENT", "DRAINING"));
  EXPECT_TRUE(weights->Verify().ok());
}

TEST_F(LeaseTest, AnAttachIsBoundedByItsDeadlineWhileTheBrokerHangs) {
  const Service service;  // whose broker is not replaced so soon
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service.NewModel("small"));
  ASSERT_THAT(service.Register("small"), IsOk());
  const pid_t broker = BrokerOf(service);
  kill(broker, SIGSTOP);
  const auto start = std::chrono::steady_clock::now();

  const Finished engine = RunProgram("engine", service.EngineFlags("small", {"--deadline_seconds", "0.5"}));

  EXPECT_EQ(engine.exit.code, 4) << engine.errors;
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(500));
  kill(broker, SIGCONT);
}

}  // namespace
}  // namespace weightbroker::testing
