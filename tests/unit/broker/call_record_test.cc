#include "server/broker/call_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "common/base/error.h"
#include "server/broker/health_facts.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/broker/fake_clock.h"

namespace weightbroker {
namespace {

using ::testing::EndsWith;
using testing::FakeClock;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

class CallRecordTest : public ::testing::Test {
 protected:
  CallRecordTest() {
    context_.metrics = &metrics_;
    context_.clock = &clock_;
    context_.live_calls = &live_calls_;
    context_.find_peer = [](const std::string& grpc_peer) -> std::optional<Peer> {
      if (grpc_peer == "fd:7") return Peer{.uid = 1000, .gid = 1000, .pid = 42};
      return std::nullopt;
    };
  }

  FakeClock clock_;
  LiveCalls live_calls_;
  Metrics metrics_{"1.2.3", [] { return GaugeValues(); }};
  ServiceContext context_;
};

TEST_F(CallRecordTest, KnowsTheCallerOfAConnectionThatTheEndpointAccepted) {
  const CallRecord record(context_, RpcMethod::kHealth, "fd:7");
  ASSERT_THAT(record.CheckCaller(), IsOk());
  EXPECT_EQ(record.peer().pid, 42);
}

TEST_F(CallRecordTest, RefusesACallerThatIsNotInTheTable) {
  EXPECT_THAT(CallRecord(context_, RpcMethod::kHealth, "ipv4:127.0.0.1:80").CheckCaller(),
              StatusIs(Reason::kAccessDenied));
}

TEST_F(CallRecordTest, CountsEndDurationAndRefusal) {
  CallRecord record(context_, RpcMethod::kExport, "fd:7");
  clock_.Advance(std::chrono::milliseconds(500));
  record.ObserveDuration();
  clock_.Advance(std::chrono::milliseconds(3'600'000));  // an open stream
  record.End(MakeError(Reason::kDraining, "it goes"));
  const std::string text = metrics_.Render();
  EXPECT_THAT(text, HasSubstr("weightbroker_rpc_duration_seconds_sum{method=\"Export\"} 0.5\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_rpcs_total{code=\"UNAVAILABLE\",method=\"Export\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_refusals_total{reason=\"DRAINING\"} 1\n"));
}

TEST_F(CallRecordTest, DoesNotCountACallerThatLeftAsARefusal) {
  CallRecord(context_, RpcMethod::kExport, "fd:7").End(absl::CancelledError("the caller has left"));
  EXPECT_THAT(metrics_.Render(), ::testing::Not(::testing::ContainsRegex("weightbroker_refusals_total[^ ]* [1-9]")));
}

TEST_F(CallRecordTest, RefusesWhoMayNotDoWhatTheMethodDoes) {
  context_.access.operations[static_cast<size_t>(Operation::kAdminister)].uids = {7};

  EXPECT_THAT(CallRecord(context_, RpcMethod::kUnregister, "fd:7").CheckCaller(), StatusIs(Reason::kAccessDenied));
  EXPECT_THAT(CallRecord(context_, RpcMethod::kScrub, "fd:7").CheckCaller(), StatusIs(Reason::kAccessDenied));
  EXPECT_THAT(CallRecord(context_, RpcMethod::kExport, "fd:7").CheckCaller(), IsOk());
}

TEST_F(CallRecordTest, ChecksAnotherOperationThanTheMethodsWhereTheCallIsOne) {
  context_.access.operations[static_cast<size_t>(Operation::kPublish)].uids = {7};

  const CallRecord record(context_, RpcMethod::kRegister, "fd:7");

  EXPECT_THAT(record.CheckCaller(), IsOk());
  EXPECT_THAT(record.CheckCaller(Operation::kPublish), StatusIs(Reason::kAccessDenied));
}

TEST_F(CallRecordTest, RefusesAUserWithTooManyCallsUnderWayNamingTheLimitUntilOneHasEnded) {
  ClientLimits limits(2);
  context_.limits = &limits;
  const CallRecord first(context_, RpcMethod::kExport, "fd:7");
  {
    const CallRecord second(context_, RpcMethod::kExport, "fd:7");
    const absl::Status refused = CallRecord(context_, RpcMethod::kHealth, "fd:7").CheckCaller();
    EXPECT_THAT(refused, StatusIs(Reason::kTooManyRequests, HasSubstr("--max_calls_per_uid")));
    EXPECT_THAT(refused, HasMetadata("limit", "max_calls_per_uid"));
  }
  EXPECT_THAT(CallRecord(context_, RpcMethod::kHealth, "fd:7").CheckCaller(), IsOk());
  EXPECT_THAT(metrics_.Render(), HasSubstr("weightbroker_limits_hit_total{limit=\"max_calls_per_uid\"} 1\n"));
}

TEST_F(CallRecordTest, RefusesACallThatHasWaitedTooLongForItsTurn) {
  context_.call_deadline = std::chrono::milliseconds(1000);
  const CallRecord record(context_, RpcMethod::kFingerprint, "fd:7");
  EXPECT_THAT(record.CheckInTime(), IsOk());
  clock_.Advance(std::chrono::milliseconds(1001));
  EXPECT_THAT(record.CheckInTime(), StatusIs(Reason::kDeadlineExceeded, HasSubstr("--call_deadline")));
}

TEST_F(CallRecordTest, WritesOneAuditLineForWhatWasDoneAndForARefusalSayingWhoWhatAndHowItEnded) {
  ::testing::internal::CaptureStderr();
  {
    CallRecord done(context_, RpcMethod::kUnregister, "fd:7");
    done.SetObject("abc");
    done.End(absl::OkStatus());
    CallRecord refused(context_, RpcMethod::kExport, "fd:7");
    refused.End(MakeError(Reason::kNotResident, "it is not there"));
    CallRecord removed(context_, RpcMethod::kRemoveGroup, "fd:7");
    removed.SetObject("pair");
    removed.End(absl::OkStatus());
    CallRecord looked(context_, RpcMethod::kHealth, "fd:7");
    looked.End(absl::OkStatus());
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("event=audit method=Unregister uid=1000 gid=1000 peer_pid=42 object=abc outcome=ok\n"));
  EXPECT_THAT(log, HasSubstr("event=audit method=Export uid=1000 gid=1000 peer_pid=42 outcome=NOT_RESIDENT\n"));
  EXPECT_THAT(log, HasSubstr("event=audit method=RemoveGroup uid=1000 gid=1000 peer_pid=42 object=pair outcome=ok\n"));
  EXPECT_THAT(log, ::testing::Not(HasSubstr("method=Health")));
}

TEST(ToGrpcStatus, CarriesCodeMessageAndDetails) {
  const grpc::Status status = ToGrpcStatus(MakeError(Reason::kLeased, "has 2 leases", {{"lease_count", "2"}}));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(status.error_message(), "has 2 leases");
  EXPECT_THAT(ParseRpcStatus(status.error_details()), HasMetadata("lease_count", "2"));
}

TEST(ToGrpcStatus, StaysUnderFourKibibytesOnTheWireWhateverTheMessage) {
  std::string umlauts;
  for (int i = 0; i < 3000; ++i) umlauts += "\xc3\xa4";
  const grpc::Status status = ToGrpcStatus(MakeError(Reason::kSystemError, umlauts, {{"a", std::string(5000, 'x')}}));
  size_t encoded_bytes = 0;  // as gRPC percent-encodes it
  for (const char c : status.error_message()) encoded_bytes += c >= ' ' && c <= '~' && c != '%' ? 1 : 3;
  EXPECT_LE(encoded_bytes + status.error_details().size(), 4096u);
  EXPECT_THAT(status.error_message(), EndsWith(" more bytes)"));
}

TEST(HealthFacts, AreGivenWithoutWaitingOnceTheyHaveBeenRead) {
  FakeClock clock;
  HealthFacts facts(clock, [] { return HealthFacts::Facts{.available_bytes = 7}; });
  EXPECT_FALSE(facts.Fresh().has_value());
  facts.Get();
  ASSERT_TRUE(facts.Fresh().has_value());
  EXPECT_EQ(facts.Fresh()->available_bytes, 7);
  clock.Advance(std::chrono::seconds(1));
  EXPECT_FALSE(facts.Fresh().has_value());
}

TEST(HealthFacts, AreReadAtMostOnceASecond) {
  FakeClock clock;
  int reads = 0;
  HealthFacts facts(clock, [&] { return HealthFacts::Facts{.available_bytes = 1, .open_connections = ++reads}; });
  EXPECT_EQ(facts.Get().open_connections, 1);
  clock.Advance(std::chrono::milliseconds(999));
  EXPECT_EQ(facts.Get().open_connections, 1);
  clock.Advance(std::chrono::milliseconds(1));
  EXPECT_EQ(facts.Get().open_connections, 2);
}

}  // namespace
}  // namespace weightbroker
