// A broker with no service: it does what a test tells it over a socket of the test's, and says what it found.
//
// It takes its flags from its command line and from FAKE_BROKER, separated by spaces, because the keeper does not pass
// on flags that it does not know. Once it has been welcomed it is ready and reports "ready" and what it inherited; each
// command is answered by one packet. Flags for how it begins: --mute says nothing to the keeper, --unready is welcomed
// and not ready,
// --hello_version=N says only a hello of that version, --exit=N ends at once, --die_of=KEY dies of that entry.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common/base/log.h"
#include "common/base/socket.h"
#include "common/keeper/client.h"
#include "common/keeper/protocol.h"

namespace weightbroker {
namespace {

using Flags = std::map<std::string, std::string>;

Flags ParseFlags(int argc, char** argv) {
  Flags flags;
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const char* more = getenv("FAKE_BROKER");
  std::istringstream words(more == nullptr ? "" : more);
  for (std::string word; words >> word;) arguments.push_back(word);
  for (const std::string& argument : arguments) {
    const size_t equals = argument.find('=');
    flags[argument.substr(0, equals)] = equals == std::string::npos ? "" : argument.substr(equals + 1);
  }
  return flags;
}

std::string ContentsOfSlab(const std::string& key, size_t index) { return key + "/" + std::to_string(index); }

UniqueFd MakeSlab(const std::string& key, size_t index) {
  const std::string contents = ContentsOfSlab(key, index);
  UniqueFd memfd(memfd_create("slab", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (write(memfd.get(), contents.data(), contents.size()) < 0) abort();
  if (fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0) abort();
  return memfd;
}

bool IsIntact(const std::string& key, size_t index, int fd) {
  char contents[512] = {};
  const ssize_t length = pread(fd, contents, sizeof(contents), 0);
  return length >= 0 && std::string(contents, static_cast<size_t>(length)) == ContentsOfSlab(key, index) &&
         (fcntl(fd, F_GET_SEALS) & F_SEAL_WRITE) != 0;
}

// "a=value:3 b=:0", with "BAD" behind what is not as it was put.
std::string Describe(const std::vector<KeeperEntry>& entries) {
  std::string text;
  for (const KeeperEntry& entry : entries) {
    text += (text.empty() ? "" : " ") + entry.key + "=" + entry.value + ":" + std::to_string(entry.fds.size());
    for (size_t i = 0; i < entry.fds.size(); ++i) {
      if (!IsIntact(entry.key, i, entry.fds[i].get())) text += "BAD" + std::to_string(i);
    }
  }
  return text;
}

UniqueFd ConnectTo(const std::string& path) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) _exit(9);
  return socket;
}

class FakeBroker {
 public:
  explicit FakeBroker(Flags flags) : flags_(std::move(flags)) {}

  int Run() {
    if (Has("--exit")) return std::stoi(flags_["--exit"]);
    test_ = ConnectTo(flags_["--test_socket"]);
    if (Has("--keeper_fd")) raw_.reset(fcntl(std::stoi(flags_["--keeper_fd"]), F_DUPFD_CLOEXEC, 100));
    Report(Begin());
    while (true) {
      const auto command = ReceiveMessage(test_.get());
      if (!command.ok() || command->closed) pause();  // the test lets it live
      std::istringstream words(command->bytes);
      std::string verb;
      words >> verb;
      Report(Do(verb, words));
    }
  }

 private:
  bool Has(const std::string& flag) const { return flags_.count(flag) > 0; }
  void Report(const std::string& text) { SendMessage(test_.get(), text.empty() ? "-" : text).IgnoreError(); }

  std::string Begin() {
    if (Has("--mute")) return "mute";
    if (Has("--hello_version")) return SayHello(static_cast<uint16_t>(std::stoi(flags_["--hello_version"])));
    KeeperClientOptions options;
    options.alive = [this] { return !sick_; };
    options.on_disconnected = [] { _exit(7); };
    auto client = Has("--keeper_fd") ? KeeperClient::FromFd(UniqueFd(std::stoi(flags_["--keeper_fd"])), options)
                                     : KeeperClient::FromPath(flags_["--connect"], options);
    if (!client.ok()) return "refused: " + std::string(client.status().message());
    client_ = *std::move(client);
    KeeperInheritance inheritance = client_->TakeInheritance();
    listening_ = std::move(inheritance.listening_socket);
    TakeUp(inheritance.entries);
    inherited_ = Describe(inheritance.entries);
    if (inheritance.dropped_entries > 0) inherited_ += " dropped:" + std::to_string(inheritance.dropped_entries);
    if (Has("--unready")) return "unready " + inherited_;
    return client_->Ready().ok() ? "ready " + inherited_ : "not ready";
  }

  void TakeUp(const std::vector<KeeperEntry>& entries) {
    for (const KeeperEntry& entry : entries) {
      client_->TakingUp(entry.key).IgnoreError();
      if (Has("--die_of") && flags_["--die_of"] == entry.key) raise(SIGKILL);
    }
    client_->TakingUp("").IgnoreError();
  }

  std::string SayHello(uint16_t version) {
    SendRaw({.type = KeeperMessageType::kHello, .version = version});
    auto answer = ReceiveMessage(raw_.get(), std::chrono::seconds(5));
    if (!answer.ok() || answer->closed) return "closed";
    auto message = DecodeKeeperMessage(answer->bytes);
    return message.ok() ? std::string(KeeperMessageTypeName(message->type)) + ": " + message->value : "malformed";
  }

  void SendRaw(const KeeperMessage& message, const std::vector<int>& fds = {}) {
    SendMessage(raw_.get(), *EncodeKeeperMessage(message), fds).IgnoreError();
  }

  std::string Do(const std::string& verb, std::istringstream& words) {
    if (verb == "put") return Put(words);
    if (verb == "half") return PutHalf(words);
    if (verb == "drop") return Drop(words);
    if (verb == "spawn") return Spawn(words);
    if (verb == "detach") return Detach(words);
    if (verb == "exited") return WaitForExited();
    if (verb == "accept") return Accept();
    if (verb == "sick" || verb == "well") {
      sick_ = verb == "sick";
      return "ok";
    }
    if (verb == "ready") return client_->Ready().ok() ? "ok" : "not ready";
    if (verb == "garbage") {
      SendMessage(raw_.get(), "garbage").IgnoreError();
      return "ok";
    }
    if (verb == "unknown_type") return SendUnknownType();
    if (verb == "quit") {
      int code = 0;
      words >> code;
      _exit(code);
    }
    return "unknown command";
  }

  std::string Put(std::istringstream& words) {
    std::string key;
    std::string value;
    size_t count = 0;
    words >> key >> value >> count;
    std::vector<UniqueFd> slabs;
    std::vector<int> fds;
    for (size_t i = 0; i < count; ++i) {
      slabs.push_back(MakeSlab(key, i));
      fds.push_back(slabs.back().get());
    }
    const absl::Status status = client_->Put(key, value, fds);
    return status.ok() ? "ok" : std::string(status.message());
  }

  std::string PutHalf(std::istringstream& words) {
    std::string key;
    words >> key;
    const UniqueFd slab = MakeSlab(key, 0);
    SendRaw({.type = KeeperMessageType::kPut, .request_id = 1'000'000, .part = 0, .parts = 2, .key = key},
            {slab.get()});
    return "ok";
  }

  std::string Drop(std::istringstream& words) {
    std::string key;
    words >> key;
    const absl::Status status = client_->Drop(key);
    return status.ok() ? "ok" : std::string(status.message());
  }

  std::string Spawn(std::istringstream& words) {
    std::vector<std::string> arguments;
    for (std::string word; words >> word;) arguments.push_back(word);
    const UniqueFd request = MakeSlab("request", 0);
    auto loader = client_->SpawnLoader(arguments, request.get());
    if (!loader.ok()) return std::string(loader.status().message());
    loaders_.push_back(*std::move(loader));
    auto said = ReceiveMessage(loaders_.back().control_socket.get(), std::chrono::seconds(5));
    return std::to_string(loaders_.back().pid) + " " + (said.ok() ? said->bytes : "nothing");
  }

  // Detaches the loader that was spawned last, and puts its control socket into an entry.
  std::string Detach(std::istringstream& words) {
    pid_t pid = 0;
    std::string key;
    words >> pid >> key;
    if (const absl::Status status = client_->DetachLoader(pid); !status.ok()) return std::string(status.message());
    const int fds[] = {loaders_.back().control_socket.get()};
    const absl::Status status = client_->Put(key, "exporter", fds);
    return status.ok() ? "ok" : std::string(status.message());
  }

  // Of the last loader.
  std::string WaitForExited() {
    const std::optional<int> status = loaders_.back().end->Wait(std::chrono::seconds(5));
    return status.has_value() ? std::to_string(loaders_.back().pid) + " " + std::to_string(*status) : "none";
  }

  // Takes one connection to the service's socket and says who took it.
  std::string Accept() {
    fcntl(listening_.get(), F_SETFL, fcntl(listening_.get(), F_GETFL) & ~O_NONBLOCK);
    const UniqueFd connection(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::string name = std::to_string(getpid());
    return send(connection.get(), name.data(), name.size(), MSG_NOSIGNAL) < 0 ? "failed" : "ok";
  }

  // The answer goes to the client, which nobody is waiting for it at; what counts is that this process goes on.
  std::string SendUnknownType() {
    SendRaw({.type = static_cast<KeeperMessageType>(999), .request_id = 1'000'001});
    return "ok";
  }

  Flags flags_;
  UniqueFd test_;
  UniqueFd raw_;  // the connection to the keeper, for what KeeperClient would not send
  UniqueFd listening_;
  std::unique_ptr<KeeperClient> client_;
  std::string inherited_;
  std::vector<KeeperLoader> loaders_;
  std::atomic<bool> sick_ = false;
};

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  weightbroker::SetLogProgram("fake-broker");
  weightbroker::RaiseFdLimit();
  weightbroker::FakeBroker broker(weightbroker::ParseFlags(argc, argv));
  return broker.Run();
}
