// A broker that takes over from another one, as a client sees it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>

#include "common/identity/checkpoint_identity.h"
#include "tests/support/faulty_file_system.h"
#include "tests/unit/broker/fake_vault.h"
#include "tests/unit/broker/kept_set.h"
#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using testing::Eventually;
using testing::FakeLoader;
using testing::FakeVault;
using testing::FaultyFileSystem;
using testing::FromGrpc;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::LoadsWell;
using testing::MakeKeptShard;
using testing::MakeResidency;
using testing::OpenExport;
using ::testing::SizeIs;
using testing::SpecOf;
using testing::StatusIs;
using testing::TorchVersion;

class AdoptionServiceTest : public testing::ServiceTest {
 protected:
  AdoptionServiceTest() : files_(RealFileSystem()) {}

  ~AdoptionServiceTest() override { broker_.reset(); }

  // What a broker would have kept of the fixture's model.
  NewWeightSet KeptSet(const std::string& torch_version = "2.11.0") {
    NewWeightSet set;
    set.spec = CompletedSpec();
    set.environment = TorchVersion(torch_version);
    const std::string folder = std::filesystem::canonical(model_).string();
    CheckpointIdentity identity = ReadCheckpointIdentity(RealFileSystem(), folder).value();
    identity.folder_stat = RealFileSystem().Stat(folder).value();
    set.identity = std::make_shared<const CheckpointIdentity>(std::move(identity));
    set.fingerprint = ComputeFingerprint(set.spec, set.environment, *set.identity, HostDeviceFacts());
    return set;
  }

  v1::WeightSpec CompletedSpec() const {
    v1::WeightSpec spec = SpecOf(std::filesystem::canonical(model_).string());
    spec.set_tensor_parallel_size(1);
    spec.set_quantization("auto");
    spec.set_dtype("auto");
    spec.set_layout("hf");
    return spec;
  }

  void StartWith(Adoption adoption, testing::FakeLoaderSpawner::Script script = LoadsWell()) {
    vault_.SetAdoption(std::move(adoption));
    BrokerOptions options;
    options.vault = &vault_;
    options.file_system = &files_;
    Start(std::move(script), std::move(options));
  }

  Adoption WithOneSet() {
    Adoption adoption;
    adoption.sets.push_back({KeptSet(), {MakeKeptShard(0)}, MakeResidency()});
    adoption.generations[KeptSet().fingerprint.hash] = 4;
    return adoption;
  }

  absl::StatusOr<v1::FingerprintResponse> AskFingerprint() {
    grpc::ClientContext context;
    v1::FingerprintRequest request;
    *request.mutable_spec() = SpecOf("models:m");
    *request.mutable_environment() = TorchVersion("2.11.0");
    v1::FingerprintResponse response;
    const absl::Status status = FromGrpc(stub_->Fingerprint(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  FaultyFileSystem files_;
  FakeVault vault_;
};

TEST_F(AdoptionServiceTest, ServesAnAdoptedSetByItsSpecWithoutOpeningAFile) {
  files_.FailOpen("");  // every one
  StartWith(WithOneSet());
  const auto fingerprint = AskFingerprint();
  ASSERT_THAT(fingerprint, IsOk());
  EXPECT_EQ(fingerprint->fingerprint(), KeptSet().fingerprint.hash);
  EXPECT_TRUE(fingerprint->resident());

  OpenExport hold(*stub_, ExportRequestFor());
  ASSERT_TRUE(hold.ReadShard());
  EXPECT_EQ(hold.header().generation(), 4);
  EXPECT_THAT(hold.tensors(), SizeIs(3));
  EXPECT_EQ(Health().lease_count(), 1);
  EXPECT_EQ(files_.reads(), 0);
}

TEST_F(AdoptionServiceTest, AnswersARegisterOfAnAdoptedSetWithoutALoader) {
  StartWith(WithOneSet());
  const auto set = Register();
  ASSERT_THAT(set, IsOk());
  EXPECT_EQ(set->generation(), 4);
  EXPECT_TRUE(set->has_adopt_time());
  EXPECT_EQ(spawner_->spawn_count(), 0);
}

TEST_F(AdoptionServiceTest, ReadsTheFilesAgainIfOneHasChangedSinceTheyWereKept) {
  Adoption adoption = WithOneSet();
  testing::CheckpointBuilder().Tensor("a", "BF16", {8, 4}).Write(model_);
  StartWith(std::move(adoption));
  const auto fingerprint = AskFingerprint();
  ASSERT_THAT(fingerprint, IsOk());
  EXPECT_FALSE(fingerprint->resident());
  EXPECT_THAT(fingerprint->differences(), ::testing::Not(IsEmpty()));
}

TEST_F(AdoptionServiceTest, ServesAnAliasAgainAndForgetsOneWhoseSetWasNotTakenOver) {
  Adoption adoption = WithOneSet();
  adoption.sets[0].request.pins.by_caller = true;
  adoption.aliases = {{"m@gone", std::string(64, 'e')}, {"m@live", KeptSet().fingerprint.hash}};
  StartWith(std::move(adoption));
  v1::ExportRequest request;
  request.set_alias("m@live");
  request.set_hold(true);
  OpenExport hold(*stub_, request);
  ASSERT_TRUE(hold.ReadShard());
  EXPECT_EQ(hold.header().fingerprint(), KeptSet().fingerprint.hash);
  EXPECT_TRUE(Health().weight_sets(0).pinned());
  EXPECT_THAT(vault_.calls(), Contains("ForgetAlias m@gone"));
}

TEST_F(AdoptionServiceTest, SaysInHealthWhatItHasTakenOver) {
  StartWith(WithOneSet());
  const v1::HealthResponse health = Health();
  EXPECT_EQ(health.status(), v1::HealthResponse::STATUS_READY);
  EXPECT_TRUE(health.outlives_broker());
  EXPECT_EQ(health.reserved_bytes(), MakeKeptShard(0)->size_bytes);
  ASSERT_THAT(health.weight_sets(), SizeIs(1));
  EXPECT_TRUE(health.weight_sets(0).has_adopt_time());
  EXPECT_EQ(health.weight_sets(0).load_seconds(), 8.9);
}

TEST_F(AdoptionServiceTest, SaysThatNothingOutlivesABrokerWithoutAKeeper) {
  Start();
  EXPECT_FALSE(Health().outlives_broker());
  const auto set = Register();
  ASSERT_THAT(set, IsOk());
  EXPECT_FALSE(set->has_adopt_time());
}

TEST_F(AdoptionServiceTest, DropsASetWhoseModelIsUnderNoRootAnyMore) {
  Adoption adoption;
  NewWeightSet set = testing::MakeWeightSet();  // of /models/m
  adoption.sets.push_back({std::move(set), {MakeKeptShard(0)}, MakeResidency()});
  StartWith(std::move(adoption));
  EXPECT_THAT(Health().weight_sets(), IsEmpty());
  EXPECT_EQ(Health().reserved_bytes(), 0);
  EXPECT_THAT(vault_.calls(), ElementsAre("Forget 0"));
}

TEST_F(AdoptionServiceTest, StartsALoadAgainThatWasUnderWay) {
  Adoption adoption;
  adoption.loads.push_back({KeptSet(), 1});
  StartWith(std::move(adoption));
  ASSERT_TRUE(Eventually([&] { return Health().status() == v1::HealthResponse::STATUS_READY; }));
  EXPECT_EQ(Health().weight_sets(0).fingerprint(), KeptSet().fingerprint.hash);
  EXPECT_TRUE(Eventually([&] { return !vault_.calls().empty() && vault_.calls().back() == "ForgetLoad"; }));
  EXPECT_THAT(vault_.calls(), Contains("KeepLoad 2"));
}

TEST_F(AdoptionServiceTest, LetsACallerJoinALoadThatWasStartedAgain) {
  Adoption adoption;
  adoption.loads.push_back({KeptSet(), 1});
  StartWith(std::move(adoption));
  EXPECT_THAT(Register(), IsOk());
  EXPECT_EQ(spawner_->spawn_count(), 1);
}

TEST_F(AdoptionServiceTest, ForgetsASetThatAnOperatorUnregisters) {
  StartWith(WithOneSet());
  ASSERT_THAT(Unregister(KeptSet().fingerprint.hash), IsOk());
  EXPECT_THAT(vault_.calls(), ElementsAre("Forget 0"));
}

TEST_F(AdoptionServiceTest, TellsAnOperatorThatTheVaultDidNotForget) {
  StartWith(WithOneSet());
  vault_.OnCall(testing::Refuses("Forget 0"));
  EXPECT_THAT(Unregister(KeptSet().fingerprint.hash), StatusIs(Reason::kKeeperRefused));
}

TEST_F(AdoptionServiceTest, IsAliveWhileItServesAndWhenItHasShutDown) {
  StartWith({});
  EXPECT_TRUE(broker_->IsAlive());
  broker_->Shutdown();
  EXPECT_TRUE(broker_->IsAlive());
}

}  // namespace
}  // namespace weightbroker
