// The loader of weightbroker for tests of what finds damage: the real load session, but where a file MODEL.flip lies
// beside the model's folder, one bit of what it hands over is another than the one it has taken the digest of. Sealed
// memory cannot be written to afterwards, not even by a debugger, so that the fault is planted between the digest and
// the seal. MODEL.flip holds the bit's byte offset in slab 0. In the folder that $WEIGHTBROKER_TEST_SCRUB names,
// a file "die" ends scrubs at once, and a file "hang" has them say nothing for as long as it is there.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "common/base/file.h"
#include "common/base/socket.h"
#include "common/memory/host_slab.h"
#include "server/loader/load_session.h"
#include "server/loader/scrub_session.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;

// The value of "--flag=value".
int NumberOf(int argc, char** argv, std::string_view flag) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word.substr(0, flag.size()) == flag) return atoi(argv[i] + flag.size());
  }
  _exit(2);
}

UniqueFd WithFlippedBit(int fd, int64_t size_bytes, int64_t offset_bytes) {
  const auto size = static_cast<size_t>(size_bytes);
  const void* const right = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  auto slab = HostSlab::Create(size_bytes);
  if (right == MAP_FAILED || !slab.ok() || !slab->Populate(0, size_bytes).ok()) _exit(3);
  memcpy(slab->writable_bytes().data(), right, size);
  slab->writable_bytes()[static_cast<size_t>(offset_bytes)] ^= std::byte{1};
  auto sealed = std::move(*slab).Seal();
  if (!sealed.ok()) _exit(3);
  return std::move(sealed->fd);
}

// Between the broker and the real session, whose result it changes.
class Forger {
 public:
  Forger(int broker_fd, int session_fd, std::string flip_path)
      : broker_fd_(broker_fd), session_fd_(session_fd), flip_path_(std::move(flip_path)) {}

  // What the session says, until it ends.
  void Forward() {
    while (true) {
      auto message = ReceiveMessage(session_fd_);
      if (!message.ok() || message->closed) return;
      Flip(&*message);
      Pass(broker_fd_, *message);
    }
  }

  // What the broker says, until it has gone.
  void Return() {
    while (true) {
      const auto message = ReceiveMessage(broker_fd_);
      if (!message.ok() || message->closed) return;
      Pass(session_fd_, *message);
    }
  }

 private:
  void Flip(SocketMessage* message) const {
    pb::LoadEvent event;
    std::ifstream file(flip_path_);
    int64_t offset_bytes = 0;
    if (!event.ParseFromString(message->bytes) || !event.has_sealed() || !(file >> offset_bytes)) return;
    message->fds[0] = WithFlippedBit(message->fds[0].get(), event.sealed().slabs(0).size_bytes(), offset_bytes);
  }

  static void Pass(int fd, const SocketMessage& message) {
    std::vector<int> fds;
    for (const UniqueFd& one : message.fds) fds.push_back(one.get());
    SendMessage(fd, message.bytes, fds).IgnoreError();
  }

  const int broker_fd_;
  const int session_fd_;
  const std::string flip_path_;
};

int Run(int request_fd, int control_fd) {
  const auto request = ReadLoadRequest(request_fd);
  if (!request.ok()) return 1;
  if (request->has_scrub()) {
    if (getenv("WEIGHTBROKER_TEST_SCRUB") != nullptr) {
      const std::string how = getenv("WEIGHTBROKER_TEST_SCRUB");
      if (std::filesystem::exists(how + "/die")) _exit(9);
      while (std::filesystem::exists(how + "/hang")) usleep(10'000);
    }
    return RunScrubSession(*request, control_fd).ok() ? 0 : 1;
  }
  auto pair = CreateSeqpacketPair();
  if (!pair.ok()) return 1;
  Forger forger(control_fd, pair->first.get(), request->spec().model() + ".flip");
  std::thread forward([&] { forger.Forward(); });
  std::thread([&] { forger.Return(); }).detach();
  const bool loaded = RunLoadSession(RealFileSystem(), *request, pair->second.get()).ok();
  pair->second.reset();
  forward.join();
  _exit(loaded ? 0 : 1);
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) {
  return weightbroker::Run(weightbroker::NumberOf(argc, argv, "--request_fd="),
                           weightbroker::NumberOf(argc, argv, "--control_fd="));
}
