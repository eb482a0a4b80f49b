#include "client/src/unregister.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "common/base/error.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/client/fake_service.h"

namespace weightbroker::client {
namespace {

using ::weightbroker::testing::BreakConnectionUnder;
using ::weightbroker::testing::FakeService;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::ToGrpc;

class UnregisterTest : public ::testing::Test {
 protected:
  UnregisterTest() : connection_(*Connection::Open({.socket_path = service_.socket_path()})) {
    service_.on_list = [this](v1::ListWeightSetsResponse& list) {
      if (!there_) return;
      list.add_weight_sets()->set_fingerprint(service_.fingerprint());
      list.mutable_weight_sets(0)->mutable_register_time()->set_seconds(register_time_);
    };
  }

  absl::StatusOr<v1::UnregisterResponse> Unregister() {
    v1::UnregisterRequest request;
    request.set_fingerprint("ffffffff");
    return UnregisterOnce(*connection_, request, DeadlineIn(std::chrono::seconds(10)));
  }

  FakeService service_;
  std::atomic<bool> there_{true};
  std::atomic<int> register_time_{1};
  std::atomic<int> calls_{0};
  const std::shared_ptr<Connection> connection_;
};

TEST_F(UnregisterTest, SaysThatItIsReleasedWhenTheBrokerDiedAfterItWas) {
  service_.on_unregister = [&](grpc::ServerContext& context, v1::UnregisterResponse&) {
    if (++calls_ > 1) return ToGrpc(MakeError(Reason::kWeightSetUnknown, "no such set"));
    there_ = false;
    return BreakConnectionUnder(context);
  };

  const auto response = Unregister();

  ASSERT_THAT(response, IsOk());
  EXPECT_EQ(response->weight_set().state(), v1::WEIGHT_SET_STATE_RELEASED);
  EXPECT_EQ(response->weight_set().fingerprint(), service_.fingerprint());
  EXPECT_EQ(calls_, 1);
}

TEST_F(UnregisterTest, IsDoneAgainWhenTheBrokerDiedBeforeItWas) {
  service_.on_unregister = [&](grpc::ServerContext& context, v1::UnregisterResponse& response) {
    if (++calls_ == 1) return BreakConnectionUnder(context);
    response.set_ended_lease_count(3);
    return grpc::Status::OK;
  };

  const auto response = Unregister();

  ASSERT_THAT(response, IsOk());
  EXPECT_EQ(response->ended_lease_count(), 3);
}

TEST_F(UnregisterTest, LeavesAloneWhatHasBeenRegisteredAnewMeanwhile) {
  service_.on_unregister = [&](grpc::ServerContext& context, v1::UnregisterResponse&) {
    ++calls_;
    register_time_ = 2;
    return BreakConnectionUnder(context);
  };

  ASSERT_THAT(Unregister(), IsOk());

  EXPECT_EQ(calls_, 1);
}

TEST_F(UnregisterTest, GivesTheServicesRefusal) {
  service_.on_unregister = [](grpc::ServerContext&, v1::UnregisterResponse&) {
    return ToGrpc(MakeError(Reason::kLeased, "held"));
  };

  EXPECT_THAT(Unregister(), StatusIs(Reason::kLeased));
}

}  // namespace
}  // namespace weightbroker::client
