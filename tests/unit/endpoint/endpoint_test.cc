// The endpoint with a real gRPC server behind it and real clients before it.
#include "server/endpoint/endpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <optional>
#include <thread>

#include "client/include/weightbroker/redeem.h"
#include "common/base/log.h"
#include "common/process/spawn.h"
#include "server/endpoint/listener.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/socket_client.h"
#include "tests/unit/endpoint/temp_folder.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::weightbroker::testing::Connect;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::kNobody;
using ::weightbroker::testing::RunAsUser;
using ::weightbroker::testing::Send;
using ::weightbroker::testing::TempFolder;

constexpr char kCallArgument[] = "--call=";

// Answers Health with who called: the process in process_id, the user in lease_count.
class WhoAmI final : public v1::WeightBrokerService::CallbackService {
 public:
  void set_peers(PeerTable* peers) { peers_ = peers; }

  grpc::ServerUnaryReactor* Health(grpc::CallbackServerContext* context, const v1::HealthRequest*,
                                   v1::HealthResponse* response) override {
    auto* reactor = context->DefaultReactor();
    const auto peer = peers_->Find(context->peer());
    if (peer.has_value()) {
      response->set_process_id(peer->pid);
      response->set_lease_count(static_cast<int32_t>(peer->uid));
      reactor->Finish(grpc::Status::OK);
    } else {
      reactor->Finish(grpc::Status(grpc::StatusCode::INTERNAL, "unknown peer " + context->peer()));
    }
    return reactor;
  }

 private:
  PeerTable* peers_ = nullptr;
};

std::shared_ptr<grpc::Channel> NewChannel(const std::string& path) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  return grpc::CreateCustomChannel("unix:" + path, grpc::InsecureChannelCredentials(), arguments);
}

grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel, v1::HealthResponse* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(10));
  return v1::WeightBrokerService::NewStub(channel)->Health(&context, {}, response);
}

class EndpointTest : public ::testing::Test {
 protected:
  void Start(AccessPolicy access = {}) {
    SetLogLevel(LogLevel::kError);
    auto listener = Listener::Create({.path = path_, .mode = 0666});
    ASSERT_THAT(listener, IsOk());
    listener_.emplace(*std::move(listener));
    ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
    grpc::ServerBuilder builder;
    service_.set_peers(&peers_);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    endpoint_.emplace(EndpointOptions{.listen_fd = listener_->fd(),
                                      .server = server_.get(),
                                      .tickets = &tickets_,
                                      .peers = &peers_,
                                      .access = std::move(access),
                                      .handshake_timeout = milliseconds(500)});
  }

  void TearDown() override {
    if (endpoint_.has_value()) endpoint_->Stop();
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + seconds(1));
  }

  // What a client process of its own says, run as `uid`: "ok pid uid" or the error.
  std::string CallFromAnotherProcess(uid_t uid) {
    const std::string output = folder_ / "output";
    UniqueFd file(open(output.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    auto self = PathBesideThisProgram("endpoint_test");
    EXPECT_THAT(self, IsOk());
    auto child = Spawn({.path = *self,
                        .arguments = {kCallArgument + path_, std::to_string(uid)},
                        .fds = {{file.get(), STDOUT_FILENO}}});
    EXPECT_THAT(child, IsOk());
    child_pid_ = child->pid();
    EXPECT_THAT(child->Wait(seconds(20)), IsOk());
    char text[4096];
    const ssize_t size = pread(file.get(), text, sizeof(text), 0);
    return std::string(text, size > 0 ? static_cast<size_t>(size) : 0);
  }

  TempFolder folder_;
  const std::string path_ = folder_ / "s";
  TicketBox tickets_;
  WhoAmI service_;
  std::optional<Listener> listener_;
  std::unique_ptr<grpc::Server> server_;
  PeerTable peers_;
  std::optional<Endpoint> endpoint_;
  pid_t child_pid_ = -1;
};

TEST_F(EndpointTest, TellsACallWhoItsCallerIs) {
  Start();
  v1::HealthResponse response;
  const grpc::Status status = Call(NewChannel(path_), &response);

  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.process_id(), getpid());
  EXPECT_EQ(response.lease_count(), static_cast<int32_t>(geteuid()));
}

TEST_F(EndpointTest, TellsApartCallersOfSeveralProcessesAndUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  Start();
  v1::HealthResponse response;
  const auto channel = NewChannel(path_);
  ASSERT_TRUE(Call(channel, &response).ok());

  const std::string nobody = CallFromAnotherProcess(kNobody);
  EXPECT_EQ(nobody, "ok pid " + std::to_string(child_pid_) + " uid 65534");
  const std::string root = CallFromAnotherProcess(0);
  EXPECT_EQ(root, "ok pid " + std::to_string(child_pid_) + " uid 0");

  ASSERT_TRUE(Call(channel, &response).ok());
  EXPECT_EQ(response.process_id(), getpid());
}

TEST_F(EndpointTest, TellsAUserWhoIsNotAllowedWhyInTheirGrpcError) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  Start({.allowed_uids = {1234}, .allowed_gids = {}});

  const std::string refused = CallFromAnotherProcess(kNobody);
  EXPECT_THAT(refused, StartsWith("7 user 65534 (group 65534) may not use this service"));
  EXPECT_THAT(refused, HasSubstr("reason ACCESS_DENIED uid 65534"));
  EXPECT_EQ(peers_.CountOpen(), 0) << "gRPC never saw it";
}

TEST_F(EndpointTest, CarriesGrpcAndDescriptorsOnOneSocket) {
  Start();
  auto fds = std::make_shared<std::vector<UniqueFd>>();
  fds->emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const Ticket ticket = tickets_.Issue({.uid = geteuid(), .lease_id = 1, .fds = fds}, seconds(60));
  int received = -1;
  size_t count = 0;
  char error[kRedeemErrorBytes] = {};
  v1::HealthResponse response;

  EXPECT_TRUE(Call(NewChannel(path_), &response).ok());
  EXPECT_EQ(RedeemTicket(path_.c_str(), ticket.data(), ticket.size(), &received, 1, &count, 5000, error, sizeof(error)),
            0)
      << error;
  EXPECT_EQ(count, 1u);
  UniqueFd{received};
}

TEST_F(EndpointTest, ServesCallsWhileOthersHangInTheirHandshake) {
  Start();
  std::vector<UniqueFd> hanging;
  for (int i = 0; i < 20; ++i) {
    hanging.push_back(Connect(path_));
    Send(hanging.back(), i % 2 == 0 ? "PRI * HTT" : "\x89WBFD");
  }
  const auto start = std::chrono::steady_clock::now();
  v1::HealthResponse response;

  EXPECT_TRUE(Call(NewChannel(path_), &response).ok());

  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(450)) << "it waited for their time-out";
}

TEST_F(EndpointTest, LeavesAClientAloneThatHasConnectedAndCallsLater) {
  Start();
  const auto channel = NewChannel(path_);
  ASSERT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + seconds(10)));
  std::this_thread::sleep_for(milliseconds(700));  // more than a handshake may take
  EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
  v1::HealthResponse response;
  EXPECT_TRUE(Call(channel, &response).ok());
}

TEST_F(EndpointTest, DropsAClientThatSendsThePrefaceAndThenNothing) {
  Start();
  const UniqueFd client = Connect(path_);
  Send(client, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
  EXPECT_TRUE(testing::IsClosedWithin(client, 10'000));
  EXPECT_EQ(peers_.CountOpen(), 0) << "gRPC would have let it be";
}

TEST_F(EndpointTest, CountsAConnectionUntilItIsClosed) {
  Start();
  v1::HealthResponse response;
  auto first = NewChannel(path_);
  auto second = NewChannel(path_);
  ASSERT_TRUE(Call(first, &response).ok());
  ASSERT_TRUE(Call(second, &response).ok());
  EXPECT_EQ(peers_.CountOpen(), 2);

  first.reset();

  const auto deadline = std::chrono::steady_clock::now() + seconds(10);
  while (peers_.CountOpen() != 1 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(peers_.CountOpen(), 1);
}

TEST_F(EndpointTest, KnowsTheNewPeerWhenADescriptorNumberIsUsedAgain) {
  Start();
  for (int i = 0; i < 20; ++i) {
    v1::HealthResponse response;
    ASSERT_TRUE(Call(NewChannel(path_), &response).ok());
    EXPECT_EQ(response.process_id(), getpid());
  }
}

TEST_F(EndpointTest, LeavesOpenConnectionsToGrpcWhenItStops) {
  Start();
  v1::HealthResponse response;
  const auto channel = NewChannel(path_);
  ASSERT_TRUE(Call(channel, &response).ok());

  endpoint_->Stop();

  EXPECT_TRUE(Call(channel, &response).ok());
}

// The program's other half: one call, as another user.
int CallAndPrint(const std::string& path, uid_t uid) {
  if (uid != geteuid() && (setgid(uid) != 0 || setuid(uid) != 0)) return 1;
  v1::HealthResponse response;
  const grpc::Status status = Call(NewChannel(path), &response);
  if (status.ok()) {
    printf("ok pid %ld uid %d", static_cast<long>(response.process_id()), response.lease_count());
  } else {
    const ErrorDetails details = GetErrorDetails(ParseRpcStatus(status.error_details()));
    const auto named = details.metadata.find("uid");
    printf("%d %s reason %s uid %s", static_cast<int>(status.error_code()), status.error_message().c_str(),
           details.reason.c_str(), named == details.metadata.end() ? "" : named->second.c_str());
  }
  fflush(stdout);
  return 0;
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first.rfind(weightbroker::kCallArgument, 0) == 0) {
    return weightbroker::CallAndPrint(first.substr(strlen(weightbroker::kCallArgument)),
                                      static_cast<uid_t>(std::stoul(argv[2])));
  }
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
