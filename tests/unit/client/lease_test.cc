// What becomes of a lease whose stream ends: it is renewed, or lost and said to be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/error.h"
#include "tests/unit/client/fake_service.h"
#include "weightbroker/client.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::FakeService;
using ::weightbroker::testing::ToGrpc;
using ExportCall = FakeService::ExportCall;
using Kind = LeaseEvent::Kind;

class LeaseTest : public ::testing::Test {
 protected:
  LeaseTest() {
    options_.fallback = Fallback::kFail;
    options_.on_lease_event = [this](const LeaseEvent& event) {
      const std::lock_guard<std::mutex> lock(mutex_);
      kinds_.push_back(event.kind);
      why_ = event.why;
    };
  }

  Result<MappedWeights> Attach() {
    ClientOptions options;
    options.mode = Mode::kClient;
    options.torch_version = "any";
    options.socket_path = service_.socket_path();
    WeightSpec spec;
    spec.model = "/models/tiny";
    return Client::Create(options)->Attach(spec, options_);
  }

  bool WaitFor(Kind kind) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < give_up) {
      if (!Kinds().empty() && Kinds().back() == kind) return true;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return false;
  }

  std::vector<Kind> Kinds() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kinds_;
  }
  Status Why() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return why_;
  }

  AttachOptions options_;
  std::mutex mutex_;
  std::vector<Kind> kinds_;
  Status why_;
  FakeService service_;
};

grpc::Status SendAndBreak(ExportCall& call) {
  call.Send();
  return call.BreakConnection();
}

TEST_F(LeaseTest, IsRenewedByFingerprintAndGenerationWhenItsBrokerDies) {
  v1::ExportRequest asked;
  service_.on_export = SendAndBreak;
  service_.on_renewal = [&](ExportCall& call) {
    asked = call.request();
    call.SendRenewal();
    return call.Hold();
  };
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();

  ASSERT_TRUE(WaitFor(Kind::kRenewed));

  EXPECT_THAT(Kinds(), ElementsAre(Kind::kInterrupted, Kind::kRenewed));
  EXPECT_TRUE(weights->lease_status().ok());
  EXPECT_FALSE(weights->lease_lost());
  EXPECT_EQ(asked.fingerprint(), service_.fingerprint());
  EXPECT_TRUE(asked.hold());
  EXPECT_EQ(asked.renewal().generation(), 7);
  EXPECT_EQ(asked.renewal().resident_time().seconds(), 1000);
  EXPECT_TRUE(weights->Verify().ok());
}

TEST_F(LeaseTest, IsRenewedAsOftenAsBrokersDie) {
  std::atomic<int> renewals{0};
  service_.on_export = SendAndBreak;
  service_.on_renewal = [&](ExportCall& call) {
    call.SendRenewal();
    return ++renewals < 4 ? call.BreakConnection() : call.Hold();
  };
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok());

  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (renewals < 4 && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(milliseconds(1));

  EXPECT_EQ(renewals, 4);
  EXPECT_TRUE(WaitFor(Kind::kRenewed));
}

TEST_F(LeaseTest, IsRenewedWhenTheBrokerSaysThatItGoes) {
  service_.on_export = [](ExportCall& call) {
    call.Send();
    call.SendEvent("the service is shutting down");
    return grpc::Status::OK;
  };
  std::atomic<int> renewals{0};
  service_.on_renewal = [&](ExportCall& call) {
    if (++renewals == 1) return ToGrpc(MakeError(Reason::kDraining, "still going down"));
    call.SendRenewal();
    return call.Hold();
  };
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok());

  ASSERT_TRUE(WaitFor(Kind::kRenewed));

  EXPECT_THAT(Kinds(), ElementsAre(Kind::kDraining, Kind::kInterrupted, Kind::kRenewed));
  EXPECT_TRUE(weights->lease_status().ok());
}

TEST_F(LeaseTest, IsNotLostWhileItIsBeingRenewedAndSaysThatItIsInterrupted) {
  service_.on_export = SendAndBreak;
  service_.on_renewal = [](ExportCall& call) { return call.Hold(); };  // and no answer
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok());

  ASSERT_TRUE(WaitFor(Kind::kInterrupted));

  EXPECT_EQ(weights->lease_status().reason(), "SERVICE_UNAVAILABLE");
  EXPECT_FALSE(weights->lease_lost());
}

TEST_F(LeaseTest, IsLostWhenTheWeightSetIsAnotherGeneration) {
  service_.on_export = SendAndBreak;
  service_.on_renewal = [](ExportCall&) { return ToGrpc(MakeError(Reason::kGenerationMismatch, "another one")); };
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok());

  ASSERT_TRUE(WaitFor(Kind::kLost));

  EXPECT_THAT(Kinds(), ElementsAre(Kind::kInterrupted, Kind::kLost));
  EXPECT_TRUE(weights->lease_lost());
  EXPECT_EQ(weights->lease_status().reason(), "GENERATION_MISMATCH");
  EXPECT_EQ(Why().reason(), "GENERATION_MISMATCH");
  EXPECT_TRUE(weights->Verify().ok());
}

TEST_F(LeaseTest, IsLostWhenAServiceThatKnowsNoRenewalsGrantsANewOne) {
  service_.on_export = SendAndBreak;
  service_.on_renewal = [](ExportCall& call) {
    call.Send();
    return call.Hold();
  };
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok());

  ASSERT_TRUE(WaitFor(Kind::kLost));

  EXPECT_EQ(weights->lease_status().reason(), "PROTOCOL_ERROR");
}

TEST_F(LeaseTest, IsLostWhenTheServiceStaysAwayTooLong) {
  service_.on_export = SendAndBreak;
  service_.on_renewal = [](ExportCall& call) { return call.BreakConnection(); };
  options_.lease_renewal_deadline = milliseconds(200);
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok());

  ASSERT_TRUE(WaitFor(Kind::kLost));

  EXPECT_EQ(weights->lease_status().reason(), "SERVICE_UNAVAILABLE");
  EXPECT_THAT(weights->lease_status().message(), HasSubstr("within 200 ms"));
}

TEST_F(LeaseTest, IsLostAtOnceWhereNoRenewalIsWanted) {
  service_.on_export = SendAndBreak;
  options_.lease_renewal_deadline = milliseconds(0);
  const auto weights = Attach();
  ASSERT_TRUE(weights.ok());

  ASSERT_TRUE(WaitFor(Kind::kLost));

  EXPECT_EQ(weights->lease_status().reason(), "SERVICE_UNAVAILABLE");
}

TEST_F(LeaseTest, EndsWithTheWeightsWhileItIsBeingRenewed) {
  service_.on_export = SendAndBreak;
  service_.on_renewal = [](ExportCall& call) { return call.Hold(); };  // and no answer
  std::optional<Result<MappedWeights>> weights = Attach();
  ASSERT_TRUE(weights->ok());
  ASSERT_TRUE(WaitFor(Kind::kInterrupted));

  weights.reset();

  EXPECT_THAT(Kinds(), ElementsAre(Kind::kInterrupted));
}

TEST_F(LeaseTest, EndsWithTheWeightsWhileNoServiceIsThere) {
  std::optional<Result<MappedWeights>> weights;
  {
    FakeService service;
    ClientOptions options;
    options.mode = Mode::kClient;
    options.torch_version = "any";
    options.socket_path = service.socket_path();
    WeightSpec spec;
    spec.model = "/models/tiny";
    weights = Client::Create(options)->Attach(spec, options_);
    ASSERT_TRUE(weights->ok());
  }
  ASSERT_TRUE(WaitFor(Kind::kInterrupted));
  const auto start = std::chrono::steady_clock::now();

  weights.reset();

  EXPECT_LT(std::chrono::steady_clock::now() - start, options_.lease_renewal_deadline);
}

}  // namespace
}  // namespace weightbroker
