// SIGKILL of the broker before, between and after every message that it exchanges with the keeper: an acknowledged
// entry is always there for the next broker, whole, and one that was not is there whole or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/integration/keeper/harness.h"

namespace weightbroker {
namespace {

using ::testing::AnyOf;
using testing::Eventually;
using testing::FakeBrokerHandle;
using testing::KeeperHarness;

struct CrashCase {
  const char* at;
  const char* what_for;  // what the broker is asked to do when it dies
};

class KeeperCrashTest : public ::testing::TestWithParam<CrashCase> {
 protected:
  KeeperCrashTest() {
    std::ofstream(token()) << "once";
    setenv("WEIGHTBROKER_TEST_CRASH_AT", (std::string("keeper_message:") + GetParam().at).c_str(), 1);
    setenv("WEIGHTBROKER_TEST_CRASH_TOKEN", token().c_str(), 1);
    harness_.StartKeeper({"--broker_ping_interval=20ms"});
    unsetenv("WEIGHTBROKER_TEST_CRASH_AT");
    unsetenv("WEIGHTBROKER_TEST_CRASH_TOKEN");
  }
  std::string token() const { return harness_.Path("token"); }

  KeeperHarness harness_;
};

TEST_P(KeeperCrashTest, LosesNoAcknowledgedEntry) {
  FakeBrokerHandle broker = harness_.NextBroker();
  std::string acknowledged;
  if (broker.greeting() != "gone" && broker.Ask("put kept old 2") == "ok") acknowledged = "kept=old:2";
  if (!acknowledged.empty()) broker.Ask(GetParam().what_for);
  EXPECT_TRUE(Eventually([&] { return !std::filesystem::exists(token()); })) << "it never came to the crash point";
  EXPECT_TRUE(broker.WaitUntilGone());

  FakeBrokerHandle next = harness_.NextBroker();
  const std::string inherited = next.greeting();
  if (acknowledged.empty()) {
    EXPECT_THAT(inherited, AnyOf("ready ", "ready kept=old:2"));
  } else {
    EXPECT_THAT(inherited, AnyOf("ready kept=old:2", "ready kept=new:300", "ready "));
    const bool dropping = std::string(GetParam().what_for) == "drop kept";
    if (!dropping) {
      EXPECT_NE(inherited, "ready ");
    }
  }
  // The keeper is well, and nothing of the dead broker is left in it.
  EXPECT_EQ(next.Ask("put kept after 1"), "ok");
  EXPECT_TRUE(Eventually([&] { return harness_.KeeperChildren().size() == 1; }));
  next.Kill();
  EXPECT_EQ(harness_.NextBroker().greeting(), "ready kept=after:1");
}

INSTANTIATE_TEST_SUITE_P(
    EveryMessage, KeeperCrashTest,
    ::testing::Values(CrashCase{"hello:before:1", ""}, CrashCase{"hello:after:1", ""},
                      CrashCase{"welcome:before:1", ""}, CrashCase{"welcome:after:1", ""},
                      CrashCase{"end_of_entries:before:1", ""}, CrashCase{"end_of_entries:after:1", ""},
                      CrashCase{"ready:before:1", ""}, CrashCase{"ready:after:1", ""},
                      // The first put is the one before; 300 descriptors make two packets.
                      CrashCase{"put:before:1", ""}, CrashCase{"put:after:1", ""}, CrashCase{"put:acked:1", ""},
                      CrashCase{"ack:before:1", ""}, CrashCase{"put:before:2", "put kept new 300"},
                      CrashCase{"put:after:2", "put kept new 300"}, CrashCase{"put:before:3", "put kept new 300"},
                      CrashCase{"put:after:3", "put kept new 300"}, CrashCase{"put:acked:2", "put kept new 300"},
                      CrashCase{"drop:before:1", "drop kept"}, CrashCase{"drop:after:1", "drop kept"},
                      CrashCase{"drop:acked:1", "drop kept"}, CrashCase{"spawn_loader:before:1", "spawn --stubborn"},
                      CrashCase{"spawn_loader:after:1", "spawn --stubborn"},
                      CrashCase{"spawn_loader:acked:1", "spawn --stubborn"},
                      CrashCase{"spawned:before:1", "spawn --stubborn"},
                      CrashCase{"spawned:after:1", "spawn --stubborn"}, CrashCase{"exited:before:1", "spawn --exit=0"},
                      CrashCase{"exited:after:1", "spawn --exit=0"}, CrashCase{"ping:before:1", ""},
                      CrashCase{"ping:after:1", ""}, CrashCase{"pong:before:1", ""}, CrashCase{"pong:after:1", ""}),
    [](const ::testing::TestParamInfo<CrashCase>& param) {
      std::string name = param.param.at;
      for (char& c : name) c = c == ':' ? '_' : c;
      return name;
    });

}  // namespace
}  // namespace weightbroker
