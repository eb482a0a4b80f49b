#include <atomic>

#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::Eventually;
using testing::FakeLoader;
using testing::FromGrpc;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::LoadsWell;
using testing::ServiceTest;
using ::testing::SizeIs;
using testing::SpecOf;
using testing::StatusIs;
using testing::TorchVersion;

using RegisterServiceTest = ServiceTest;

TEST_F(RegisterServiceTest, StreamsProgressAndLastTheWeightSet) {
  std::atomic<int> progress_count{0};
  Start([&](FakeLoader& loader) {
    EXPECT_TRUE(Eventually([&] { return progress_count > 0; })) << "how it stands is said at once";
    LoadsWell()(loader);
  });
  const auto set = Register(RegisterRequestFor(), &progress_count);
  ASSERT_THAT(set, IsOk());
  EXPECT_EQ(set->state(), v1::WEIGHT_SET_STATE_RESIDENT);
  EXPECT_EQ(set->generation(), 1);
  EXPECT_EQ(set->spec().model(), std::filesystem::canonical(model_).string());
  EXPECT_THAT(set->fingerprint(), SizeIs(64));
  EXPECT_GE(progress_count, 1);
}

TEST_F(RegisterServiceTest, AnswersAtOnceIfTheSetIsResident) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  std::atomic<int> progress_count{0};
  const auto again = Register(RegisterRequestFor(), &progress_count);
  ASSERT_THAT(again, IsOk());
  EXPECT_EQ(again->generation(), 1);
  EXPECT_EQ(progress_count, 0);
  EXPECT_EQ(spawner_->spawn_count(), 1);
}

TEST_F(RegisterServiceTest, TakesAPathInsideARootForTheSameModel) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  ASSERT_THAT(Register(RegisterRequestFor(model_)), IsOk());
  EXPECT_EQ(spawner_->spawn_count(), 1);
}

TEST_F(RegisterServiceTest, WithoutWaitEndsAsSoonAsTheLoadIsUnderWay) {
  std::atomic<bool> go_on{false};
  Start([&](FakeLoader& loader) {
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    LoadsWell()(loader);
  });
  v1::RegisterRequest request = RegisterRequestFor();
  request.set_wait(false);
  const auto set = Register(request);
  ASSERT_THAT(set, IsOk());
  EXPECT_EQ(set->state(), v1::WEIGHT_SET_STATE_ALLOCATING);
  go_on = true;
  EXPECT_THAT(Register(), IsOk());
}

TEST_F(RegisterServiceTest, SendsProgressTwiceASecondThoughTheLoaderSaysNothing) {
  Start([](FakeLoader& loader) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    LoadsWell()(loader);
  });
  std::atomic<int> progress_count{0};
  ASSERT_THAT(Register(RegisterRequestFor(), &progress_count), IsOk());
  EXPECT_GE(progress_count, 3);
}

TEST_F(RegisterServiceTest, GoesOnLoadingWhenTheCallerLeaves) {
  std::atomic<bool> go_on{false};
  Start([&](FakeLoader& loader) {
    while (!go_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    LoadsWell()(loader);
  });
  {
    grpc::ClientContext context;
    const auto reader = stub_->Register(&context, RegisterRequestFor());
    v1::RegisterResponse response;
    ASSERT_TRUE(reader->Read(&response));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  go_on = true;
  EXPECT_TRUE(Eventually([&] { return Health().status() == v1::HealthResponse::STATUS_READY; }));
  EXPECT_EQ(spawner_->spawn_count(), 1);
}

TEST_F(RegisterServiceTest, PassesOnTheLoadersErrorAndKeepsItListed) {
  Start([](FakeLoader& loader) {
    loader.Fail(MakeError(Reason::kQuantizationUnsupported, "awq in quantization_config", {{"method", "awq"}}));
  });
  EXPECT_THAT(Register(),
              AllOf(StatusIs(Reason::kQuantizationUnsupported, HasSubstr("awq")), HasMetadata("method", "awq")));
  const v1::HealthResponse health = Health();
  ASSERT_THAT(health.weight_sets(), SizeIs(1));
  EXPECT_EQ(health.weight_sets(0).failure().reason(), "QUANTIZATION_UNSUPPORTED");
}

TEST_F(RegisterServiceTest, NeedsAnEnvironment) {
  Start();
  v1::RegisterRequest request = RegisterRequestFor();
  request.clear_environment();
  EXPECT_THAT(Register(request), StatusIs(Reason::kEnvironmentRequired));
}

TEST_F(RegisterServiceTest, RefusesModelsOutsideTheRoots) {
  Start();
  EXPECT_THAT(Register(RegisterRequestFor("/etc")), StatusIs(Reason::kModelOutsideRoots, HasSubstr("models=")));
  EXPECT_THAT(Register(RegisterRequestFor("models:nothing")), StatusIs(Reason::kModelNotFound));
  EXPECT_THAT(Register(RegisterRequestFor("other:m")), StatusIs(Reason::kModelRootUnknown));
}

TEST_F(RegisterServiceTest, RefusesAFileOfTheModelThatLeadsOutsideTheRoots) {
  testing::WriteFile(folder_ / "secret.json", "{}");
  std::filesystem::remove(model_ + "/config.json");
  std::filesystem::create_symlink(folder_ / "secret.json", model_ + "/config.json");
  Start();
  EXPECT_THAT(Register(), StatusIs(Reason::kModelOutsideRoots, HasSubstr("secret.json")));
}

TEST_F(RegisterServiceTest, RefusesDevicesThatItHasNot) {
  Start();
  v1::RegisterRequest request = RegisterRequestFor();
  request.add_devices("cuda:0");
  EXPECT_THAT(Register(request), StatusIs(Reason::kDeviceUnknown, HasSubstr("cuda:0")));
  request.set_devices(0, std::string(63, 'x') + "\xc3\xa9");
  EXPECT_THAT(Register(request), StatusIs(Reason::kDeviceUnknown, HasSubstr("x\xc3\xa9\"")));
  request.set_devices(0, "host");
  request.add_devices("host");
  EXPECT_THAT(Register(request), StatusIs(Reason::kInvalidArgument, HasSubstr("2 devices are named for 1 ranks")));
  request.mutable_devices()->RemoveLast();
  EXPECT_THAT(Register(request), IsOk());
}

TEST_F(RegisterServiceTest, RefusesHandleKindsThatItHasNotNamingBoth) {
  Start();
  v1::RegisterRequest request = RegisterRequestFor();
  request.add_handle_kinds(static_cast<v1::HandleKind>(7));
  EXPECT_THAT(Register(request),
              StatusIs(Reason::kHandleKindUnsupported, AllOf(HasSubstr("HOST_MEMFD"), HasSubstr("7"))));
  request.add_handle_kinds(v1::HANDLE_KIND_HOST_MEMFD);
  EXPECT_THAT(Register(request), IsOk());
}

TEST_F(RegisterServiceTest, RefusesMoreHandleKindsThanThereCouldBeInAShortSentence) {
  Start();
  v1::RegisterRequest request = RegisterRequestFor();
  for (int i = 0; i < 100'000; ++i) request.add_handle_kinds(static_cast<v1::HandleKind>(7));
  EXPECT_THAT(Register(request), StatusIs(Reason::kInvalidArgument, HasSubstr("100000 entries; at most 16")));
}

TEST_F(RegisterServiceTest, RefusesCallsThatWouldWaitTooLongForAWorker) {
  BrokerOptions options;
  options.max_waiting_calls = 0;
  Start(LoadsWell(), std::move(options));
  EXPECT_THAT(Register(), StatusIs(Reason::kTooManyRequests));
  EXPECT_EQ(Health().status(), v1::HealthResponse::STATUS_IDLE);  // needs no worker
}

TEST_F(RegisterServiceTest, ReadsTheModelAnewWhenItHasChanged) {
  Start();
  const auto first = Register();
  testing::CheckpointBuilder().Tensor("a", "BF16", {4, 8}).Write(model_);
  const auto second = Register();
  ASSERT_THAT(second, IsOk());
  EXPECT_NE(first->fingerprint(), second->fingerprint());
}

// ---- Fingerprint.

class FingerprintServiceTest : public ServiceTest {
 protected:
  absl::StatusOr<v1::FingerprintResponse> Fingerprint(const std::string& torch_version) {
    v1::FingerprintRequest request;
    *request.mutable_spec() = SpecOf("models:m");
    *request.mutable_environment() = TorchVersion(torch_version);
    grpc::ClientContext context;
    v1::FingerprintResponse response;
    const absl::Status status = FromGrpc(stub_->Fingerprint(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }
};

TEST_F(FingerprintServiceTest, GivesTheHashAndEveryComponentAndChangesNothing) {
  Start();
  const auto response = Fingerprint("2.11.0");
  ASSERT_THAT(response, IsOk());
  EXPECT_THAT(response->fingerprint(), SizeIs(64));
  EXPECT_GE(response->components_size(), 5);
  EXPECT_FALSE(response->resident());
  EXPECT_EQ(response->compared_with(), "");
  EXPECT_EQ(spawner_->spawn_count(), 0);
}

TEST_F(FingerprintServiceTest, SaysThatTheSetIsResident) {
  Start();
  const auto set = Register();
  const auto response = Fingerprint("2.11.0");
  ASSERT_THAT(response, IsOk());
  EXPECT_EQ(response->fingerprint(), set->fingerprint());
  EXPECT_TRUE(response->resident());
  EXPECT_THAT(response->differences(), SizeIs(0));
}

TEST_F(FingerprintServiceTest, SaysInWhatTheSetThatIsResidentDiffers) {
  Start();
  const auto set = Register();
  const auto response = Fingerprint("2.6.0");
  ASSERT_THAT(response, IsOk());
  EXPECT_FALSE(response->resident());
  EXPECT_EQ(response->compared_with(), set->fingerprint());
  ASSERT_THAT(response->differences(), SizeIs(1));
  EXPECT_EQ(response->differences(0).field(), "environment.torch_version");
  EXPECT_THAT(response->differences(0).requested(), HasSubstr("2.6.0"));
  EXPECT_THAT(response->differences(0).resident(), HasSubstr("2.11.0"));
}

TEST_F(FingerprintServiceTest, RefusesAModelThatIsNotThere) {
  Start();
  std::filesystem::remove_all(model_);
  EXPECT_THAT(Fingerprint("2.11.0"), StatusIs(Reason::kModelNotFound));
}

}  // namespace
}  // namespace weightbroker
