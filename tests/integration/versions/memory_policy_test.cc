// The real service with more weights asked for than it may hold.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <string>

#include "common/base/error.h"
#include "tests/integration/survival/survival.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kModelBytes = 64 << 20;

class MemoryPolicy : public ::testing::Test {
 protected:
  absl::StatusOr<v1::WeightSet> Load(const Service& service, const std::string& name, bool pinned = false) {
    WriteSparseModel(service.NewModel(name), kModelBytes);
    v1::RegisterRequest request;
    request.mutable_spec()->set_model(Service::Model(name));
    request.set_pinned(pinned);
    return service.Register(request);
  }

  static bool Has(const Service& service, const std::string& fingerprint) {
    const auto health = service.Health().value();
    for (const v1::WeightSet& set : health.weight_sets()) {
      if (set.fingerprint() == fingerprint) return true;
    }
    return false;
  }

  static Finished DryRun(const Service& service, const std::string& name) {
    return RunProgram("weightbroker", service.ToolFlags("register", {Service::Model(name), "--torch_version", "any",
                                                                     "--dry_run", "--json"}));
  }
};

TEST_F(MemoryPolicy, EvictsWhatWasNotUsedForLongestAndSaysSoBeforehand) {
  Service service({"--memory_limit=150MiB", "--eviction=idle"});  // two of the three
  const auto first = Load(service, "first");
  const auto second = Load(service, "second");
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(second, IsOk());
  ASSERT_TRUE(service.Attach("first").ok());  // and now the second is the one that was not used for longest

  WriteSparseModel(service.NewModel("third"), kModelBytes);
  const Finished dry = DryRun(service, "third");
  EXPECT_EQ(dry.exit.code, 0) << dry.errors;
  EXPECT_EQ(dry.json["fits"], true);
  ASSERT_THAT(dry.json["evictions"], SizeIs(1));
  EXPECT_EQ(dry.json["evictions"][0]["fingerprint"], second->fingerprint());
  EXPECT_EQ(dry.json["devices"][0]["limited_by"], "memory_limit");
  EXPECT_TRUE(Has(service, second->fingerprint())) << "a dry run changes nothing";
  EXPECT_THAT(service.Health()->weight_sets(), SizeIs(2));
  EXPECT_TRUE(Eventually([&] { return service.Loaders().empty(); }));

  ASSERT_THAT(service.Register("third"), IsOk());
  EXPECT_TRUE(Has(service, first->fingerprint()));
  EXPECT_FALSE(Has(service, second->fingerprint()));
  EXPECT_THAT(service.program().Errors(), ContainsRegex("event=set.evicted .*last_use=20[0-9-]+T[0-9:.]+Z"));
}

TEST_F(MemoryPolicy, RefusesNamingNeedAndHaveAndHoldersWhereNothingMayGo) {
  Service service({"--memory_limit=150MiB", "--eviction=idle"});
  ASSERT_THAT(Load(service, "first", /*pinned=*/true), IsOk());
  const auto second = Load(service, "second");
  ASSERT_THAT(second, IsOk());
  ASSERT_TRUE(KillBroker(service, SIGKILL));  // a later broker knows what is pinned
  const auto held = service.Attach("second");
  ASSERT_TRUE(held.ok()) << held.status().ToString();

  const auto refused = Load(service, "third");
  EXPECT_THAT(refused, AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr("pinned")),
                             HasMetadata("limited_by", "memory_limit")));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(second->fingerprint().substr(0, 12)));
  EXPECT_THAT(service.Health()->weight_sets(), SizeIs(3));  // the one that failed among them
  const Finished dry = DryRun(service, "third");
  EXPECT_EQ(dry.exit.code, 3);
  EXPECT_EQ(dry.json["fits"], false);
}

TEST_F(MemoryPolicy, RefusesByDefault) {
  const Service service({"--memory_limit=100MiB"});
  const auto first = Load(service, "first");
  ASSERT_THAT(first, IsOk());
  EXPECT_THAT(Load(service, "second"), StatusIs(Reason::kMemoryExhausted));
  EXPECT_TRUE(Has(service, first->fingerprint()));
}

}  // namespace
}  // namespace weightbroker::testing
