// A group of real engines on real weights: one serves, and whatever becomes of it, another does.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "weightbroker/engine_group.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Far more than a process of a busy machine is kept from running, but where a test waits for it.
constexpr char kPatientTimeout[] = "5000";
constexpr char kHastyTimeout[] = "300";

class StandbyTest : public ::testing::Test {
 protected:
  StandbyTest() {
    CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service_.NewModel("small"));
    const auto set = service_.Register("small");
    EXPECT_THAT(set, IsOk());
    fingerprint_ = set.ok() ? set->fingerprint() : "";
  }

  // Starts an engine, and waits until it is a member.
  Program& Join(const std::string& timeout_ms) {
    engines_.push_back(std::make_unique<Program>(
        "standby_engine",
        std::vector<std::string>{"--socket", service_.socket(), "--model", Service::Model("small"), "--torch_version",
                                 "any", "--group", "g", "--heartbeat_timeout_ms", timeout_ms}));
    EXPECT_TRUE(engines_.back()->WaitForLine("standby")) << engines_.back()->Errors();
    return *engines_.back();
  }

  nlohmann::json Group() const {
    return RunProgram("weightbroker", service_.ToolFlags("groups", {"--json"})).json["groups"][0];
  }

  GroupOptions Options(const std::string& name) const {
    GroupOptions options;
    options.name = name;
    options.fingerprint = fingerprint_;
    options.socket_path = service_.socket();
    return options;
  }

  Service service_;
  std::string fingerprint_;
  std::vector<std::unique_ptr<Program>> engines_;
};

TEST_F(StandbyTest, TheStandbyServesWhenTheActiveEngineIsKilled) {
  Program& first = Join(kPatientTimeout);
  ASSERT_TRUE(first.WaitForLine("active")) << first.Errors();
  Program& second = Join(kPatientTimeout);
  EXPECT_THAT(second.Output(), Not(HasSubstr("active")));
  first.Kill(SIGKILL);
  EXPECT_TRUE(second.WaitForLine("active")) << second.Errors();
  EXPECT_EQ(Group()["takeovers"]["died"], "1");
}

TEST_F(StandbyTest, ExactlyOneOfThreeStandbysServesNext) {
  Program& first = Join(kPatientTimeout);
  ASSERT_TRUE(first.WaitForLine("active"));
  for (int i = 0; i < 3; ++i) Join(kPatientTimeout);
  first.Kill(SIGKILL);
  const auto count_active = [&] {
    int count = 0;
    for (size_t i = 1; i < engines_.size(); ++i) count += engines_[i]->Output().find("active") != std::string::npos;
    return count;
  };
  ASSERT_TRUE(Eventually([&] { return count_active() > 0; }));
  const nlohmann::json group = Group();
  EXPECT_EQ(group["members"].size(), 3U);
  EXPECT_EQ(group["members"][0]["role"], "ROLE_ACTIVE");
  EXPECT_EQ(group["members"][1]["role"], "ROLE_STANDBY");
  EXPECT_EQ(count_active(), 1);
}

TEST_F(StandbyTest, AnEngineThatWasStoppedIsFencedAndStandsByWhenItGoesOn) {
  Program& first = Join(kHastyTimeout);
  ASSERT_TRUE(first.WaitForLine("active"));
  Program& second = Join(kHastyTimeout);
  first.Kill(SIGSTOP);
  ASSERT_TRUE(second.WaitForLine("active")) << second.Errors();
  first.Kill(SIGCONT);
  EXPECT_TRUE(first.WaitForLine("superseded")) << first.Output();
  EXPECT_TRUE(Eventually([&] { return first.Output().rfind("standby") > first.Output().find("superseded"); }));
}

TEST_F(StandbyTest, ATakeoverNeedsNoService) {
  Program& first = Join(kPatientTimeout);
  ASSERT_TRUE(first.WaitForLine("active"));
  Program& second = Join(kPatientTimeout);
  const pid_t broker = BrokerOf(service_);
  service_.program().Kill(SIGSTOP);  // so that no other broker is started
  ASSERT_EQ(kill(broker, SIGKILL), 0);

  first.Kill(SIGKILL);
  EXPECT_TRUE(second.WaitForLine("active")) << second.Errors();

  service_.program().Kill(SIGCONT);
  ASSERT_TRUE(WaitForAnotherBroker(service_, broker));
  const nlohmann::json group = Group();
  ASSERT_EQ(group["members"].size(), 1U) << "the next broker has the same page";
  EXPECT_EQ(group["members"][0]["process_id"], std::to_string(second.pid()));
  Program& third = Join(kPatientTimeout);
  second.Kill(SIGKILL);
  EXPECT_TRUE(third.WaitForLine("active")) << third.Errors();
}

TEST_F(StandbyTest, AGroupStartsAnewInALaterEpochWhenAllHaveDied) {
  Program& first = Join(kPatientTimeout);
  ASSERT_TRUE(first.WaitForLine("active"));
  Join(kPatientTimeout);
  const auto epoch = [&] { return std::stoll(Group()["epoch"].get<std::string>()); };
  const int64_t before = epoch();
  for (const auto& engine : engines_) engine->Kill(SIGKILL);
  for (const auto& engine : engines_) engine->Wait();
  Program& next = Join(kPatientTimeout);
  EXPECT_TRUE(next.WaitForLine("active"));
  EXPECT_GT(epoch(), before);
}

TEST_F(StandbyTest, AnEngineThatEndsInOrderLeavesAtOnce) {
  Program& first = Join(kPatientTimeout);
  ASSERT_TRUE(first.WaitForLine("active"));
  Program& second = Join(kPatientTimeout);
  first.Kill(SIGTERM);
  EXPECT_TRUE(second.WaitForLine("active"));
  EXPECT_TRUE(first.Wait().success());
  EXPECT_EQ(Group()["takeovers"]["left"], "1");
}

TEST_F(StandbyTest, AnEngineWithOtherWeightsIsRefused) {
  CheckpointBuilder().Tensor("w", "BF16", {32, 64}).Write(service_.NewModel("other"));
  const auto other = service_.Register("other");
  ASSERT_THAT(other, IsOk());
  const auto member = EngineGroupMember::Join(Options("g"));
  ASSERT_TRUE(member.ok()) << member.status().ToString();
  GroupOptions wrong = Options("g");
  wrong.fingerprint = other->fingerprint();
  const auto refused = EngineGroupMember::Join(wrong);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().reason(), "GROUP_MISMATCH");
  EXPECT_EQ(refused.status().metadata().at("found"), fingerprint_);
}

TEST_F(StandbyTest, AMemberOfThisProcessIsAsTheHeaderSays) {
  auto member = EngineGroupMember::Join(Options("g"));
  ASSERT_TRUE(member.ok()) << member.status().ToString();
  const auto epoch = member->WaitUntilActive(std::chrono::seconds(60));
  ASSERT_TRUE(epoch.ok()) << epoch.status().ToString();
  EXPECT_TRUE(member->IsActive(*epoch));
  EXPECT_EQ(member->role(), GroupRole::kActive);
  EXPECT_EQ(member->epoch(), *epoch);
  EXPECT_EQ(member->heartbeat_timeout(), std::chrono::milliseconds(200));
  member->StepDown();
  EXPECT_FALSE(member->IsActive(*epoch));
  const auto next = member->WaitUntilActive(std::chrono::seconds(60));
  ASSERT_TRUE(next.ok());
  EXPECT_GT(*next, *epoch);
  EXPECT_TRUE(member->Rejoin().ok());
  member->Leave();
  EXPECT_EQ(member->role(), GroupRole::kLeft);
  EXPECT_EQ(member->status().reason(), "CANCELLED");
  EXPECT_EQ(member->WaitUntilActive(std::chrono::seconds(60)).status().reason(), "CANCELLED");
}

TEST_F(StandbyTest, AGroupIsRemovedOnceItHasNoMembers) {
  auto member = EngineGroupMember::Join(Options("g"));
  ASSERT_TRUE(member.ok());
  const auto remove = [&] { return RunProgram("weightbroker", service_.ToolFlags("groups", {"--remove", "g"})); };
  const Finished refused = remove();
  EXPECT_EQ(refused.exit.code, 3);
  EXPECT_THAT(refused.errors, HasSubstr("GROUP_IN_USE"));
  member->Leave();
  EXPECT_EQ(remove().exit.code, 0);
  EXPECT_THAT(RunProgram("weightbroker", service_.ToolFlags("groups")).output, HasSubstr("no engine groups"));
  EXPECT_THAT(service_.program().Errors(), HasSubstr("event=group.removed group=g"));
}

TEST_F(StandbyTest, TheServiceLogsWhoHasBecomeActiveAndWhy) {
  Program& first = Join(kPatientTimeout);
  ASSERT_TRUE(first.WaitForLine("active"));
  Program& second = Join(kPatientTimeout);
  first.Kill(SIGKILL);
  ASSERT_TRUE(second.WaitForLine("active"));
  EXPECT_TRUE(Eventually([&] {
    const std::string log = service_.program().Errors();
    const size_t line = log.find("process_id=" + std::to_string(second.pid()));
    return line != std::string::npos && log.find("died=1", line) != std::string::npos;
  })) << service_.program().Errors();
}

}  // namespace
}  // namespace weightbroker::testing
