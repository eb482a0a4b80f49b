// Engines where containers put them: under another user, in namespaces of their own, with the socket and nothing else
// of the service's.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <vector>

#include "tests/gpu/gpu_fixture.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

constexpr int kOtherUser = 12345;
constexpr int kAllowedGroup = 23456;
constexpr int kOtherGroup = 34567;

class IsolatedEngine : public GpuTest {
 protected:
  void SetUp() override {
    if (getuid() != 0) GTEST_SKIP() << "only root may make namespaces and become another user";
    REQUIRE_GPUS(1);
    service_ = StartService({"--socket_mode", "0666", "--allowed_gids", std::to_string(kAllowedGroup)});
    // For a user without namespaces: to reach the socket it must pass through the service's folder.
    const std::string folder = service_->socket().substr(0, service_->socket().rfind('/'));
    ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
    WriteSmallGpuModel(*service_, "small");
  }

  std::vector<std::string> Flags(const std::vector<std::string>& more) const {
    std::vector<std::string> flags = EngineFlags(*service_, "small", {"--hide", service_->ModelFolder("")});
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  // Whether an engine with these flags attaches and finds every byte right.
  ::testing::AssertionResult Works(const std::vector<std::string>& more) const {
    Program engine("gpu_engine", Flags(more));
    if (!engine.WaitForLine("attached")) {
      return ::testing::AssertionFailure() << engine.Wait().ToString() << ": " << engine.Output() << engine.Errors();
    }
    return Verifies(engine);
  }

  std::unique_ptr<Service> service_;
};

std::vector<std::string> AnotherUser(int group) {
  return {"--uid", std::to_string(kOtherUser), "--gid", std::to_string(group)};
}

TEST_F(IsolatedEngine, OfAnotherUserInAnAllowedGroupAttaches) {
  ASSERT_THAT(RegisterOnGpu(*service_, "small"), IsOk());

  EXPECT_TRUE(Works(AnotherUser(kAllowedGroup)));
}

TEST_F(IsolatedEngine, OfAnotherUserInNoAllowedGroupIsRefused) {
  ASSERT_THAT(RegisterOnGpu(*service_, "small"), IsOk());

  const Finished engine = RunProgram("gpu_engine", Flags(AnotherUser(kOtherGroup)));

  EXPECT_EQ(engine.exit.code, 3) << engine.output << engine.errors;
  EXPECT_EQ(engine.json["reason"], "ACCESS_DENIED");
}

TEST_F(IsolatedEngine, InNamespacesOfItsOwnWithOnlyTheSocketSharedAttaches) {
  ASSERT_THAT(RegisterOnGpu(*service_, "small"), IsOk());
  std::vector<std::string> flags = AnotherUser(kAllowedGroup);
  flags.insert(flags.end(), {"--namespaces", "pid,ipc,net,mnt"});

  EXPECT_TRUE(Works(flags));
}

TEST_F(IsolatedEngine, DiesAloneInItsNamespaces) {
  ASSERT_THAT(RegisterOnGpu(*service_, "small"), IsOk());
  Program isolated("gpu_engine", Flags({"--namespaces", "pid,ipc,net,mnt"}));
  Program bystander("gpu_engine", EngineFlags(*service_, "small"));
  ASSERT_TRUE(isolated.WaitForLine("attached")) << isolated.Errors();
  ASSERT_TRUE(bystander.WaitForLine("attached")) << bystander.Errors();

  isolated.Kill(SIGKILL);

  EXPECT_TRUE(Eventually([&] { return service_->Health()->lease_count() == 1; }));
  EXPECT_TRUE(Verifies(bystander));
}

// What each kind of handle needs of its engine's surroundings: measured, for the table in docs/engines-on-gpus.md. VMM
// must work everywhere.
TEST_F(IsolatedEngine, IsTriedInEverySurroundingWithEachKind) {
  struct Surrounding {
    const char* name;
    std::vector<std::string> flags;
  };
  const std::vector<Surrounding> surroundings = {{"same", {}},
                                                 {"another_user", AnotherUser(kAllowedGroup)},
                                                 {"pid", {"--namespaces", "pid"}},
                                                 {"ipc", {"--namespaces", "ipc"}},
                                                 {"net", {"--namespaces", "net"}},
                                                 {"mnt", {"--namespaces", "mnt"}},
                                                 {"pid_ipc", {"--namespaces", "pid,ipc"}},
                                                 {"all", {"--namespaces", "pid,ipc,net,mnt"}}};
  for (const v1::HandleKind kind : {v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC}) {
    const auto set = RegisterOnGpu(*service_, "small", kind);
    ASSERT_THAT(set, IsOk());
    for (const Surrounding& surrounding : surroundings) {
      const auto works = Works(surrounding.flags);
      printf("handle_needs %s %s %s\n", v1::HandleKind_Name(kind).c_str(), surrounding.name, works ? "works" : "fails");
      if (!works) printf("  %s\n", works.message());
      if (kind == v1::HANDLE_KIND_CUDA_VMM_FD) {
        EXPECT_TRUE(works) << surrounding.name;
      }
    }
    ASSERT_TRUE(Eventually([&] { return service_->Health()->lease_count() == 0; }));
    ASSERT_THAT(service_->Unregister(set->fingerprint(), false), IsOk());
  }
}

}  // namespace
}  // namespace weightbroker::testing
