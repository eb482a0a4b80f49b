// A bit of resident memory that is not what it was: who finds it, and what is never done with those bytes again.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/base/mutex.h"
#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int64_t kFlippedByte = 256 + 17;  // of the second tensor: each starts at a multiple of 256

std::string Loader() { return std::string(WEIGHTBROKER_BIN_DIR) + "/weightbroker-flipping-loader"; }

void WriteModel(const Service& service, const std::string& name) {
  CheckpointBuilder()
      .Tensor("a.weight", "BF16", {8, 16})
      .Tensor("b.weight", "BF16", {8, 16})
      .Tensor("c.weight", "BF16", {8, 16})
      .Write(service.NewModel(name));
}

// From here on what is loaded of the model has one bit flipped.
void FlipABitOf(const Service& service, const std::string& name) {
  std::ofstream(service.ModelFolder(name) + ".flip") << kFlippedByte;
}
void FlipNoBitOf(const Service& service, const std::string& name) {
  std::filesystem::remove(service.ModelFolder(name) + ".flip");
}

class IntegrityTest : public ::testing::Test {
 protected:
  explicit IntegrityTest(std::vector<std::string> flags = {}) : service_(WithLoader(std::move(flags))) {}

  static std::vector<std::string> WithLoader(std::vector<std::string> flags) {
    flags.push_back("--loader_path=" + Loader());
    return flags;
  }

  // A resident set with one wrong bit.
  std::string RegisterDamaged(const std::string& name = "m") {
    WriteModel(service_, name);
    FlipABitOf(service_, name);
    const auto set = service_.Register(name);
    EXPECT_THAT(set, IsOk());
    return set.ok() ? set->fingerprint() : "";
  }

  Finished Scrub(const std::vector<std::string>& more = {}) {
    return RunProgram("weightbroker", service_.ToolFlags("scrub", more));
  }

  std::string QuarantineOf(const std::string& fingerprint) {
    const auto health = service_.Health();
    if (!health.ok()) return "";
    for (const v1::WeightSet& set : health->weight_sets()) {
      if (set.fingerprint() == fingerprint && set.shards_size() > 0) return set.shards(0).quarantine();
    }
    return "";
  }

  Service service_;
};

TEST_F(IntegrityTest, AScrubFindsNothingWhereNothingIsWrong) {
  WriteModel(service_, "m");
  ASSERT_THAT(service_.Register("m"), IsOk());

  const Finished scrub = Scrub({"--json"});

  EXPECT_EQ(scrub.exit.code, 0) << scrub.output << scrub.errors;
  EXPECT_EQ(scrub.json["shards"][0]["result"], "INTACT");
  EXPECT_EQ(scrub.json["shards"][0]["tensor_count"], 3);
  EXPECT_EQ(scrub.json["shards"][0]["checked_bytes"], 3 * 256);
  EXPECT_TRUE(service_.Attach("m").ok());
}

TEST_F(IntegrityTest, AScrubFindsAFlippedBitAndTheShardIsNeverExportedAgain) {
  const std::string fingerprint = RegisterDamaged();
  ASSERT_TRUE(service_.Attach("m").ok()) << "nobody has looked yet";

  const Finished scrub = Scrub({fingerprint, "--json"});

  EXPECT_EQ(scrub.exit.code, 3) << scrub.errors;
  EXPECT_EQ(scrub.json["shards"][0]["result"], "DAMAGED");
  EXPECT_EQ(scrub.json["shards"][0]["damaged"][0]["name"], "b.weight");
  EXPECT_EQ(scrub.json["shards"][0]["damaged"][0]["offset_bytes"], 256);
  EXPECT_EQ(service_.Attach("m").status().reason(), "QUARANTINED");
  EXPECT_EQ(service_.Health()->status(), v1::HealthResponse::STATUS_QUARANTINED);
  EXPECT_THAT(QuarantineOf(fingerprint), HasSubstr("b.weight"));
  EXPECT_THAT(service_.program().Errors(), HasSubstr("event=integrity.damaged"));
  EXPECT_THAT(service_.program().Errors(), HasSubstr("tensor=b.weight slab=0 first_byte=256 bytes=256"));
  EXPECT_THAT(service_.Register("m"), StatusIs(Reason::kQuarantined)) << "not until it is unregistered";
}

TEST_F(IntegrityTest, TheNextBrokerDoesNotServeTheShardEither) {
  const std::string fingerprint = RegisterDamaged();
  ASSERT_EQ(Scrub().exit.code, 3);
  const int64_t broker = service_.Health()->process_id();

  ASSERT_EQ(kill(static_cast<pid_t>(broker), SIGKILL), 0);

  ASSERT_TRUE(Eventually([&] {
    const auto health = service_.Health();
    return health.ok() && health->process_id() != broker;
  }));
  EXPECT_EQ(service_.Attach("m").status().reason(), "QUARANTINED");
  EXPECT_THAT(QuarantineOf(fingerprint), HasSubstr("b.weight"));
  EXPECT_EQ(service_.Health()->status(), v1::HealthResponse::STATUS_QUARANTINED);
}

TEST_F(IntegrityTest, AfterAnUnregisterTheWeightsAreLoadedAnew) {
  const std::string fingerprint = RegisterDamaged();
  ASSERT_EQ(Scrub().exit.code, 3);
  FlipNoBitOf(service_, "m");

  ASSERT_THAT(service_.Unregister(fingerprint, false), IsOk());
  const auto again = service_.Register("m");

  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->fingerprint(), fingerprint);
  EXPECT_EQ(again->generation(), 2);
  EXPECT_EQ(Scrub().exit.code, 0);
  const auto weights = service_.Attach("m");
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_EQ(service_.Health()->status(), v1::HealthResponse::STATUS_READY);
}

TEST_F(IntegrityTest, AnAttachedEngineIsToldAndKeepsItsMapping) {
  RegisterDamaged();
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = service_.socket();
  const auto client = Client::Create(options);
  ASSERT_TRUE(client.ok());
  Mutex mutex;
  std::vector<LeaseEvent::Kind> kinds;
  AttachOptions attach;
  attach.fallback = Fallback::kFail;
  attach.on_lease_event = [&](const LeaseEvent& event) {
    MutexLock lock(mutex);
    kinds.push_back(event.kind);
  };
  WeightSpec spec;
  spec.model = Service::Model("m");
  const auto weights = client->Attach(spec, attach);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();

  ASSERT_EQ(Scrub().exit.code, 3);

  EXPECT_TRUE(Eventually([&] { return weights->lease_status().reason() == "QUARANTINED"; }));
  EXPECT_FALSE(weights->lease_lost());
  EXPECT_EQ(weights->Find("a.weight")->size_bytes, 256);
  MutexLock lock(mutex);
  EXPECT_THAT(kinds, Contains(LeaseEvent::Kind::kQuarantined));
}

TEST_F(IntegrityTest, VerifyOnAttachFindsTheBitAndItsWordHasTheServiceLookForItself) {
  const std::string fingerprint = RegisterDamaged();
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = service_.socket();
  const auto client = Client::Create(options);
  ASSERT_TRUE(client.ok());
  AttachOptions attach;
  attach.fallback = Fallback::kFail;
  attach.verify = true;
  WeightSpec spec;
  spec.model = Service::Model("m");

  const auto weights = client->Attach(spec, attach);

  EXPECT_EQ(weights.status().reason(), "DIGEST_MISMATCH");
  EXPECT_EQ(weights.status().metadata().at("tensor"), "b.weight");
  EXPECT_TRUE(Eventually([&] { return !QuarantineOf(fingerprint).empty(); }));
  EXPECT_THAT(service_.program().Errors(), HasSubstr("event=damage.reported"));
  EXPECT_EQ(service_.Attach("m").status().reason(), "QUARANTINED");
}

TEST_F(IntegrityTest, TheToolsVerifyFindsTheBitAndTheShardIsNeverExportedAgain) {
  const std::string fingerprint = RegisterDamaged();

  const Finished verify = RunProgram("weightbroker", service_.ToolFlags("verify", {fingerprint}));

  EXPECT_EQ(verify.exit.code, 3);
  EXPECT_THAT(verify.output, HasSubstr("b.weight"));
  EXPECT_TRUE(Eventually([&] { return !QuarantineOf(fingerprint).empty(); }));
  EXPECT_EQ(service_.Attach("m").status().reason(), "QUARANTINED");
}

TEST_F(IntegrityTest, AnEnginesWordAloneTakesNothingOutOfService) {
  WriteModel(service_, "m");
  const auto set = service_.Register("m");
  ASSERT_THAT(set, IsOk());
  v1::ReportDamageRequest report;
  report.set_fingerprint(set->fingerprint());
  report.set_generation(set->generation());
  report.set_tensor("a.weight");
  const auto connection = *client::Connection::Open({.socket_path = service_.socket()});
  v1::ReportDamageResponse response;
  const auto call = [&] {
    return connection->Call(client::DeadlineIn(kPatience), [&](grpc::ClientContext& context) {
      return connection->service().ReportDamage(&context, report, &response);
    });
  };

  ASSERT_THAT(call(), IsOk());
  EXPECT_TRUE(response.scrub_started());
  EXPECT_TRUE(Eventually([&] { return service_.program().Errors().find("event=scrub.intact") != std::string::npos; }));
  ASSERT_THAT(call(), IsOk());
  EXPECT_FALSE(response.scrub_started()) << "an answer has just been given";
  EXPECT_TRUE(service_.Attach("m").ok());
}

TEST_F(IntegrityTest, ADamagedSetDoesNotConcernAnother) {
  RegisterDamaged("m");
  WriteModel(service_, "other");
  ASSERT_THAT(service_.Register("other"), IsOk());

  EXPECT_EQ(Scrub().exit.code, 3);

  EXPECT_TRUE(service_.Attach("other").ok());
}

class ScheduledScrubTest : public IntegrityTest {
 protected:
  ScheduledScrubTest() : IntegrityTest({"--scrub_interval=50ms"}) {}
};

TEST_F(ScheduledScrubTest, FindsTheBitUnasked) {
  const std::string fingerprint = RegisterDamaged();
  EXPECT_TRUE(Eventually([&] { return !QuarantineOf(fingerprint).empty(); }));
}

// A folder in which a file says how scrubs fail: the environment is what a loader inherits.
class FailingScrub {
 public:
  FailingScrub() { setenv("WEIGHTBROKER_TEST_SCRUB", folder_.path().c_str(), 1); }
  ~FailingScrub() { unsetenv("WEIGHTBROKER_TEST_SCRUB"); }

  void Have(const std::string& what) const { std::ofstream(folder_ / what) << "so"; }
  void HaveNot(const std::string& what) const { std::filesystem::remove(folder_ / what); }

 private:
  const TemporaryFolder folder_;
};

class FailingScrubTest : public FailingScrub, public IntegrityTest {
 protected:
  FailingScrubTest() : IntegrityTest({"--loader_stall_timeout=1s"}) {}
};

TEST_F(FailingScrubTest, AScrubberThatDiesIsNoProofOfDamage) {
  Have("die");
  WriteModel(service_, "m");
  ASSERT_THAT(service_.Register("m"), IsOk());

  const Finished scrub = Scrub({"--json"});

  EXPECT_EQ(scrub.exit.code, 3);
  EXPECT_EQ(scrub.json["shards"][0]["result"], "NOT_CHECKED");
  EXPECT_EQ(scrub.json["shards"][0]["failure"]["reason"], "LOADER_FAILED");
  EXPECT_THAT(service_.program().Errors(), HasSubstr("event=scrub.not_checked"));
  EXPECT_TRUE(service_.Attach("m").ok());
  HaveNot("die");
  EXPECT_EQ(Scrub().exit.code, 0);
}

TEST_F(FailingScrubTest, AScrubberThatHangsIsKilledAndIsNoProofOfDamage) {
  Have("hang");
  WriteModel(service_, "m");
  ASSERT_THAT(service_.Register("m"), IsOk());
  ASSERT_TRUE(Eventually([&] { return service_.Processes().size() == 2; })) << "the keeper and the broker";
  const size_t processes_before = service_.Processes().size();

  const Finished scrub = Scrub({"--json"});

  EXPECT_EQ(scrub.json["shards"][0]["result"], "NOT_CHECKED");
  EXPECT_EQ(scrub.json["shards"][0]["failure"]["reason"], "LOADER_STALLED");
  EXPECT_TRUE(service_.Attach("m").ok());
  EXPECT_TRUE(Eventually([&] { return service_.Processes().size() == processes_before; }));
}

TEST_F(FailingScrubTest, AScrubDoesNotKeepTheMemoryOfASetThatIsUnregistered) {
  Have("hang");
  WriteModel(service_, "m");
  const int memfds_before = service_.CountMemfds();
  const auto set = service_.Register("m");
  ASSERT_THAT(set, IsOk());
  ASSERT_TRUE(Eventually([&] { return service_.Processes().size() == 2; })) << "the keeper and the broker";
  const size_t processes_before = service_.Processes().size();
  Program scrub("weightbroker", service_.ToolFlags("scrub", {"--json"}));
  ASSERT_TRUE(Eventually([&] { return service_.Processes().size() > processes_before; }));

  EXPECT_THAT(service_.Unregister(set->fingerprint(), false), IsOk());

  scrub.Wait();
  EXPECT_TRUE(Eventually([&] { return service_.CountMemfds() == memfds_before; }));
}

}  // namespace
}  // namespace weightbroker::testing
