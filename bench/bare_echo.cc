#include "bench/bare_echo.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker::bench {
namespace {

using std::chrono::seconds;

// Over gRPC's callback API, as the broker's services are.
class BareEcho final : public EchoService::CallbackService {
  grpc::ServerUnaryReactor* Echo(grpc::CallbackServerContext* context, const EchoRequest* request,
                                 EchoResponse* response) override {
    response->set_payload(request->payload());
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

sockaddr_un AddressOf(const std::string& socket) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path, socket.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

bool ReadAll(int fd, char* bytes) {
  for (size_t done = 0; done < kRawEchoBytes;) {
    const ssize_t count = read(fd, bytes + done, kRawEchoBytes - done);
    if (count <= 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

bool WriteAll(int fd, const char* bytes) { return write(fd, bytes, kRawEchoBytes) == kRawEchoBytes; }

void EchoUntilClosed(UniqueFd connection) {
  char bytes[kRawEchoBytes];
  while (ReadAll(connection.get(), bytes) && WriteAll(connection.get(), bytes)) {
  }
}

}  // namespace

int ServeGrpcEcho(const std::string& socket) {
  BareEcho echo;
  grpc::ServerBuilder builder;
  builder.RegisterService(&echo);
  builder.AddListeningPort("unix:" + socket, grpc::InsecureServerCredentials());
  const auto server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->Wait();
  return 0;
}

int ServeRawEcho(const std::string& socket) {
  const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = AddressOf(socket);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener.get(), SOMAXCONN) != 0) {
    perror("raw echo");
    return 1;
  }
  while (true) {
    UniqueFd connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection.valid()) return 1;
    std::thread(EchoUntilClosed, std::move(connection)).detach();
  }
}

std::shared_ptr<grpc::Channel> ConnectOrDie(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto channel = grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + seconds(20))) {
    fprintf(stderr, "nothing answers on %s\n", socket.c_str());
    exit(1);
  }
  return channel;
}

absl::StatusOr<RawEchoClient> RawEchoClient::Connect(const std::string& socket) {
  const sockaddr_un address = AddressOf(socket);
  const auto give_up = std::chrono::steady_clock::now() + seconds(20);
  while (true) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      return RawEchoClient(std::move(fd));
    }
    if (std::chrono::steady_clock::now() > give_up) return SystemError(absl::StrCat("connecting to ", socket), errno);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

absl::Status RawEchoClient::Echo() {
  char bytes[kRawEchoBytes] = {};
  if (WriteAll(fd_.get(), bytes) && ReadAll(fd_.get(), bytes)) return absl::OkStatus();
  return SystemError("raw echo", errno);
}

}  // namespace weightbroker::bench
