// What the service refuses with real files and real memory, saying why.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/endpoint/socket_client.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;

TEST(Garbage, InACallsHeadersIsSaidInOurLogAndOnlyToWhoDebugs) {
  Service service({"--log_level=debug"});
  const UniqueFd client = Connect(service.socket());
  // The preface with its SETTINGS, then a call with the header "te: bogus", of which gRPC says a line for anybody's
  // asking.
  Send(client, std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0\0\0\xa\1\4\0\0\0\1", 42) +
                   std::string("\0\2te\5bogus", 10));
  EXPECT_TRUE(Eventually([&] { return service.program().Errors().find("event=grpc.log") != std::string::npos; }));
  std::istringstream lines(service.program().Errors());
  for (std::string line; std::getline(lines, line);) {
    EXPECT_THAT(line, HasSubstr(line.find("grpc") == std::string::npos ? " program=" : " level=debug program=broker "));
  }
}

class ChangingFileTest : public ::testing::Test {
 protected:
  void SetUp() override { WriteSparseModel(service_.NewModel("slow")); }

  // Registers, and calls `change` in the middle of the load.
  absl::Status RegisterAndMeanwhile(const std::function<void()>& change) {
    bool changed = false;
    const auto set = service_.Register("slow", [&](const LoadProgress& progress) {
      if (changed || progress.done_bytes == 0) return;
      change();
      changed = true;
    });
    EXPECT_TRUE(changed) << "the load was over before the file could be changed";
    return set.status();
  }

  std::string ShardPath() const { return service_.ModelFolder("slow") + "/model.safetensors"; }

  void ExpectNothingIsExported() const {
    EXPECT_FALSE(service_.Attach("slow").ok());
    EXPECT_EQ(service_.Health()->reserved_bytes(), 0);
  }

  const Service service_;
};

TEST_F(ChangingFileTest, FailsTheLoadByAWriteInPlaceNamingTheFile) {
  const absl::Status status = RegisterAndMeanwhile([this] {
    std::fstream file(ShardPath(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('x');
  });

  EXPECT_THAT(status, StatusIs(Reason::kCheckpointChanged, HasSubstr("model.safetensors")));
  ExpectNothingIsExported();
}

TEST_F(ChangingFileTest, FailsTheLoadByAReplacementNamingTheFile) {
  WriteSparseModel(service_.NewModel("same_again"));

  const absl::Status status = RegisterAndMeanwhile(
      [this] { std::filesystem::rename(service_.ModelFolder("same_again") + "/model.safetensors", ShardPath()); });

  EXPECT_THAT(status, StatusIs(Reason::kCheckpointChanged, HasSubstr("model.safetensors")));
  ExpectNothingIsExported();
}

TEST_F(ChangingFileTest, FailsTheLoadByATruncationNamingTheFile) {
  const absl::Status status =
      RegisterAndMeanwhile([this] { std::filesystem::resize_file(ShardPath(), kSlowLoadBytes / 2); });

  EXPECT_THAT(status, StatusIs(Reason::kCheckpointChanged, HasSubstr("model.safetensors")));
  ExpectNothingIsExported();
}

TEST(MemoryLimit, RefusesWhatDoesNotFitWithNeedAndHave) {
  const Service service({"--memory_limit", "1MiB"});
  CheckpointBuilder().Tensor("w", "U8", {4 << 20}).Write(service.NewModel("large"));
  CheckpointBuilder().Tensor("w", "U8", {1000}).Write(service.NewModel("small"));

  const auto refused = service.Register("large");

  EXPECT_THAT(refused, StatusIs(Reason::kMemoryExhausted));
  EXPECT_THAT(GetErrorDetails(refused.status()).metadata,
              AllOf(Contains(Key("need_bytes")), Contains(Key("have_bytes"))));
  EXPECT_EQ(service.Health()->reserved_bytes(), 0);
  EXPECT_THAT(service.Register("small"), IsOk());
}

TEST(BadCheckpoint, IsRefusedWithTheFileAndWhatIsWrongWithIt) {
  const Service service;
  CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service.NewModel("cut"));
  std::filesystem::resize_file(service.ModelFolder("cut") + "/model.safetensors", 1000);

  EXPECT_THAT(service.Register("cut"), StatusIs(Reason::kCheckpointTruncated, HasSubstr("model.safetensors")));
}

TEST(Quantization, OutsideTheGateIsRefusedByName) {
  const Service service;
  CheckpointBuilder()
      .Tensor("w", "BF16", {64, 64})
      .Config(R"({"quantization_config": {"quant_method": "awq", "bits": 4}})")
      .Write(service.NewModel("awq"));

  EXPECT_THAT(service.Register("awq"), StatusIs(Reason::kQuantizationUnsupported, HasSubstr("awq")));
}

TEST(Model, OutsideTheRootsIsRefused) {
  const Service service;
  const TemporaryFolder elsewhere;
  CheckpointBuilder().Tensor("w", "BF16", {4}).Write(elsewhere.path());

  const Finished tool =
      RunProgram("weightbroker", service.ToolFlags("register", {elsewhere.path(), "--torch_version", "any", "--json"}));

  EXPECT_EQ(tool.exit.code, 3);
  EXPECT_EQ(tool.json["reason"], "MODEL_OUTSIDE_ROOTS");
}

}  // namespace
}  // namespace weightbroker::testing
