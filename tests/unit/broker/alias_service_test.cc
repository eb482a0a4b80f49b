// Aliases and dry runs, as a client sees them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::FakeLoader;
using testing::FromGrpc;
using testing::HasMetadata;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::OpenExport;
using testing::ServiceTest;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr char kLive[] = "m@live";

class AliasServiceTest : public ServiceTest {
 protected:
  AliasServiceTest() {
    const std::string second = folder_ / "models/m2";
    std::filesystem::create_directories(second);
    testing::CheckpointBuilder().Tensor("a", "BF16", {8, 4}).Write(second);
  }

  // Both versions resident, and the alias on the first.
  void StartWithTwo() {
    Start();
    first_ = Register()->fingerprint();
    second_ = Register(RegisterRequestFor("models:m2"))->fingerprint();
    ASSERT_THAT(SetAlias(first_), IsOk());
  }

  absl::StatusOr<v1::SetAliasResponse> SetAlias(const std::string& fingerprint) {
    grpc::ClientContext context;
    v1::SetAliasRequest request;
    request.set_alias(kLive);
    request.set_fingerprint(fingerprint);
    v1::SetAliasResponse response;
    const absl::Status status = FromGrpc(admin_->SetAlias(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  absl::StatusOr<v1::DeleteAliasResponse> DeleteAlias(const std::string& expected) {
    grpc::ClientContext context;
    v1::DeleteAliasRequest request;
    request.set_alias(kLive);
    request.set_expected_fingerprint(expected);
    v1::DeleteAliasResponse response;
    const absl::Status status = FromGrpc(admin_->DeleteAlias(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  absl::StatusOr<v1::FingerprintResponse> FingerprintOf(const std::string& alias) {
    grpc::ClientContext context;
    v1::FingerprintRequest request;
    request.set_alias(alias);
    v1::FingerprintResponse response;
    const absl::Status status = FromGrpc(stub_->Fingerprint(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  v1::ListWeightSetsResponse List() {
    grpc::ClientContext context;
    v1::ListWeightSetsResponse response;
    EXPECT_TRUE(admin_->ListWeightSets(&context, {}, &response).ok());
    return response;
  }

  static v1::ExportRequest ExportRequestForAlias() {
    v1::ExportRequest request;
    request.set_alias(kLive);
    request.set_hold(true);
    return request;
  }

  static v1::ExportRequest RenewalOf(const v1::ExportHeader& header, const std::string& alias) {
    v1::ExportRequest request;
    request.set_fingerprint(header.fingerprint());
    request.set_hold(true);
    request.mutable_renewal()->set_generation(header.generation());
    *request.mutable_renewal()->mutable_resident_time() = header.resident_time();
    request.mutable_renewal()->set_alias(alias);
    return request;
  }

  absl::Status FailureOf(const v1::ExportRequest& request) { return OpenExport(*stub_, request).Finish(); }

  // What a Register with dry_run answers.
  absl::StatusOr<v1::RegisterPlan> DryRun() {
    v1::RegisterRequest request = RegisterRequestFor();
    request.set_dry_run(true);
    grpc::ClientContext context;
    const auto reader = stub_->Register(&context, request);
    v1::RegisterResponse response;
    EXPECT_TRUE(reader->Read(&response));
    EXPECT_TRUE(response.has_plan());
    v1::RegisterResponse more;
    EXPECT_FALSE(reader->Read(&more)) << "the plan is all there is";
    const absl::Status status = FromGrpc(reader->Finish());
    if (!status.ok()) return status;
    return response.plan();
  }

  std::string first_;
  std::string second_;
};

TEST_F(AliasServiceTest, ExportsWhatTheAliasNamesAndTellsWhenItNamesAnother) {
  StartWithTwo();
  OpenExport open(*stub_, ExportRequestForAlias());
  ASSERT_TRUE(open.ReadShard());
  EXPECT_EQ(open.header().fingerprint(), first_);
  EXPECT_EQ(SetAlias(second_)->superseded_lease_count(), 1);
  const auto event = open.ReadNext();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event().kind(), v1::ExportEvent::KIND_SUPERSEDED);
  EXPECT_EQ(event->event().alias(), kLive);
  EXPECT_EQ(event->event().fingerprint(), second_);
  EXPECT_EQ(Health().lease_count(), 1) << "the lease goes on";
}

TEST_F(AliasServiceTest, TellsWhoRenewsALeaseThatItsAliasHasMovedMeanwhile) {
  StartWithTwo();
  OpenExport open(*stub_, ExportRequestForAlias());
  ASSERT_TRUE(open.ReadShard());
  ASSERT_THAT(SetAlias(second_), IsOk());
  OpenExport renewal(*stub_, RenewalOf(open.header(), kLive));
  const auto header = renewal.ReadNext();
  ASSERT_TRUE(header.has_value() && header->has_header());
  const auto event = renewal.ReadNext();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event().kind(), v1::ExportEvent::KIND_SUPERSEDED);
  EXPECT_EQ(event->event().fingerprint(), second_);
  EXPECT_THAT(FailureOf(RenewalOf(open.header(), "no alias")), StatusIs(Reason::kInvalidArgument));
}

TEST_F(AliasServiceTest, AnswersFingerprintForAnAliasWithoutLookingAtFiles) {
  StartWithTwo();
  std::filesystem::remove_all(model_);
  const auto fingerprint = FingerprintOf(kLive);
  ASSERT_THAT(fingerprint, IsOk());
  EXPECT_EQ(fingerprint->fingerprint(), first_);
  EXPECT_TRUE(fingerprint->resident());
}

TEST_F(AliasServiceTest, RefusesAnAliasThatIsNotThereWithItsNearest) {
  StartWithTwo();
  v1::ExportRequest request = ExportRequestForAlias();
  request.set_alias("m@life");
  EXPECT_THAT(FailureOf(request), AllOf(StatusIs(Reason::kAliasUnknown), HasMetadata("nearest", kLive)));
  EXPECT_THAT(FingerprintOf("m@life"), AllOf(StatusIs(Reason::kAliasUnknown), HasMetadata("nearest", kLive)));
}

TEST_F(AliasServiceTest, ComparesTheEnvironmentOfAnAliasIfOneIsGiven) {
  StartWithTwo();
  v1::ExportRequest request = ExportRequestForAlias();
  *request.mutable_environment() = testing::TorchVersion("2.10.0");
  EXPECT_THAT(FailureOf(request), StatusIs(Reason::kFingerprintMismatch));
}

TEST_F(AliasServiceTest, ListsAliasesUntilTheyAreDeleted) {
  StartWithTwo();
  ASSERT_THAT(List().aliases(), SizeIs(1));
  EXPECT_EQ(List().aliases(0).fingerprint(), first_);
  EXPECT_THAT(List().weight_sets(0).aliases(), ElementsAre(kLive));
  EXPECT_THAT(Unregister(first_), StatusIs(Reason::kAliased));
  EXPECT_THAT(DeleteAlias(second_), AllOf(StatusIs(Reason::kAliasConflict), HasMetadata("found", first_)));
  ASSERT_THAT(DeleteAlias(first_), IsOk());
  EXPECT_THAT(List().aliases(), IsEmpty());
  EXPECT_THAT(Unregister(first_), IsOk());
}

// It would be a conflict with whatever the alias names, that set included.
TEST_F(AliasServiceTest, RefusesToExpectTheBeginningOfAFingerprint) {
  StartWithTwo();
  EXPECT_THAT(DeleteAlias(first_.substr(0, 8)),
              AllOf(StatusIs(Reason::kInvalidArgument), HasMetadata("field", "expected_fingerprint")));
  EXPECT_THAT(DeleteAlias(std::string(64, 'X')), StatusIs(Reason::kInvalidArgument));
  EXPECT_THAT(DeleteAlias(first_), IsOk());
}

TEST_F(AliasServiceTest, SaysWhatARegisterWouldNeedWithoutBeginningIt) {
  Start([](FakeLoader& loader) {
    loader.Plan(8192, 2);
    loader.WaitForTheEnd();
  });
  const auto plan = DryRun();
  ASSERT_THAT(plan, IsOk());
  EXPECT_TRUE(plan->fits());
  EXPECT_FALSE(plan->present());
  ASSERT_THAT(plan->devices(), SizeIs(1));
  EXPECT_EQ(plan->devices(0).need_bytes(), 8192);
  EXPECT_EQ(plan->devices(0).have_bytes(), int64_t{1} << 40);
  EXPECT_EQ(plan->devices(0).tensor_count(), 2);
  EXPECT_THAT(List().weight_sets(), IsEmpty());
  EXPECT_EQ(Health().reserved_bytes(), 0);
}

TEST_F(AliasServiceTest, SaysThatWhatIsThereNeedsNothingMore) {
  StartWithTwo();
  const int spawned = spawner_->spawn_count();
  const auto plan = DryRun();
  ASSERT_THAT(plan, IsOk());
  EXPECT_TRUE(plan->present());
  EXPECT_TRUE(plan->fits());
  EXPECT_THAT(plan->devices(), IsEmpty());
  EXPECT_EQ(spawner_->spawn_count(), spawned);
}

}  // namespace
}  // namespace weightbroker
