#include "client/src/services.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/client/fake_service.h"

namespace weightbroker::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::weightbroker::testing::FakeGpuUuid;
using ::weightbroker::testing::FakeService;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;

TEST(Services, AreOneWithoutAPlaceholder) {
  const FakeService service;
  const auto services = Services::Open({.socket_path = service.socket_path()});

  ASSERT_THAT(services, IsOk());
  EXPECT_FALSE((*services)->per_gpu());
  EXPECT_THAT((*services)->WaitUntilConnected(DeadlineIn(seconds(10))), IsOk());
  EXPECT_EQ(*(*services)->For("host"), *(*services)->For(FakeGpuUuid(1)));
}

TEST(Services, HaveASocketForEachGpu) {
  const auto services = Services::Open({.socket_path = "/run/weightbroker/{gpu_uuid}/socket"});

  ASSERT_THAT(services, IsOk());
  EXPECT_TRUE((*services)->per_gpu());
  const auto first = (*services)->For(FakeGpuUuid(1));
  ASSERT_THAT(first, IsOk());
  EXPECT_EQ((*first)->socket_path(), "/run/weightbroker/" + FakeGpuUuid(1) + "/socket");
  EXPECT_EQ(*first, *(*services)->For(FakeGpuUuid(1)));
  EXPECT_NE(*first, *(*services)->For(FakeGpuUuid(2)));
}

TEST(Services, PutNothingButAUuidIntoAPath) {
  const auto services = Services::Open({.socket_path = "/run/weightbroker/{gpu_uuid}.sock"});

  for (const char* device : {"host", "", "GPU-../../etc", "0"}) {
    EXPECT_THAT((*services)->For(device), AllOf(StatusIs(Reason::kInvalidArgument), HasMetadata("device", device)));
  }
}

// Two GPUs' services, as their sockets' paths say.
class TwoServicesTest : public ::testing::Test {
 protected:
  TwoServicesTest() {
    for (int i = 0; i < 2; ++i) {
      services_[i].on_fingerprint = [this, i](const v1::FingerprintRequest&, v1::FingerprintResponse* response) {
        response->set_fingerprint(fingerprints_[i]);
        response->set_resident(asked_[i]++ >= late_[i]);
        return grpc::Status::OK;
      };
      std::filesystem::create_symlink(services_[i].socket_path(), folder_ / uuids_[i]);
    }
    opened_ = *Services::Open({.socket_path = folder_ / kGpuUuidPlaceholder});
  }

  absl::StatusOr<std::string> Wait(milliseconds limit = seconds(30), milliseconds patience = seconds(30)) {
    RanksWait wait;
    wait.patience_with_old_failures = patience;
    wait.deadline = DeadlineIn(limit);
    return WaitForOneFingerprint(*opened_, {uuids_[0], uuids_[1]}, wait);
  }

  // The second service's load never ends well: it is listed as failed from the `after`th look on.
  void FailSecond(seconds registered_ago, int after = 0) {
    late_[1] = 1 << 30;
    const int64_t registered = time(nullptr) - registered_ago.count();
    services_[1].on_list = [this, registered, after](v1::ListWeightSetsResponse& response) {
      v1::WeightSet& set = *response.add_weight_sets();
      set.set_fingerprint("same");
      set.set_state(listed_++ >= after ? v1::WEIGHT_SET_STATE_FAILED : v1::WEIGHT_SET_STATE_LOADING);
      set.mutable_register_time()->set_seconds(registered);
      set.mutable_failure()->set_reason("CHECKPOINT_TRUNCATED");
      set.mutable_failure()->set_message("the file is truncated");
    };
  }

  TemporaryFolder folder_;
  FakeService services_[2];
  const std::string uuids_[2] = {FakeGpuUuid(1), FakeGpuUuid(2)};
  std::string fingerprints_[2] = {"same", "same"};
  int late_[2] = {0, 0};  // how often it says that it has not got the weights
  std::atomic<int> asked_[2] = {0, 0};
  std::atomic<int> listed_{0};
  std::shared_ptr<Services> opened_;
};

TEST_F(TwoServicesTest, AgreeOnAFingerprint) { EXPECT_EQ(Wait().value(), "same"); }

TEST_F(TwoServicesTest, AreWaitedForUntilTheLastHasItsWeights) {
  late_[1] = 3;

  EXPECT_EQ(Wait().value(), "same");

  EXPECT_EQ(asked_[1], 4);
}

TEST_F(TwoServicesTest, AreRefusedWhereTheirWeightsDiffer) {
  fingerprints_[1] = "other";

  EXPECT_THAT(Wait(), AllOf(StatusIs(Reason::kFingerprintMismatch, HasSubstr(uuids_[1] + " has other")),
                            HasMetadata(uuids_[0], "same"), HasMetadata(uuids_[1], "other")));
}

TEST_F(TwoServicesTest, AreNamedWhereTheirWeightsDoNotCome) {
  late_[1] = 1 << 30;

  EXPECT_THAT(Wait(seconds(2)),
              AllOf(StatusIs(Reason::kNotResident, HasSubstr(uuids_[1])), HasMetadata("devices", uuids_[1])));
}

TEST_F(TwoServicesTest, FailAtOnceWhenARankHasFailedNamingItAndItsServiceAndWhy) {
  FailSecond(/*registered_ago=*/seconds(-60));

  EXPECT_THAT(
      Wait(std::chrono::hours(1), std::chrono::hours(1)),
      AllOf(StatusIs(Reason::kNotResident, AllOf(HasSubstr("rank 1 has failed"), HasSubstr((folder_ / uuids_[1])),
                                                 HasSubstr("the file is truncated"))),
            HasMetadata("rank", "1"), HasMetadata("devices", uuids_[1]), HasMetadata("cause", "CHECKPOINT_TRUNCATED")));
}

TEST_F(TwoServicesTest, FailAtOnceWhenALoadFailsThatHadBegunBefore) {
  FailSecond(/*registered_ago=*/seconds(60), /*after=*/2);

  EXPECT_THAT(Wait(std::chrono::hours(1), std::chrono::hours(1)),
              AllOf(StatusIs(Reason::kNotResident), HasMetadata("rank", "1")));
}

TEST_F(TwoServicesTest, AreWaitedForWhereTheFailureIsOfAnEarlierStart) {
  FailSecond(/*registered_ago=*/seconds(60));
  late_[1] = 3;

  EXPECT_EQ(Wait().value(), "same");
}

TEST_F(TwoServicesTest, AreNotWaitedForLongWhereNobodyLoadsAgainWhatHadFailed) {
  FailSecond(/*registered_ago=*/seconds(60));

  EXPECT_THAT(Wait(std::chrono::hours(1), milliseconds(100)),
              AllOf(StatusIs(Reason::kNotResident), HasMetadata("rank", "1")));
}

TEST_F(TwoServicesTest, FailAsTheOneThatDoesNotAnswer) {
  std::filesystem::remove(folder_ / uuids_[1]);

  EXPECT_THAT(Wait(), StatusIs(Reason::kServiceUnavailable, HasSubstr(uuids_[1])));
}

}  // namespace
}  // namespace weightbroker::client
