// Clients that mean no good, or go astray: each is refused or cut off, and a good one is served meanwhile. How long the
// good one takes is measured by bench/hostile_bench, not here.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "client/include/weightbroker/redeem.h"
#include "common/base/error.h"
#include "tests/integration/hostile/attacks.h"
#include "tests/integration/hostile/raw_client.h"
#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/ticket_request.h"

namespace weightbroker::testing {
namespace {

using client::Connection;
using client::DeadlineIn;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kTensors = 6000;  // a manifest that no socket's buffer holds
constexpr uid_t kNobody = 65534;
constexpr int kLongEnough =
    30'000;  // milliseconds, on a slow machine: an attack ends when all its connections are closed

// With limits and times small enough to be met in a test.
std::vector<std::string> Flags() {
  return {"--socket_mode=0666", "--admin_uids=root", "--max_connections_per_uid=300", "--write_timeout=1s",
          "--max_calls_per_uid=500"};
}

class HostileTest : public ::testing::Test {
 protected:
  HostileTest() : service_(Flags()) {
    const std::filesystem::path folder = std::filesystem::path(service_.socket()).parent_path();
    std::filesystem::permissions(folder, std::filesystem::perms(0755));
    CheckpointBuilder builder;
    for (int i = 0; i < kTensors; ++i) builder.Tensor("layer." + std::to_string(i) + ".weight", "BF16", {2});
    builder.Write(service_.NewModel("m"));
    std::filesystem::create_symlink("/etc", service_.ModelFolder("link-out"));
    const auto set = service_.Register("m");
    EXPECT_THAT(set, IsOk());
    fingerprint_ = set.ok() ? set->fingerprint() : "";
    connection_ = *Connection::Open({.socket_path = service_.socket()});
  }

  // Runs the attack, as another user where that can be, and serves a good client meanwhile.
  nlohmann::json Attack(const std::string& name, int milliseconds = 3000) {
    std::vector<std::string> flags = {"--socket",       service_.socket(),
                                      "--attack",       name,
                                      "--fingerprint",  fingerprint_,
                                      "--milliseconds", std::to_string(milliseconds),
                                      "--seed",         std::to_string(TestSeed())};
    if (geteuid() == 0) flags.insert(flags.end(), {"--uid", std::to_string(kNobody)});
    Program hostile("weightbroker-hostile", flags);
    int served = 0;
    while (hostile.IsRunning()) {
      ServeAGoodClient();
      ++served;
    }
    EXPECT_TRUE(hostile.Wait().success()) << hostile.Errors();
    EXPECT_GT(served, 0);
    ServeAGoodClient();
    return hostile.Json();
  }

  void ServeAGoodClient() {
    EXPECT_THAT(service_.Health(), IsOk());
    const auto weights = service_.Attach("m");
    EXPECT_TRUE(weights.ok()) << weights.status().ToString();
  }

  std::string Errors() { return service_.program().Errors(); }

  Service service_;
  std::string fingerprint_;
  std::shared_ptr<Connection> connection_;
};

TEST_F(HostileTest, WhoSaysNothingIsDropped) {
  const auto report = Attack("silent", kLongEnough);
  EXPECT_EQ(report["refused"], 200) << "dropped after the handshake's two seconds";
}

TEST_F(HostileTest, WhoClosesHalfOfItsConnectionIsDropped) { EXPECT_EQ(Attack("half_closed", kLongEnough)["open"], 0); }

TEST_F(HostileTest, WhoSaysGarbageIsDropped) {
  const auto report = Attack("garbage", kLongEnough);
  EXPECT_EQ(report["attempts"], 200);
  // A few whose random bytes begin a frame that may be may go on with it.
  EXPECT_GE(report["refused"], 180) << report.dump();
}

TEST_F(HostileTest, OfAThousandConnectionsOfOneUserThoseBeyondTheLimitAreRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user";
  const auto report = Attack("connections", 6000);
  EXPECT_EQ(report["attempts"], 1000);
  EXPECT_GE(report["refused"], 700) << report.dump();
  EXPECT_THAT(Errors(), HasSubstr("reason=too_many_connections"));
}

TEST_F(HostileTest, ConnectionsThatAreClosedAtOnceLeaveNothing) {
  EXPECT_EQ(Attack("connect_close", 20'000)["attempts"], 10'000);
  EXPECT_TRUE(Eventually([&] { return service_.Health()->connection_count() <= 4; }));
}

TEST_F(HostileTest, WhoDoesNotReadItsManifestIsCutOffAndItsLeaseEnds) {
  Attack("slow_reader", 1500);
  EXPECT_TRUE(Eventually([&] { return service_.Health()->lease_count() == 0; }));
}

TEST_F(HostileTest, WhoKeepsReadingNothingIsCutOffThoughItStays) {
  const UniqueFd connection = ConnectTo(service_.socket());
  v1::ExportRequest request;
  request.set_fingerprint(fingerprint_);
  request.set_hold(true);
  SendAll(connection.get(),
          Http2Preface() + RawCall(1, "/weightbroker.v1.WeightBrokerService/Export", request.SerializeAsString()));
  ASSERT_TRUE(Eventually([&] { return service_.Health()->lease_count() == 1; }));

  EXPECT_TRUE(Eventually([&] { return service_.Health()->lease_count() == 0; }));
  EXPECT_THAT(Errors(), HasSubstr("event=call.cut"));
}

TEST_F(HostileTest, EndlessRegistersAreAnsweredAndLeaveRoom) {
  EXPECT_GT(Attack("endless_register")["refused"], 0);
  EXPECT_EQ(service_.Health()->load_count(), 0);
}

TEST_F(HostileTest, PathsThatLeadOutAreRefused) {
  Attack("path_escapes");
  for (const char* path : {"models:../../etc", "/etc", "models:m/../../../etc", "models:link-out", "models:/etc/ssl",
                           "models:m/../link-out/ssl"}) {
    v1::FingerprintRequest request;
    request.mutable_spec()->set_model(path);
    request.mutable_environment()->set_torch_version("any");
    v1::FingerprintResponse response;
    const absl::Status status = connection_->Call(DeadlineIn(kPatience), [&](grpc::ClientContext& context) {
      return connection_->service().Fingerprint(&context, request, &response);
    });
    EXPECT_THAT(GetErrorDetails(status).reason, AnyOf("MODEL_OUTSIDE_ROOTS", "MODEL_NOT_FOUND")) << path;
    EXPECT_TRUE(response.fingerprint().empty()) << path;
  }
}

TEST_F(HostileTest, AUserWhoMayNotAdministerReleasesNothing) {
  if (geteuid() != 0) GTEST_SKIP() << "needs another user";
  EXPECT_GT(Attack("forbidden_user")["refused"], 0);
  EXPECT_THAT(Errors(), HasSubstr("event=audit method=Unregister uid=65534 gid=65534"));
  EXPECT_THAT(Errors(), HasSubstr("may not admin here"));
  EXPECT_EQ(service_.Health()->weight_sets(0).state(), v1::WEIGHT_SET_STATE_RESIDENT);
}

TEST_F(HostileTest, RequestsOverTheLimitAreRefused) {
  Attack("overlong_messages");
  Attack("overlong_metadata");
  v1::FingerprintRequest request;
  request.mutable_spec()->set_model(std::string(2 << 20, 'x'));
  v1::FingerprintResponse response;
  const absl::Status status = connection_->Call(DeadlineIn(kPatience), [&](grpc::ClientContext& context) {
    return connection_->service().Fingerprint(&context, request, &response);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

TEST_F(HostileTest, ForgedTicketsGetNothing) {
  const auto report = Attack("forged_tickets");
  EXPECT_EQ(report["open"], 0);
  EXPECT_THAT(Errors(), HasSubstr("reason=ticket_invalid"));
}

TEST_F(HostileTest, ATicketIsGoodOnceAndForItsUserAlone) {
  v1::ExportRequest request;
  request.set_fingerprint(fingerprint_);
  request.set_hold(true);
  grpc::ClientContext context;
  const auto reader = connection_->service().Export(&context, request);
  v1::ExportResponse response;
  ASSERT_TRUE(reader->Read(&response));
  const std::string ticket = response.header().ticket();
  const auto redeem = [&] {
    const UniqueFd connection = ConnectTo(service_.socket());
    SendAll(connection.get(), TicketRequest(ticket));
    return ReadSome(connection.get(), 16, std::chrono::milliseconds(5000));
  };

  const std::string first = redeem();
  const std::string second = redeem();

  ASSERT_GE(first.size(), 16u);
  ASSERT_GE(second.size(), 16u);
  EXPECT_EQ(first[12], ticket_protocol::kOk);
  EXPECT_EQ(second[12], ticket_protocol::kTicketRefused) << "replayed";
  EXPECT_THAT(Errors(), Not(HasSubstr(absl::BytesToHexString(ticket)))) << "no ticket in the log";
  context.TryCancel();
  while (reader->Read(&response)) {
  }
  reader->Finish();
}

}  // namespace
}  // namespace weightbroker::testing
