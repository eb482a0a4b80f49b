// Two versions of a model, and an alias that is moved between them under eight engines that attach by it in a loop:
// every attach gets one whole version. $WEIGHTBROKER_ALIAS_MOVES says how often it is moved.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/base/error.h"
#include "common/base/mutex.h"
#include "tests/integration/survival/survival.h"
#include "tests/integration/versions/stamped_model.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using client::Connection;
using client::DeadlineIn;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kAlias[] = "model@live";
constexpr int kEngines = 8;
constexpr int kTensors = 8;
constexpr int64_t kTensorBytes = 64 << 10;

int MovesWanted() {
  const char* const text = getenv("WEIGHTBROKER_ALIAS_MOVES");
  return text == nullptr ? 300 : atoi(text);
}

class AliasSwitch : public ::testing::Test {
 protected:
  AliasSwitch() : connection_(*Connection::Open({.socket_path = service_.socket()})) {
    for (uint64_t version = 1; version <= 2; ++version) {
      const std::string name = "v" + std::to_string(version);
      WriteStampedModel(service_.NewModel(name), version, kTensors, kTensorBytes);
      fingerprints_.push_back(service_.Register(name).value().fingerprint());
    }
  }

  absl::StatusOr<v1::SetAliasResponse> SetAlias(const std::string& fingerprint, bool release_previous = false) {
    v1::SetAliasRequest request;
    request.set_alias(kAlias);
    request.set_fingerprint(fingerprint);
    request.set_release_previous(release_previous);
    v1::SetAliasResponse response;
    const absl::Status status = connection_->Call(DeadlineIn(kPatience), [&](grpc::ClientContext& context) {
      response.Clear();
      return connection_->admin_service().SetAlias(&context, request, &response);
    });
    if (!status.ok()) return status;
    return response;
  }

  Result<MappedWeights> Attach(AttachOptions options = {}) {
    ClientOptions client;
    client.mode = Mode::kClient;
    client.torch_version = "any";
    client.socket_path = service_.socket();
    options.fallback = Fallback::kFail;
    options.alias = kAlias;
    return Client::Create(client)->Attach({}, options);
  }

  std::vector<std::unique_ptr<Program>> StartEngines(uint32_t seed) {
    std::vector<std::unique_ptr<Program>> engines;
    for (uint32_t i = 0; i < kEngines; ++i) {
      engines.push_back(std::make_unique<Program>(
          "weightbroker-alias-engine",
          std::vector<std::string>{"--socket", service_.socket(), "--alias", kAlias, "--first", fingerprints_[0],
                                   "--second", fingerprints_[1], "--seed", std::to_string(seed + i)}));
    }
    return engines;
  }

  Service service_;
  const std::shared_ptr<Connection> connection_;
  std::vector<std::string> fingerprints_;
};

struct Seen {
  int64_t first = 0;
  int64_t second = 0;
  int64_t superseded = 0;
};

// What an engine has seen, none of it a mixture.
void StopAndCheck(Program& engine, Seen* seen) {
  engine.Kill(SIGTERM);
  EXPECT_TRUE(engine.Wait().success()) << engine.Errors();
  const nlohmann::json report = engine.Json();
  ASSERT_TRUE(report.is_object()) << engine.Output() << engine.Errors();
  EXPECT_EQ(report["mixtures"], 0);
  EXPECT_EQ(report["wrong_digests"], 0);
  EXPECT_EQ(report["told_wrong"], 0);
  EXPECT_THAT(report["failures"], IsEmpty()) << report["failures"].dump();
  seen->first += report["attached"].value("1", 0);
  seen->second += report["attached"].value("2", 0);
  seen->superseded += report["superseded"].get<int64_t>();
}

TEST_F(AliasSwitch, GivesEveryAttachOneWholeVersionHoweverOftenItIsMoved) {
  const uint32_t seed = TestSeed();
  const int moves = MovesWanted();
  ASSERT_THAT(SetAlias(fingerprints_[0]), IsOk());
  std::vector<std::unique_ptr<Program>> engines = StartEngines(seed);
  for (const auto& engine : engines) ASSERT_TRUE(engine->WaitForLine("attached")) << engine->Errors();
  std::mt19937 random(seed);
  // How many leases each version took over from the other. On a slow machine the moves go on until there were some.
  std::vector<int> superseded = {0, 0};
  const auto give_up = std::chrono::steady_clock::now() + 2 * kPatience;
  const auto go_on = [&] {
    return (superseded[0] == 0 || superseded[1] == 0) && std::chrono::steady_clock::now() < give_up;
  };
  int made = 0;
  while (made < moves || go_on()) {
    const auto to = static_cast<size_t>(++made % 2);
    if (made == moves / 2) {  // the move is made while the next one takes over
      const pid_t broker = BrokerOf(service_);
      ASSERT_GT(broker, 0);
      kill(broker, SIGKILL);
    }
    const auto moved = SetAlias(fingerprints_[to]);
    ASSERT_THAT(moved, IsOk()) << "move " << made;
    EXPECT_EQ(moved->alias().fingerprint(), fingerprints_[to]);
    superseded[to] += moved->superseded_lease_count();
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
  }
  Seen seen;
  for (const auto& engine : engines) StopAndCheck(*engine, &seen);
  EXPECT_GT(superseded[0], 0);
  EXPECT_GT(superseded[1], 0);
  EXPECT_GT(seen.first, 0);
  EXPECT_GT(seen.second, 0);
  EXPECT_TRUE(Eventually([&] { return service_.Health().value().lease_count() == 0; }));
  printf(
      "seed %u: %d moves, one of them over a SIGKILL of the broker; %lld attaches to version 1, %lld to version 2, no "
      "mixture; %d leases superseded, of which %lld engines were told before they left\n",
      seed, made, static_cast<long long>(seen.first), static_cast<long long>(seen.second),
      superseded[0] + superseded[1], static_cast<long long>(seen.superseded));
}

TEST_F(AliasSwitch, TellsAnEngineThatItsVersionIsSupersededAndReleasesThatWhenTheEngineLeaves) {
  ASSERT_THAT(SetAlias(fingerprints_[0]), IsOk());
  Mutex mutex;
  std::vector<LeaseEvent> events;
  AttachOptions options;
  options.on_lease_event = [&](const LeaseEvent& event) {
    MutexLock lock(mutex);
    events.push_back(event);
  };
  auto weights = Attach(options);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(weights->fingerprint(), fingerprints_[0]);

  const auto moved = SetAlias(fingerprints_[1], /*release_previous=*/true);
  ASSERT_THAT(moved, IsOk());
  EXPECT_EQ(moved->superseded_lease_count(), 1);
  EXPECT_EQ(moved->released().state(), v1::WEIGHT_SET_STATE_DRAINING);
  EXPECT_TRUE(Eventually([&] {
    MutexLock lock(mutex);
    return !events.empty();
  }));
  {
    MutexLock lock(mutex);
    ASSERT_THAT(events, SizeIs(1));
    EXPECT_EQ(events[0].kind, LeaseEvent::Kind::kSuperseded);
    EXPECT_EQ(events[0].alias, kAlias);
    EXPECT_EQ(events[0].fingerprint, fingerprints_[1]);
  }
  EXPECT_THAT(service_.Register("v1"), StatusIs(Reason::kLeased)) << "its memory is still held";
  EXPECT_TRUE(weights->lease_status().ok());
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_THAT(service_.Health()->weight_sets(), SizeIs(2));
  const auto next = Attach();
  ASSERT_TRUE(next.ok()) << next.status().ToString();
  EXPECT_EQ(next->fingerprint(), fingerprints_[1]);

  weights = Attach();  // lets go of the first version
  EXPECT_TRUE(Eventually([&] { return service_.Health()->weight_sets_size() == 1; }));
  ASSERT_THAT(service_.Register("v1"), IsOk());
  EXPECT_THAT(SetAlias(fingerprints_[0]), IsOk()) << "and back";
}

TEST_F(AliasSwitch, IsTakenOverByTheNextBrokerWhichTellsThoseWhoRenewWhatTheyMissed) {
  ASSERT_THAT(SetAlias(fingerprints_[0]), IsOk());
  Mutex mutex;
  std::vector<std::string> superseded_by;
  AttachOptions options;
  options.on_lease_event = [&](const LeaseEvent& event) {
    MutexLock lock(mutex);
    if (event.kind == LeaseEvent::Kind::kSuperseded) superseded_by.push_back(event.fingerprint);
  };
  const auto weights = Attach(options);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  const Finished listed = RunProgram("weightbroker", {"alias", "list", "--socket", service_.socket()});
  EXPECT_THAT(listed.output, HasSubstr(std::string(kAlias) + "  " + fingerprints_[0]));
  ASSERT_THAT(SetAlias(fingerprints_[1]), IsOk());
  EXPECT_TRUE(Eventually([&] {
    MutexLock lock(mutex);
    return !superseded_by.empty() && superseded_by.back() == fingerprints_[1];
  }));
}

TEST_F(AliasSwitch, IsNamedWithItsNearestWhereItIsUnknown) {
  ASSERT_THAT(SetAlias(fingerprints_[0]), IsOk());
  const Finished exported = RunProgram("weightbroker", {"export", "modle@live", "--socket", service_.socket()});
  EXPECT_EQ(exported.exit.code, 3);
  EXPECT_THAT(exported.errors, HasSubstr("ALIAS_UNKNOWN"));
  EXPECT_THAT(exported.errors, HasSubstr(kAlias));
  const Finished verified = RunProgram("weightbroker", {"verify", kAlias, "--socket", service_.socket()});
  EXPECT_EQ(verified.exit.code, 0) << verified.errors;
  EXPECT_THAT(verified.output, HasSubstr("equal byte for byte"));
}

}  // namespace
}  // namespace weightbroker::testing
