#include "server/loader/load_session.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/identity/sha256.h"
#include "common/plan/manifest.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::CheckpointBuilder;
using ::weightbroker::testing::FaultyFileSystem;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::ReadFile;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TemporaryFolder;
using ::weightbroker::testing::TensorBytes;
using ::weightbroker::testing::WriteFile;

constexpr char kShard[] = "model.safetensors";

// What the broker saw of a load.
struct Outcome {
  absl::Status status;  // what the session returned
  std::optional<pb::LoadPlanned> planned;
  std::set<v1::WeightSetState> phases;
  std::vector<int32_t> ranks;            // handed over, in their order
  std::optional<pb::LoadSealed> sealed;  // the last of them
  std::vector<UniqueFd> fds;
  absl::Status failed;  // what it told the broker
};

class LoadSessionTest : public ::testing::Test {
 protected:
  pb::LoadRequest Request() {
    pb::LoadRequest request;
    *request.mutable_spec() = *CompleteSpec({});
    request.add_ranks();
    ToProto(*ReadCheckpointIdentity(RealFileSystem(), folder_.path()), &request);
    return request;
  }

  // Plays the broker: lets the load proceed after `on_planned`.
  Outcome RunLoad(
      FileSystem& file_system, const pb::LoadRequest& request, const std::function<void()>& on_planned = [] {}) {
    SocketPair pair = *CreateSeqpacketPair();
    Outcome outcome;
    std::thread loader([&] {
      outcome.status = RunLoadSession(file_system, request, pair.second.get(), {.chunk_bytes = 8192});
      pair.second.reset();
    });
    while (true) {
      auto message = ReceiveMessage(pair.first.get());
      EXPECT_THAT(message, IsOk());
      if (!message.ok() || message->closed) break;
      pb::LoadEvent event;
      EXPECT_TRUE(event.ParseFromString(message->bytes));
      if (event.has_planned()) {
        outcome.planned = event.planned();
        on_planned();
        pb::LoadCommand command;
        command.set_proceed(true);
        EXPECT_THAT(SendMessage(pair.first.get(), command.SerializeAsString()), IsOk());
      }
      if (event.has_progress()) outcome.phases.insert(event.progress().phase());
      if (event.has_sealed()) {
        outcome.ranks.push_back(event.sealed().rank());
        outcome.sealed = event.sealed();
        outcome.fds = std::move(message->fds);
      }
      if (event.has_failed()) outcome.failed = ParseRpcStatus(event.failed().SerializeAsString());
    }
    loader.join();
    return outcome;
  }

  const TemporaryFolder folder_;
};

std::string ReadAll(int fd, size_t size) {
  std::string bytes(size, '\0');
  EXPECT_EQ(pread(fd, bytes.data(), size, 0), static_cast<ssize_t>(size));
  return bytes;
}

// The manifest describes `count` tensors, each of which lies where it says, with the digest that it says.
void ExpectWeights(const Outcome& outcome, int count) {
  const std::string manifest = ReadAll(outcome.fds.back().get(), static_cast<size_t>(outcome.sealed->manifest_bytes()));
  EXPECT_EQ(Sha256Bytes(manifest), outcome.sealed->manifest_sha256());
  std::vector<std::string> slabs;
  for (int i = 0; i < outcome.sealed->slabs_size(); ++i) {
    const int64_t size_bytes = outcome.sealed->slabs(i).size_bytes();
    EXPECT_THAT(CheckSealedMemfd(outcome.fds[static_cast<size_t>(i)].get(), size_bytes), IsOk());
    slabs.push_back(ReadAll(outcome.fds[static_cast<size_t>(i)].get(), static_cast<size_t>(size_bytes)));
  }
  int tensors = 0;
  const auto frames = SplitManifest(manifest);
  ASSERT_THAT(frames, IsOk());
  for (const std::string_view frame : *frames) {
    v1::ExportResponse message;
    ASSERT_TRUE(message.ParseFromArray(frame.data(), static_cast<int>(frame.size())));
    for (const v1::Tensor& tensor : message.manifest().tensors()) {
      const std::string wanted = TensorBytes(tensor.name(), static_cast<size_t>(tensor.size_bytes()));
      const std::string& bytes = slabs.at(static_cast<size_t>(tensor.slab()));
      EXPECT_EQ(bytes.compare(static_cast<size_t>(tensor.offset_bytes()), wanted.size(), wanted), 0) << tensor.name();
      const Digest digest = ComputeDigest(std::as_bytes(std::span(wanted)));
      EXPECT_EQ(std::memcmp(tensor.digest().data(), digest.data(), digest.size()), 0) << tensor.name();
      ++tensors;
    }
  }
  EXPECT_EQ(tensors, count);
}

TEST_F(LoadSessionTest, HandsOverEachRankThatIsAskedForInItsOrderAndReadsWhatTheyShareOnce) {
  CheckpointBuilder()
      .Config(R"({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 4,
                  "hidden_size": 2048})")
      .Tensor("model.embed_tokens.weight", "BF16", {128, 2048})
      .Tensor("model.norm.weight", "BF16", {2048})
      .Tensor("lm_head.weight", "BF16", {128, 2048})
      .Write(folder_.path());
  pb::LoadRequest request = Request();
  request.mutable_spec()->set_tensor_parallel_size(4);
  request.mutable_ranks(0)->set_rank(2);
  request.add_ranks()->set_rank(3);

  const Outcome outcome = RunLoad(RealFileSystem(), request);

  ASSERT_THAT(outcome.status, IsOk());
  ASSERT_EQ(outcome.planned->shards_size(), 2);
  EXPECT_EQ(outcome.planned->shards(0).rank(), 2);
  EXPECT_EQ(outcome.planned->shards(1).rank(), 3);
  EXPECT_EQ(outcome.planned->read_bytes(), 2 * (2 * 32 * 2048 * 2) + 2048 * 2);  // two quarters each, the norm once
  EXPECT_EQ(outcome.planned->tensor_count(), 6);
  EXPECT_THAT(outcome.ranks, ElementsAre(2, 3));
}

TEST_F(LoadSessionTest, HandsOverSealedSlabsAndAManifestThatDescribesThem) {
  CheckpointBuilder()
      .Tensor("odd", "U8", {3}, "x.safetensors")
      .Tensor("a.weight", "BF16", {100, 300}, "x.safetensors")
      .Tensor("b.weight", "F32", {1000}, "y.safetensors")
      .WithIndex()
      .Write(folder_.path());

  const Outcome outcome = RunLoad(RealFileSystem(), Request());

  ASSERT_THAT(outcome.status, IsOk());
  ASSERT_TRUE(outcome.planned.has_value() && outcome.sealed.has_value());
  EXPECT_EQ(outcome.planned->read_bytes(), 3 + 60'000 + 4000);
  EXPECT_EQ(outcome.planned->tensor_count(), 3);
  EXPECT_EQ(outcome.sealed->tensor_count(), 3);
  EXPECT_EQ(outcome.sealed->read_bytes(), outcome.planned->read_bytes());
  EXPECT_THAT(outcome.phases, Contains(v1::WEIGHT_SET_STATE_LOADING));
  EXPECT_THAT(outcome.phases, Contains(v1::WEIGHT_SET_STATE_VERIFYING));
  ASSERT_EQ(outcome.sealed->slabs_size(), 1);
  ASSERT_EQ(outcome.fds.size(), 2u);
  const v1::Slab& slab = outcome.sealed->slabs(0);
  EXPECT_EQ(slab.handle_kind(), v1::HANDLE_KIND_HOST_MEMFD);
  EXPECT_GE(slab.size_bytes(), outcome.planned->slab_bytes());
  EXPECT_THAT(CheckSealedMemfd(outcome.fds[0].get(), slab.size_bytes()), IsOk());
  EXPECT_THAT(CheckSealedMemfd(outcome.fds[1].get(), outcome.sealed->manifest_bytes()), IsOk());

  ExpectWeights(outcome, 3);
}

TEST_F(LoadSessionTest, HandsOverAShardOfSeveralSlabs) {
  CheckpointBuilder()
      .Tensor("a", "U8", {kLeastSlabBytes}, "x.safetensors")
      .Tensor("b", "U8", {1003}, "x.safetensors")
      .Tensor("c", "BF16", {kLeastSlabBytes / 2}, "y.safetensors")
      .WithIndex()
      .Write(folder_.path());
  const Outcome outcome = RunLoad(RealFileSystem(), Request());
  ASSERT_THAT(outcome.status, IsOk());
  ASSERT_EQ(outcome.sealed->slabs_size(), 2);
  ASSERT_EQ(outcome.fds.size(), 3U);
  ExpectWeights(outcome, 3);
}

TEST_F(LoadSessionTest, TellsTheBrokerWhyACheckpointIsRefusedBeforeItPlans) {
  CheckpointBuilder()
      .Tensor("a", "BF16", {16})
      .Config(R"({"quantization_config": {"quant_method": "awq"}})")
      .Write(folder_.path());

  const Outcome outcome = RunLoad(RealFileSystem(), Request());

  EXPECT_FALSE(outcome.planned.has_value());
  EXPECT_THAT(outcome.failed, StatusIs(Reason::kQuantizationUnsupported, HasSubstr("awq")));
  EXPECT_THAT(outcome.status, StatusIs(Reason::kQuantizationUnsupported));
}

TEST_F(LoadSessionTest, RefusesASpecThatTheCheckpointContradicts) {
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder_.path());
  pb::LoadRequest request = Request();
  request.mutable_spec()->set_quantization("fp8");
  EXPECT_THAT(RunLoad(RealFileSystem(), request).failed, StatusIs(Reason::kQuantizationContradicted));
}

TEST_F(LoadSessionTest, RefusesFilesThatChangedSinceTheyWereFingerprinted) {
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder_.path());
  const pb::LoadRequest request = Request();
  WriteFile(folder_ / kShard, ReadFile(folder_ / kShard));

  const Outcome outcome = RunLoad(RealFileSystem(), request);

  EXPECT_FALSE(outcome.planned.has_value());
  EXPECT_THAT(outcome.failed, StatusIs(Reason::kCheckpointChanged, HasSubstr(kShard)));
}

TEST_F(LoadSessionTest, RefusesASideFileThatAppearedSinceTheFingerprint) {
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder_.path());
  const pb::LoadRequest request = Request();
  WriteFile(folder_ / "quantize_config.json", "{}");

  const Outcome outcome = RunLoad(RealFileSystem(), request);

  EXPECT_FALSE(outcome.planned.has_value());
  EXPECT_FALSE(outcome.failed.ok());
}

// Whatever is done to a file while it is loaded, the load fails, names the file, and hands nothing over.
struct MidLoadChange {
  const char* name;
  std::function<void(const std::string& path)> change;
};

class MidLoadChangeTest : public LoadSessionTest, public ::testing::WithParamInterface<MidLoadChange> {};

TEST_P(MidLoadChangeTest, FailsTheLoadNamingTheFile) {
  // Before each of several reads: the header's, the first of the weights, one in the middle, the last.
  for (const int64_t nth_read : {1, 3, 8, 12}) {
    CheckpointBuilder().Tensor("a", "BF16", {100'000}).Write(folder_.path());
    const pb::LoadRequest fresh = Request();
    FaultyFileSystem files(RealFileSystem());
    bool changed = false;
    files.BeforeRead(kShard, nth_read, [&] {
      GetParam().change(folder_ / kShard);
      changed = true;
    });

    const Outcome outcome = RunLoad(files, fresh);

    ASSERT_TRUE(changed) << nth_read;
    EXPECT_FALSE(outcome.sealed.has_value()) << nth_read;
    EXPECT_FALSE(outcome.status.ok());
    EXPECT_THAT(std::string(outcome.failed.message()), HasSubstr(kShard)) << nth_read;
    if (nth_read > 2) {
      EXPECT_THAT(outcome.failed, StatusIs(Reason::kCheckpointChanged)) << nth_read;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    AnyChange, MidLoadChangeTest,
    ::testing::Values(MidLoadChange{"Truncated",
                                    [](const std::string& path) { std::filesystem::resize_file(path, 150'000); }},
                      MidLoadChange{"Emptied", [](const std::string& path) { std::filesystem::resize_file(path, 0); }},
                      MidLoadChange{"Grown", [](const std::string& path) { WriteFile(path, ReadFile(path) + "more"); }},
                      MidLoadChange{"Edited",
                                    [](const std::string& path) {
                                      const int fd = open(path.c_str(), O_WRONLY);
                                      EXPECT_EQ(pwrite(fd, "x", 1, 199'000), 1);
                                      close(fd);
                                    }},
                      MidLoadChange{"Replaced",
                                    [](const std::string& path) {
                                      WriteFile(path + ".new", ReadFile(path));
                                      std::filesystem::rename(path + ".new", path);
                                    }},
                      MidLoadChange{"Removed", [](const std::string& path) { std::filesystem::remove(path); }}),
    [](const auto& change) { return std::string(change.param.name); });

TEST_F(LoadSessionTest, FailsIfTheConfigChangesWhileTheBrokerGrantsMemory) {
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder_.path());
  const Outcome outcome =
      RunLoad(RealFileSystem(), Request(), [&] { WriteFile(folder_ / "config.json", R"({"rope_theta": 1})"); });
  EXPECT_FALSE(outcome.sealed.has_value());
  EXPECT_THAT(outcome.failed, StatusIs(Reason::kCheckpointChanged, HasSubstr("config.json")));
}

TEST_F(LoadSessionTest, TakesNoMemoryIfTheBrokerDoesNotLetItProceed) {
  CheckpointBuilder().Tensor("a", "BF16", {16}).Write(folder_.path());
  const pb::LoadRequest request = Request();
  SocketPair pair = *CreateSeqpacketPair();
  std::thread broker([&] {
    EXPECT_THAT(ReceiveMessage(pair.first.get()), IsOk());
    pair.first.reset();
  });
  EXPECT_THAT(RunLoadSession(RealFileSystem(), request, pair.second.get()), StatusIs(Reason::kCancelled));
  broker.join();
}

TEST(LoadRequest, IsReadFromASealedMemfd) {
  pb::LoadRequest request;
  request.set_fingerprint("abc");
  const std::string bytes = request.SerializeAsString();
  const UniqueFd fd = *CreateSealedMemfd("request", std::as_bytes(std::span(bytes)));
  const auto read = ReadLoadRequest(fd.get());
  ASSERT_THAT(read, IsOk());
  EXPECT_EQ(read->fingerprint(), "abc");
}

TEST(LoadRequest, IsRefusedIfItCouldStillChange) {
  const UniqueFd fd(memfd_create("request", 0));
  EXPECT_THAT(ReadLoadRequest(fd.get()), StatusIs(Reason::kProtocolError));
}

TEST(LoadRequest, IsRefusedIfItIsSomethingElse) {
  const std::string bytes = "\xff\xff";
  const UniqueFd fd = *CreateSealedMemfd("request", std::as_bytes(std::span(bytes)));
  EXPECT_THAT(ReadLoadRequest(fd.get()), StatusIs(Reason::kProtocolError, HasSubstr("LoadRequest")));
}

}  // namespace
}  // namespace weightbroker
