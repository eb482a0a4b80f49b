// What is left of a service whose keeper was killed, and the service that is started in its place at once.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/integration/survival/survival.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;

bool IsRunning(pid_t pid) {
  std::error_code error;
  return !std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", error).empty();
}

bool ListensOn(int fd, const std::string& path) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  sockaddr_un address = {};
  socklen_t address_size = sizeof(address);
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0 &&
         getsockname(fd, reinterpret_cast<sockaddr*>(&address), &address_size) == 0 && path == address.sun_path;
}

// That process's own descriptor of the socket at `path`, in this one.
UniqueFd ShareListeningSocket(int pidfd, const std::string& path) {
  constexpr int kMostFds = 256;
  for (int fd = 0; fd < kMostFds; ++fd) {
    UniqueFd shared(static_cast<int>(syscall(SYS_pidfd_getfd, pidfd, fd, 0)));
    if (shared.valid() && ListensOn(shared.get(), path)) return shared;
  }
  return UniqueFd();
}

class RemainsTest : public ::testing::Test {
 protected:
  RemainsTest() : metrics_("--metrics_address=127.0.0.1:" + std::to_string(FreePort())), service_({metrics_}) {}

  // Until its loader reads, so that there is a load to be ended.
  void BeginALoad() const {
    WriteSparseModel(service_.NewModel("large"));
    const Finished begun = RunProgram(
        "weightbroker", service_.ToolFlags("register", {"models:large", "--torch_version", "any", "--no_wait"}));
    ASSERT_EQ(begun.exit.code, 0) << begun.errors;
    ASSERT_TRUE(Eventually([this] { return !service_.Loaders().empty(); }));
  }

  std::vector<std::string> SuccessorFlags() const {
    return {"--socket=" + service_.socket(), metrics_,
            "--model_roots=models=" + std::filesystem::path(service_.ModelFolder("large")).parent_path().string()};
  }

  const std::string metrics_;  // an address that both want
  Service service_;
};

TEST_F(RemainsTest, OfAServiceKilledInTheMidstOfALoadKeepNobodyFromStartingInItsPlace) {
  BeginALoad();
  const std::vector<pid_t> family = service_.Processes();
  service_.program().Kill(SIGKILL);
  ASSERT_EQ(service_.program().Wait().signal, SIGKILL);  // with it goes its lock
  Program successor("weightbrokerd", SuccessorFlags());
  EXPECT_TRUE(Eventually([&] {
    const auto health = service_.Health();  // by the same socket
    return health.ok() && std::find(family.begin(), family.end(), health->process_id()) == family.end();
  })) << successor.Errors();
  EXPECT_TRUE(successor.IsRunning()) << successor.Errors();
  EXPECT_TRUE(Eventually([&] { return std::none_of(family.begin(), family.end(), IsRunning); }))
      << "the loader goes with its keeper, too";
}

// This process plays what is left: the kernel wakes a broker that is stopped when its keeper ends.
TEST_F(RemainsTest, ThatDoNotGoAreNamed) {
  const pid_t keeper = service_.program().pid();
  const UniqueFd remains = ShareListeningSocket(service_.program().pidfd(), service_.socket());
  ASSERT_TRUE(remains.valid());
  service_.program().Kill(SIGKILL);
  service_.program().Wait();

  const Finished successor = RunProgram("weightbrokerd", SuccessorFlags());

  EXPECT_EQ(successor.exit.code, 4) << successor.exit.ToString();
  EXPECT_THAT(successor.errors, HasSubstr("process " + std::to_string(keeper) + ", which has ended, has left behind"));
  EXPECT_THAT(successor.errors, HasSubstr("event=listener.waiting"));
}

}  // namespace
}  // namespace weightbroker::testing
