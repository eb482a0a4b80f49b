// The real service with a file that says what it is to hold.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/integration/survival/survival.h"
#include "tests/integration/versions/stamped_model.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using Json = nlohmann::json;

constexpr char kAlias[] = "model@live";

class DesiredTest : public ::testing::Test {
 protected:
  DesiredTest() : file_(folder_ / "sets.json"), port_(FreePort()) {
    NewModel("a", 1);
    Write({"a"}, {{kAlias, "a"}});
  }

  void NewModel(const std::string& name, uint64_t version) const {
    const std::string path = folder_ / ("warm/" + name);
    std::filesystem::create_directories(path);
    WriteStampedModel(path, version, 4, 64 << 10);
  }

  void Write(const std::vector<std::string>& models, const std::map<std::string, std::string>& aliases = {}) const {
    Json sets = Json::array();
    for (const std::string& model : models) {
      sets.push_back({{"name", model}, {"model", "warm:" + model}, {"torch_version", "any"}, {"devices", {"host"}}});
    }
    WriteFile(file_, Json({{"version", 1}, {"sets", sets}, {"aliases", aliases}}).dump());
  }

  std::vector<std::string> Flags() const {
    return {"--desired=" + file_, "--model_roots=warm=" + (folder_ / "warm"),
            "--metrics_address=127.0.0.1:" + std::to_string(port_)};
  }

  void Start() { service_ = std::make_unique<Service>(Flags()); }
  void StartAndWait() {
    Start();
    ASSERT_TRUE(IsReady());
  }
  bool IsReady() const { return WaitForStatus(*service_, v1::HealthResponse::STATUS_READY); }
  // True also if nobody can say.
  bool IsPinned(const std::string& model) const {
    const auto health = service_->Health();
    if (!health.ok()) return true;
    return std::any_of(health->weight_sets().begin(), health->weight_sets().end(), [&](const v1::WeightSet& set) {
      return set.spec().model() == folder_ / ("warm/" + model) && set.pinned();
    });
  }
  void Reload() const { kill(service_->program().pid(), SIGHUP); }
  Finished Tool(const std::string& command, const std::vector<std::string>& more = {}) const {
    return RunProgram("weightbroker", service_->ToolFlags(command, more));
  }
  // Of `alias`, whose flags stand behind a command of its own.
  Finished Alias(std::vector<std::string> words) const {
    words.insert(words.begin(), "alias");
    words.insert(words.end(), {"--socket", service_->socket()});
    return RunProgram("weightbroker", words);
  }

  Result<MappedWeights> AttachByAlias() const {
    ClientOptions client;
    client.mode = Mode::kClient;
    client.torch_version = "any";
    client.socket_path = service_->socket();
    AttachOptions attach;
    attach.fallback = Fallback::kFail;
    attach.alias = kAlias;
    return Client::Create(client)->Attach({}, attach);
  }

  const TemporaryFolder folder_;
  const std::string file_;
  const int port_;
  std::unique_ptr<Service> service_;
};

TEST_F(DesiredTest, BecomesReadyByItself) {
  StartAndWait();
  const auto health = service_->Health();
  ASSERT_THAT(health, IsOk());
  ASSERT_THAT(health->weight_sets(), SizeIs(1));
  EXPECT_TRUE(health->weight_sets(0).pinned());
  EXPECT_EQ(health->desired_sets(0).state(), v1::DesiredSet::STATE_RESIDENT);
  EXPECT_EQ(health->desired_sets(0).fingerprint(), health->weight_sets(0).fingerprint());
  EXPECT_TRUE(health->desired_aliases(0).in_place());
  const auto weights = AttachByAlias();
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_EQ(Tool("desired").exit.code, 0);
  EXPECT_EQ(ReadMetric(port_, "weightbroker_ready"), 1);
  EXPECT_THAT(ScrapeMetrics(port_), HasSubstr("weightbroker_desired_sets{state=\"resident\"} 1\n"));
}

TEST_F(DesiredTest, LoadsNothingAgainWhenTheBrokerIsKilled) {
  StartAndWait();
  const std::string before = service_->Health()->weight_sets(0).fingerprint();
  OpenWatch watch(folder_ / "warm/a");
  ASSERT_TRUE(KillBroker(*service_, SIGKILL));
  ASSERT_TRUE(IsReady());
  const auto health = service_->Health();
  ASSERT_THAT(health->weight_sets(), SizeIs(1));
  EXPECT_EQ(health->weight_sets(0).fingerprint(), before);
  EXPECT_EQ(health->weight_sets(0).generation(), 1);
  EXPECT_TRUE(health->weight_sets(0).has_adopt_time());
  EXPECT_THAT(watch.Opened(), Not(::testing::Contains("model.safetensors")));
}

TEST_F(DesiredTest, TakesUpOneMoreSetWhenItIsToldToReadTheFileAgain) {
  StartAndWait();
  NewModel("b", 2);
  Write({"a", "b"}, {{kAlias, "b"}});
  Reload();
  ASSERT_TRUE(Eventually([this] { return service_->Health()->desired_sets_size() == 2; }));
  ASSERT_TRUE(IsReady());
  const auto health = service_->Health();
  EXPECT_THAT(health->weight_sets(), SizeIs(2));
  EXPECT_EQ(health->desired_aliases(0).fingerprint(), health->desired_sets(1).fingerprint());
  const auto weights = AttachByAlias();
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(weights->fingerprint(), health->desired_sets(1).fingerprint());
}

// What the file pinned is told from what somebody pinned, by a broker that was not there for either.
TEST_F(DesiredTest, UnpinsWhatHasLeftTheFileWhileNoBrokerRanAndNotWhatIsPinnedByHand) {
  NewModel("b", 2);
  NewModel("c", 3);
  Write({"a", "b", "c"}, {{kAlias, "a"}});
  StartAndWait();
  v1::RegisterRequest by_hand;
  by_hand.mutable_spec()->set_model("warm:c");
  by_hand.mutable_environment()->set_torch_version("any");
  by_hand.set_pinned(true);
  ASSERT_THAT(service_->Register(by_hand), IsOk());
  Write({"a", "typo"}, {{kAlias, "a"}});
  ASSERT_TRUE(KillBroker(*service_, SIGKILL));
  EXPECT_TRUE(Eventually([this] { return !IsPinned("b"); })) << "though another model is not to be found";
  EXPECT_TRUE(IsPinned("a"));
  EXPECT_TRUE(IsPinned("c"));
  EXPECT_THAT(service_->Health()->weight_sets(), SizeIs(3));
}

TEST_F(DesiredTest, KeepsPinnedWhatWasMadeFromAFolderOfTheFileThatCannotBeReadNow) {
  StartAndWait();
  const std::string before = service_->Health()->weight_sets(0).fingerprint();
  std::filesystem::resize_file(folder_ / "warm/a/model.safetensors", 4);
  ASSERT_TRUE(KillBroker(*service_, SIGKILL));
  ASSERT_TRUE(Eventually([this] {
    const auto health = service_->Health();
    return health.ok() && health->desired_sets(0).may_prove_to_be_size() == 1;
  }));
  EXPECT_EQ(service_->Health()->desired_sets(0).may_prove_to_be(0), before);
  EXPECT_TRUE(IsPinned("a"));
  EXPECT_THAT(Tool("desired").output, HasSubstr("may prove to be " + before.substr(0, 12)));
  EXPECT_THAT(service_->program().Errors(), HasSubstr("event=desired.stays_pinned"));
}

TEST_F(DesiredTest, IsNotReadyWhileSomebodyHoldsASetWithOtherRanks) {
  std::filesystem::create_directories(folder_ / "warm/split");
  CheckpointBuilder().Tensor("model.norm.weight", "BF16", {64}).Write(folder_ / "warm/split");
  Write({});
  Start();
  v1::RegisterRequest partial;
  partial.mutable_spec()->set_model("warm:split");
  partial.mutable_spec()->set_tensor_parallel_size(2);
  partial.mutable_environment()->set_torch_version("any");
  partial.add_ranks(0);
  const auto registered = service_->Register(partial);
  ASSERT_THAT(registered, IsOk());
  WriteFile(
      file_,
      R"({"version": 1, "sets": [{"name": "whole", "model": "warm:split", "torch_version": "any", "tensor_parallel_size": 2}]})");
  Reload();
  ASSERT_TRUE(Eventually([this] {
    const auto health = service_->Health();
    return health->desired_sets_size() == 1 && health->desired_sets(0).failure().reason() == "PLACEMENT_MISMATCH";
  }));
  EXPECT_EQ(service_->Health()->desired_sets(0).state(), v1::DesiredSet::STATE_FAILED);
  EXPECT_NE(service_->Health()->status(), v1::HealthResponse::STATUS_READY);
  const Finished desired = Tool("desired");
  EXPECT_EQ(desired.exit.code, 1);
  EXPECT_THAT(desired.output, HasSubstr("0, where 0-1 are asked for"));
  EXPECT_THAT(ScrapeMetrics(port_), HasSubstr("weightbroker_desired_sets{state=\"failed\"} 1\n"));
  ASSERT_THAT(service_->Unregister(registered->fingerprint(), /*force=*/false), IsOk());
  ASSERT_TRUE(IsReady());
  EXPECT_THAT(service_->Health()->weight_sets(0).shards(), SizeIs(2));
}

TEST_F(DesiredTest, KeepsWhatItHadWhenTheFileIsBrokenAndSaysSoUntilItIsMended) {
  StartAndWait();
  WriteFile(file_, R"({"version": 1, "sets": [{"name": "a", "modle": "warm:a", "torch_version": "any"}]})");
  Reload();
  ASSERT_TRUE(Eventually([this] { return ReadMetric(port_, "weightbroker_desired_file_refused") == 1; }));
  EXPECT_EQ(service_->Health()->status(), v1::HealthResponse::STATUS_READY);
  EXPECT_THAT(service_->Health()->desired_failure().message(), HasSubstr("/sets/0/modle"));
  EXPECT_THAT(service_->program().Errors(), HasSubstr("event=desired.refused"));
  EXPECT_EQ(Tool("status").exit.code, 0);
  const Finished desired = Tool("desired");
  EXPECT_EQ(desired.exit.code, 1);
  EXPECT_THAT(desired.output, HasSubstr("the nearest is \"model\""));
  EXPECT_THAT(desired.output, HasSubstr("what was read before is in force"));
  EXPECT_THAT(Tool("status", {"--json"}).json["desired_failure"]["message"], HasSubstr("/sets/0/modle"));
  Write({"a"}, {{kAlias, "a"}});
  Reload();
  EXPECT_TRUE(Eventually([this] { return ReadMetric(port_, "weightbroker_desired_file_refused") == 0; }));
}

TEST_F(DesiredTest, DoesNotStartWithAFileThatIsWrong) {
  WriteFile(file_, R"({"version": 1, "sets": 7})");
  std::vector<std::string> flags = Flags();
  flags.push_back("--socket=" + (folder_ / "s.sock"));
  const Finished refused = RunProgram("weightbrokerd", flags);
  EXPECT_EQ(refused.exit.code, 2);
  EXPECT_THAT(refused.errors, HasSubstr(file_ + ": /sets: must be an array, and is number"));
  flags.emplace_back("--check_config");
  const Finished checked = RunProgram("weightbrokerd", flags);
  EXPECT_EQ(checked.exit.code, 2);
  EXPECT_THAT(checked.errors, HasSubstr("/sets"));
}

// A configuration that was found valid starts.
TEST_F(DesiredTest, FindsWhateverTheStartWouldRefuseWhenTheConfigurationIsChecked) {
  std::vector<std::string> flags = Flags();
  flags.push_back("--socket=" + (folder_ / "s.sock"));
  const auto refused = [&](const std::string& what) {
    EXPECT_THAT(RunProgram("weightbrokerd", flags).errors, HasSubstr(what));
    std::vector<std::string> checking = flags;
    checking.emplace_back("--check_config");
    std::vector<std::string> detaching = flags;
    detaching.emplace_back("--detach");
    const Finished detached = RunProgram("weightbrokerd", detaching);
    EXPECT_EQ(detached.exit.code, 2) << detached.errors;
    EXPECT_THAT(detached.errors, HasSubstr(what));
    for (const char* program : {"weightbrokerd", "weightbroker-broker"}) {
      const Finished checked = RunProgram(program, checking);
      EXPECT_EQ(checked.exit.code, 2) << program;
      EXPECT_THAT(checked.errors, HasSubstr(what)) << program;
      EXPECT_EQ(checked.output, "") << program;
    }
  };
  const Json set = {{"name", "a"}, {"model", "warm:a"}, {"torch_version", "any"}};
  Json again = set;
  again["name"] = "b";
  WriteFile(file_, Json({{"version", 1}, {"sets", {set, again}}}).dump());
  refused(file_ + ": /sets/1: ");  // the same weights
  again["model"] = "wram:a";
  WriteFile(file_, Json({{"version", 1}, {"sets", {set, again}}}).dump());
  refused(file_ + ": /sets/1/model: there is no model root");
  std::filesystem::remove(file_);
  refused("weightbroker");  // names itself
  EXPECT_THAT(RunProgram("weightbrokerd", flags).errors, Not(HasSubstr(file_ + ": " + file_)));

  Write({"a"});
  flags.emplace_back("--check_config");
  const Finished valid = RunProgram("weightbrokerd", flags);
  EXPECT_EQ(valid.exit.code, 0) << valid.errors;
  EXPECT_THAT(valid.output, ::testing::StartsWith("weightbrokerd: the configuration is valid"));
  EXPECT_THAT(valid.output, Not(HasSubstr("weightbroker-broker")));
}

// What is resident is worth more than a file.
TEST_F(DesiredTest, ServesWhatIsResidentWhenABrokerTakesOverWithAFileThatIsWrong) {
  StartAndWait();
  WriteFile(file_, "nonsense");
  ASSERT_TRUE(KillBroker(*service_, SIGKILL));
  ASSERT_TRUE(WaitForStatus(*service_, v1::HealthResponse::STATUS_LOADING));
  EXPECT_TRUE(AttachByAlias().ok());
  EXPECT_THAT(service_->Health()->desired_failure().message(), HasSubstr("sets.json"));
  const Finished desired = Tool("desired");
  EXPECT_THAT(desired.output, HasSubstr("nothing is in force until it is mended and read again"));
  EXPECT_THAT(desired.output, Not(HasSubstr("what was read before")));
  const Finished status = Tool("status", {"--json"});
  EXPECT_EQ(status.json["status"], "INCOMPLETE");
  EXPECT_EQ(status.json["desired_failure"]["reason"], "CONFIGURATION_INVALID");
  Write({"a"}, {{kAlias, "a"}});
  Reload();
  EXPECT_TRUE(IsReady());
  EXPECT_EQ(service_->Health()->weight_sets(0).generation(), 1);
}

TEST_F(DesiredTest, IsNotReadyWithoutOneOfThemSaysWhichAndTriesAgainUntilTheModelIsThere) {
  Write({"missing", "a"}, {{kAlias, "a"}});
  Start();
  ASSERT_TRUE(
      Eventually([this] { return service_->Health()->desired_sets(1).state() == v1::DesiredSet::STATE_RESIDENT; }));
  ASSERT_TRUE(
      Eventually([this] { return service_->Health()->desired_sets(0).state() == v1::DesiredSet::STATE_FAILED; }));
  EXPECT_EQ(service_->Health()->status(), v1::HealthResponse::STATUS_LOADING);
  EXPECT_TRUE(Eventually([this] { return service_->Health()->desired_aliases(0).in_place(); }));
  EXPECT_TRUE(AttachByAlias().ok());  // what is there can be had meanwhile
  const Finished status = Tool("status");
  EXPECT_EQ(status.exit.code, 1);
  EXPECT_THAT(status.output, HasSubstr("missing"));
  EXPECT_THAT(status.output, HasSubstr("MODEL_NOT_FOUND"));
  EXPECT_THAT(status.output, ::testing::StartsWith("INCOMPLETE: 1 set resident"));
  EXPECT_THAT(Tool("health").output, HasSubstr("INCOMPLETE"));
  const Json json = Tool("status", {"--json"}).json;
  EXPECT_THAT(json["missing"], ElementsAre("missing"));
  EXPECT_EQ(json["status"], "INCOMPLETE");
  EXPECT_EQ(json["desired_failure"], nullptr);
  ASSERT_THAT(json["failures"], SizeIs(1));
  EXPECT_EQ(json["failures"][0]["set"], "missing");
  EXPECT_EQ(json["failures"][0]["reason"], "MODEL_NOT_FOUND");
  EXPECT_EQ(Tool("desired").exit.code, 1);
  EXPECT_EQ(Tool("health").exit.code, 0);
  EXPECT_THAT(ScrapeMetrics(port_), HasSubstr("weightbroker_desired_sets{state=\"failed\"} 1\n"));
  EXPECT_THAT(ScrapeMetrics(port_),
              Not(HasSubstr("weightbroker_desired_failures_total{reason=\"MODEL_NOT_FOUND\"} 0\n")));
  NewModel("missing", 3);
  ASSERT_TRUE(IsReady());
  EXPECT_EQ(Tool("status").exit.code, 0);
}

TEST_F(DesiredTest, WarnsWhoeverMovesAnAliasThatTheFileHas) {
  StartAndWait();
  NewModel("b", 2);
  const Finished other = Tool("register", {"warm:b", "--torch_version", "any", "--devices", "host", "--json"});
  const std::string fingerprint = other.json["fingerprint"];

  const Finished moved = Alias({"set", kAlias, fingerprint, "--json"});
  ASSERT_EQ(moved.exit.code, 0) << moved.errors;
  EXPECT_EQ(moved.json["desired_set"], "a");
  EXPECT_THAT(moved.errors, HasSubstr("warning: the file of --desired has model@live name its set \"a\""));
  EXPECT_TRUE(IsReady());

  const Finished another = Alias({"set", "another@live", fingerprint, "--json"});
  EXPECT_EQ(another.json["desired_set"], "");
  EXPECT_EQ(another.errors, "");
}

TEST_F(DesiredTest, LoadsAgainWhatIsUnregistered) {
  StartAndWait();
  ASSERT_THAT(service_->Unregister(service_->Health()->weight_sets(0).fingerprint(), /*force=*/true), IsOk());
  ASSERT_TRUE(Eventually([this] {
    const auto health = service_->Health();
    return health->weight_sets_size() == 1 && health->weight_sets(0).generation() == 2;
  }));
  EXPECT_TRUE(IsReady());
  EXPECT_TRUE(AttachByAlias().ok());
}

}  // namespace
}  // namespace weightbroker::testing
