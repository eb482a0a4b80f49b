// What clients say of how they got their weights, as the service's metrics show it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "common/base/error.h"
#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

class ReportTest : public ::testing::Test {
 protected:
  ReportTest() : port_(FreePort()), service_({"--metrics_address=127.0.0.1:" + std::to_string(port_)}) {
    CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service_.NewModel("m"));
  }

  Result<MappedWeights> Attach(const std::string& torch_version, Fallback fallback) const {
    ClientOptions client;
    client.mode = Mode::kClient;
    client.torch_version = torch_version;
    client.socket_path = service_.socket();
    client.model_roots["models"] = service_.ModelFolder("");
    WeightSpec spec;
    spec.model = Service::Model("m");
    AttachOptions options;
    options.fallback = fallback;
    return Client::Create(client)->Attach(spec, options);
  }

  // Whether a counter comes to that value. Reports are sent when the engine has gone on already.
  bool Counts(const std::string& series, double value) const {
    return Eventually([&] { return ReadMetric(port_, "weightbroker_client_" + series) == value; });
  }

  const int port_;
  const Service service_;
};

TEST_F(ReportTest, AnAttachIsCountedWithItsTime) {
  EXPECT_TRUE(Counts("attaches_total{outcome=\"attached\"}", 0)) << "the series is there from the start";
  ASSERT_THAT(service_.Register("m"), IsOk());
  const auto weights = Attach("any", Fallback::kFail);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_TRUE(Counts("attaches_total{outcome=\"attached\"}", 1));
  EXPECT_TRUE(Counts("attach_seconds_count", 1));
  EXPECT_GT(ReadMetric(port_, "weightbroker_client_attach_seconds_sum"), 0);
}

TEST_F(ReportTest, AFallbackAndAFailureAreCountedWithTheirReasons) {
  const auto from_disk = Attach("any", Fallback::kDisk);
  ASSERT_TRUE(from_disk.ok()) << from_disk.status().ToString();
  EXPECT_TRUE(Counts("attaches_total{outcome=\"disk\"}", 1));
  EXPECT_TRUE(Counts("fallbacks_total{reason=\"NOT_RESIDENT\"}", 1));

  ASSERT_THAT(service_.Register("m"), IsOk());
  EXPECT_FALSE(Attach("another", Fallback::kFail).ok());
  EXPECT_TRUE(Counts("attaches_total{outcome=\"failed\"}", 1));
  EXPECT_TRUE(Counts("fallbacks_total{reason=\"FINGERPRINT_MISMATCH\"}", 1));
  EXPECT_TRUE(Counts("attach_seconds_count", 0));
}

TEST_F(ReportTest, WhatIsNoOutcomeAndNoReasonIsNotBelieved) {
  const auto connection = *client::Connection::Open({.socket_path = service_.socket()});
  v1::ReportAttachRequest request;
  const auto report = [&] {
    return connection->Call(client::DeadlineIn(kPatience), [&](grpc::ClientContext& context) {
      v1::ReportAttachResponse response;
      return connection->service().ReportAttach(&context, request, &response);
    });
  };
  EXPECT_TRUE(HasReason(report(), Reason::kInvalidArgument));
  request.set_outcome(v1::ReportAttachRequest::OUTCOME_DISK);
  request.set_reason("a reason that would be a label of its own");
  EXPECT_THAT(report(), IsOk());
  EXPECT_TRUE(Counts("fallbacks_total{reason=\"OTHER\"}", 1));
  EXPECT_EQ(ReadMetric(port_, "weightbroker_client_fallbacks_total{reason=\"" + request.reason() + "\"}"), -1);
}

// One of them would be in the sum for as long as the broker lives.
TEST_F(ReportTest, ATimeThatNoAttachTakesIsRefusedAndNotCounted) {
  const auto connection = *client::Connection::Open({.socket_path = service_.socket()});
  v1::ReportAttachRequest request;
  request.set_outcome(v1::ReportAttachRequest::OUTCOME_ATTACHED);
  const auto report = [&](double seconds) {
    request.set_seconds(seconds);
    return connection->Call(client::DeadlineIn(kPatience), [&](grpc::ClientContext& context) {
      v1::ReportAttachResponse response;
      return connection->service().ReportAttach(&context, request, &response);
    });
  };
  for (const double seconds :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(), 1.7e308, -1.0, 86400.1}) {
    EXPECT_THAT(report(seconds), StatusIs(Reason::kInvalidArgument)) << seconds;
  }
  EXPECT_THAT(report(86400), IsOk());
  EXPECT_THAT(report(0), IsOk());
  EXPECT_TRUE(Counts("attaches_total{outcome=\"attached\"}", 2));
  EXPECT_TRUE(Counts("attach_seconds_count", 2));
  EXPECT_TRUE(Counts("attach_seconds_sum", 86400));
}

}  // namespace
}  // namespace weightbroker::testing
