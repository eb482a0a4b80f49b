#include "server/broker/wanted_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/resident_set.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/broker/fake_loader.h"

namespace weightbroker {
namespace {

using testing::FakeLoaderSpawner;
using testing::FinishLoad;
using testing::IsOk;
using testing::LoadsWell;
using testing::StatusIs;

class WantedSetTest : public ::testing::Test {
 protected:
  WantedSetTest() {
    const std::string model = folder_ / "m";
    std::filesystem::create_directories(model);
    testing::CheckpointBuilder().Tensor("a", "BF16", {4, 4}).Write(model);
    resolver_.emplace(ModelResolver::Create(RealFileSystem(), {{"models", folder_.path()}}).value());
    context_.registry = registry_;
    context_.loads = &loads_;
    context_.resolver = &*resolver_;
    context_.identities = &identities_;
    context_.file_system = &RealFileSystem();
    context_.devices = &DeviceCatalog::HostOnlyCatalog();
  }

  // Of a model in two ranks, of which these are to be held; all of them if there are none.
  static v1::RegisterRequest RequestFor(const std::vector<int32_t>& ranks) {
    v1::RegisterRequest request;
    request.mutable_spec()->set_model("models:m");
    request.mutable_spec()->set_tensor_parallel_size(2);
    request.mutable_environment()->set_torch_version("any");
    *request.mutable_ranks() = {ranks.begin(), ranks.end()};
    return request;
  }

  // As a Register makes it so.
  WeightSetRef MakeResident(const v1::RegisterRequest& request) {
    const ResolvedSpec resolved = ResolveSpec(context_, request.spec(), request.environment()).value();
    const WeightSetRef set = registry_->Begin(WantSet(context_, request, resolved).value()).value().set;
    FinishLoad(*registry_, set, 4096);
    return set;
  }

  const testing::TemporaryFolder folder_;
  const std::shared_ptr<Registry> registry_ = Registry::Create({});
  FakeLoaderSpawner spawner_{LoadsWell()};
  LoadManager loads_{{.registry = registry_, .spawner = &spawner_}};
  IdentityCache identities_{RealFileSystem(), RealFileSystem()};
  std::optional<ModelResolver> resolver_;
  ServiceContext context_;
};

TEST_F(WantedSetTest, PinsForTheDesiredStateWhatIsHeldAsItIsWanted) {
  const WeightSetRef set = MakeResident(RequestFor({1}));
  EXPECT_THAT(LoadDesired(context_, RequestFor({1})), IsOk());
  EXPECT_TRUE(registry_->View(set).pins.by_desired_state);
}

// It was registered while the fingerprint was looked for.
TEST_F(WantedSetTest, DoesNotPinForTheDesiredStateWhatLacksARankOfWhichTheRequestNamesNone) {
  const WeightSetRef set = MakeResident(RequestFor({1}));
  EXPECT_THAT(LoadDesired(context_, RequestFor({})), StatusIs(Reason::kPlacementMismatch));
  EXPECT_FALSE(registry_->View(set).pins.any());
}

// Two versions of it are resident.
TEST_F(WantedSetTest, TakesOfAModelWhoseFilesAreGoneTheVersionInUseAndElseTheLast) {
  const WeightSetRef first = MakeResident(RequestFor({}));
  testing::CheckpointBuilder().Tensor("b", "BF16", {8, 8}).Write(folder_ / "m");
  const WeightSetRef second = MakeResident(RequestFor({}));
  ASSERT_NE(first->fingerprint().hash, second->fingerprint().hash);
  std::filesystem::remove_all(std::string(folder_ / "m"));

  EXPECT_EQ(FindDesiredFingerprint(context_, RequestFor({})).value(), second->fingerprint().hash);

  ASSERT_THAT(registry_->SetAlias({.name = "m@live", .set = first}), IsOk());
  EXPECT_EQ(FindDesiredFingerprint(context_, RequestFor({})).value(), first->fingerprint().hash);

  ASSERT_THAT(registry_->Pin(second, PinOwner::kDesiredState), IsOk());
  EXPECT_EQ(FindDesiredFingerprint(context_, RequestFor({})).value(), second->fingerprint().hash);
}

}  // namespace
}  // namespace weightbroker
