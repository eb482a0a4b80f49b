// Real processes for the keeper's tests: a keeper, and the fake brokers that it starts, which call home.
//
//   KeeperHarness harness;
//   harness.StartKeeper({});
//   FakeBrokerHandle broker = harness.NextBroker();
//   EXPECT_EQ(broker.Ask("put a value 2"), "ok");
//   broker.Kill();
//   EXPECT_EQ(harness.NextBroker().greeting(), "ready a=value:2");
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "common/base/socket.h"
#include "common/process/spawn.h"

namespace weightbroker::testing {

inline constexpr std::chrono::milliseconds kPatience(20'000);

// Whether it becomes true in time.
inline bool Eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience = kPatience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

// 'R', 'S', 'T', 'Z' and so on, as proc(5) has them; '-' if there is no such process.
inline char StateOf(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t end_of_name = line.rfind(')');
  return end_of_name == std::string::npos ? '-' : line[end_of_name + 2];
}

inline bool IsRunning(pid_t pid) { return StateOf(pid) != '-' && StateOf(pid) != 'Z'; }

inline UniqueFd ConnectTo(const std::string& path, int type) {
  UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return {};
  return socket;
}

// A fake broker that has called home.
class FakeBrokerHandle {
 public:
  FakeBrokerHandle(UniqueFd socket, pid_t pid) : socket_(std::move(socket)), pid_(pid) { greeting_ = Receive(); }

  pid_t pid() const { return pid_; }
  // What it said first: how it began.
  const std::string& greeting() const { return greeting_; }

  std::string Ask(const std::string& command) {
    if (!SendMessage(socket_.get(), command).ok()) return "gone";
    return Receive();
  }
  // For a command after which it ends.
  void Tell(const std::string& command) { SendMessage(socket_.get(), command).IgnoreError(); }

  void Kill() const { Signal(SIGKILL); }
  void Signal(int signal) const {
    if (pid_ > 0) kill(pid_, signal);
  }
  // Returns when it has stopped: until then it would still see signals that come after.
  void Stop() const {
    Signal(SIGSTOP);
    EXPECT_TRUE(Eventually([this] { return StateOf(pid_) == 'T'; }));
  }
  bool WaitUntilGone() const {
    return Eventually([this] { return !IsRunning(pid_); });
  }

 private:
  std::string Receive() {
    auto received = ReceiveMessage(socket_.get(), kPatience);
    return !received.ok() || received->closed ? "gone" : received->bytes;
  }

  UniqueFd socket_;
  pid_t pid_;
  std::string greeting_;
};

class KeeperHarness {
 public:
  KeeperHarness() {
    char folder[] = "/tmp/wb_keeper_XXXXXX";
    folder_ = mkdtemp(folder);
    home_.reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    const std::string path = Path("home");
    std::memcpy(address.sun_path, path.data(), path.size());
    if (bind(home_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) abort();
    if (listen(home_.get(), 100) != 0) abort();
  }
  ~KeeperHarness() {
    StopKeeper();
    if (::testing::Test::HasFailure()) std::cerr << "--- log\n" << Log() << "---\n";
    std::filesystem::remove_all(folder_);
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string socket() const { return Path("service.sock"); }
  std::string keeper_socket() const { return Path("keeper.sock"); }

  // `broker_flags` are the fake broker's: see fake_broker.cc. `log_fd`, if given, is stderr, of which Log knows
  // nothing.
  void StartKeeper(std::vector<std::string> more_arguments, const std::string& broker_flags = "",
                   const std::string& program = WEIGHTBROKER_BIN_DIR "/weightbrokerd", int log_fd = -1) {
    std::vector<std::string> arguments = {"--socket=" + socket(),
                                          "--broker_path=" WEIGHTBROKER_BIN_DIR "/weightbroker-fake-broker",
                                          "--loader_path=" WEIGHTBROKER_BIN_DIR "/weightbroker-fake-loader"};
    for (const std::string& more : more_arguments) {
      // A flag may be given only once: the test's own goes before.
      const std::string name = more.substr(0, more.find('=') + 1);
      std::erase_if(arguments, [&](const std::string& ours) { return !name.empty() && ours.starts_with(name); });
      arguments.push_back(more);
    }
    SetBrokerFlags(broker_flags);
    const UniqueFd log(open(Path("log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    auto child = Spawn({.path = program, .arguments = arguments, .fds = {{log_fd < 0 ? log.get() : log_fd, 2}}});
    ASSERT_TRUE(child.ok()) << child.status();
    keeper_.emplace(*std::move(child));
  }

  // For every program that is started from here on.
  void SetBrokerFlags(const std::string& flags) const {
    setenv("FAKE_BROKER", ("--test_socket=" + Path("home") + " " + flags).c_str(), 1);
  }

  // A broker that its test starts, for --keeper_socket.
  ChildProcess StartVisitor() {
    auto child = Spawn({.path = WEIGHTBROKER_BIN_DIR "/weightbroker-fake-broker",
                        .arguments = {"--connect=" + keeper_socket()},
                        .fds = {}});
    if (!child.ok()) abort();
    return *std::move(child);
  }

  ChildProcess& keeper() { return *keeper_; }
  pid_t keeper_pid() const { return keeper_->pid(); }

  // The next broker that calls home; fails the test, and gives a dead handle, if none does.
  FakeBrokerHandle NextBroker() {
    UniqueFd socket = AcceptWithin(kPatience);
    EXPECT_TRUE(socket.valid()) << "no broker has called home";
    ucred peer = {};
    socklen_t size = sizeof(peer);
    getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size);
    return FakeBrokerHandle(std::move(socket), peer.pid);
  }
  bool NoBrokerWithin(std::chrono::milliseconds time) { return !AcceptWithin(time).valid(); }

  // Ends the keeper as an operator does. Its exit code, or -1 if it was killed or had to be.
  int StopKeeper() {
    if (!keeper_.has_value()) return -1;
    keeper_->Kill(SIGTERM).IgnoreError();
    const auto exit = keeper_->Wait(kPatience);
    keeper_.reset();
    return exit.ok() ? exit->code.value_or(-1) : -1;
  }

  std::string Log() const {
    std::ifstream file(Path("log"));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  int CountInLog(const std::string& text) const {
    const std::string log = Log();
    int count = 0;
    for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++count;
    return count;
  }
  bool WaitForLog(const std::string& text, int times = 1) const {
    return Eventually([&] { return CountInLog(text) >= times; });
  }

  // A line of /proc/<keeper>/status, without its name and unit: "Threads", "VmRSS" in kB.
  int64_t KeeperStatus(const std::string& name) const {
    std::ifstream file("/proc/" + std::to_string(keeper_pid()) + "/status");
    for (std::string line; std::getline(file, line);) {
      if (line.rfind(name + ":", 0) == 0) return std::stoll(line.substr(name.size() + 1));
    }
    return -1;
  }
  int KeeperFds() const {
    int count = 0;
    for ([[maybe_unused]] const auto& entry :
         std::filesystem::directory_iterator("/proc/" + std::to_string(keeper_pid()) + "/fd")) {
      ++count;
    }
    return count;
  }
  // Its children, the zombies among them too.
  std::vector<pid_t> KeeperChildren() const {
    const std::string pid = std::to_string(keeper_pid());
    std::ifstream file("/proc/" + pid + "/task/" + pid + "/children");
    std::vector<pid_t> children;
    for (pid_t child = 0; file >> child;) children.push_back(child);
    return children;
  }

 private:
  UniqueFd AcceptWithin(std::chrono::milliseconds time) const {
    pollfd readable = {.fd = home_.get(), .events = POLLIN, .revents = 0};
    if (poll(&readable, 1, static_cast<int>(time.count())) != 1) return {};
    return UniqueFd(accept4(home_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

  std::string folder_;
  UniqueFd home_;
  std::optional<ChildProcess> keeper_;
};

}  // namespace weightbroker::testing
