// The program itself, in a process of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "common/base/socket.h"
#include "common/identity/checkpoint_identity.h"
#include "common/memory/host_slab.h"
#include "common/plan/plan.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "weightbroker/internal/v1/loader.pb.h"

extern char** environ;

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::RawSafetensors;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::WriteFile;

pid_t Spawn(const std::vector<std::string>& flags) {
  const std::string path = std::string(WEIGHTBROKER_BIN_DIR) + "/weightbroker-loader";
  std::vector<char*> arguments = {const_cast<char*>(path.c_str())};
  for (const std::string& flag : flags) arguments.push_back(const_cast<char*>(flag.c_str()));
  arguments.push_back(nullptr);
  pid_t child = -1;
  EXPECT_EQ(posix_spawn(&child, path.c_str(), nullptr, nullptr, arguments.data(), environ), 0) << path;
  return child;
}

int ExitCodeOf(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

class LoaderProcessTest : public ::testing::Test {
 protected:
  // Starts a load of `folder_`. Only the child keeps the loader's end of the socket.
  void Start() {
    pb::LoadRequest request;
    *request.mutable_spec() = *CompleteSpec({});
    request.add_ranks();
    ToProto(*ReadCheckpointIdentity(RealFileSystem(), folder_.path()), &request);
    request.set_reader_threads(1);
    const std::string bytes = request.SerializeAsString();
    const UniqueFd memfd = *CreateSealedMemfd("request", std::as_bytes(std::span(bytes)));
    SocketPair pair = *CreateSeqpacketPair();
    const UniqueFd request_fd(dup(memfd.get()));  // dup drops close-on-exec
    const UniqueFd control_fd(dup(pair.second.get()));
    child_ =
        Spawn({"--request_fd=" + std::to_string(request_fd.get()), "--control_fd=" + std::to_string(control_fd.get())});
    broker_end_ = std::move(pair.first);
  }

  // The next event of the kind wanted, others skipped.
  pb::LoadEvent NextEvent(pb::LoadEvent::EventCase wanted) {
    pb::LoadEvent event;
    while (event.event_case() != wanted) {
      const auto message = ReceiveMessage(broker_end_.get(), std::chrono::seconds(60));
      EXPECT_THAT(message, IsOk());
      if (!message.ok() || message->closed || !event.ParseFromString(message->bytes)) break;
    }
    EXPECT_EQ(event.event_case(), wanted);
    return event;
  }

  void Proceed() {
    pb::LoadCommand command;
    command.set_proceed(true);
    ASSERT_THAT(SendMessage(broker_end_.get(), command.SerializeAsString()), IsOk());
  }

  // A checkpoint that takes a while to load, and no room on the disk.
  void WriteLargeSparseCheckpoint() {
    CheckpointBuilder().Tensor("a", "U8", {16}).Write(folder_.path());
    WriteFile(folder_ / "model.safetensors",
              RawSafetensors(R"({"a":{"dtype":"U8","shape":[1073741824],"data_offsets":[0,1073741824]}})"));
    const auto header_bytes = std::filesystem::file_size(folder_ / "model.safetensors");
    std::filesystem::resize_file(folder_ / "model.safetensors", header_bytes + 1073741824);
  }

  const TemporaryFolder folder_;
  UniqueFd broker_end_;
  pid_t child_ = -1;
};

TEST_F(LoaderProcessTest, LoadsHandsOverAndExitsWithZero) {
  CheckpointBuilder().Tensor("a", "BF16", {1000}).Write(folder_.path());
  Start();
  NextEvent(pb::LoadEvent::kPlanned);
  Proceed();
  const pb::LoadEvent event = NextEvent(pb::LoadEvent::kSealed);
  EXPECT_EQ(event.sealed().read_bytes(), 2000);
  broker_end_.reset();  // a broker may well close before the loader has ended
  EXPECT_EQ(ExitCodeOf(child_), 0);
}

TEST_F(LoaderProcessTest, TellsWhyItFailsAndExitsWithOne) {
  CheckpointBuilder()
      .Tensor("a", "BF16", {1000})
      .Config(R"({"quantization_config": {"quant_method": "gptq"}})")
      .Write(folder_.path());
  Start();
  EXPECT_EQ(ParseRpcStatus(NextEvent(pb::LoadEvent::kFailed).failed().SerializeAsString()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ExitCodeOf(child_), 1);
}

TEST_F(LoaderProcessTest, EndsAtOnceWhenTheBrokerGoesInMidLoad) {
  WriteLargeSparseCheckpoint();
  Start();
  EXPECT_EQ(NextEvent(pb::LoadEvent::kPlanned).planned().read_bytes(), 1073741824);
  Proceed();
  NextEvent(pb::LoadEvent::kProgress);
  const auto closed = std::chrono::steady_clock::now();

  broker_end_.reset();

  EXPECT_EQ(ExitCodeOf(child_), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - closed, std::chrono::milliseconds(500));
}

TEST_F(LoaderProcessTest, ReportsProgressAtLeastFourTimesASecond) {
  WriteLargeSparseCheckpoint();
  Start();
  NextEvent(pb::LoadEvent::kPlanned);
  Proceed();
  NextEvent(pb::LoadEvent::kProgress);
  auto last = std::chrono::steady_clock::now();
  for (int i = 0; i < 2; ++i) {
    const pb::LoadEvent event = NextEvent(pb::LoadEvent::kProgress);
    const auto now = std::chrono::steady_clock::now();
    EXPECT_LT(now - last, std::chrono::milliseconds(250));
    last = now;
  }
  kill(child_, SIGKILL);
  EXPECT_EQ(ExitCodeOf(child_), -SIGKILL);
}

TEST_F(LoaderProcessTest, EndsWhenTheBrokerGoesBeforeItHasAnswered) {
  CheckpointBuilder().Tensor("a", "BF16", {1000}).Write(folder_.path());
  Start();
  NextEvent(pb::LoadEvent::kPlanned);
  broker_end_.reset();
  EXPECT_EQ(ExitCodeOf(child_), 1);
}

TEST(LoaderProgram, ExitsWithTwoForWrongUse) {
  EXPECT_EQ(ExitCodeOf(Spawn({})), 2);
  EXPECT_EQ(ExitCodeOf(Spawn({"--request_fd=x", "--control_fd=1"})), 2);
}

TEST(LoaderProgram, KnowsItsVersion) { EXPECT_EQ(ExitCodeOf(Spawn({"--version"})), 0); }

}  // namespace
}  // namespace weightbroker
