// The loader's side of a publication, with the test as the broker.

#include "server/loader/publish_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/socket.h"
#include "common/identity/checkpoint_identity.h"
#include "common/memory/host_slab.h"
#include "common/memory/writable_slab.h"
#include "common/plan/manifest.h"
#include "common/plan/plan.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;
using testing::CheckpointBuilder;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TemporaryFolder;

class PublishSessionTest : public ::testing::Test {
 protected:
  ~PublishSessionTest() override {
    pair_.first.reset();
    if (loader_.joinable()) loader_.join();
  }

  void Start(const std::string& quantization = "none") {
    pb::LoadRequest request;
    v1::WeightSpec spec;
    spec.set_layout("engine");
    spec.set_engine("e");
    spec.set_engine_version("1");
    spec.set_quantization(quantization);
    *request.mutable_spec() = CompleteSpec(spec).value();
    ToProto(*ReadCheckpointIdentity(RealFileSystem(), folder_.path()), &request);
    request.add_ranks()->set_rank(3);
    *request.mutable_publish() = order_;
    pair_ = *CreateSeqpacketPair();
    loader_ = std::thread([this, request] {
      result_ = RunPublishSession(RealFileSystem(), request, pair_.second.get());
      pair_.second.reset();
    });
  }

  void Send(const pb::LoadCommand& command, const std::vector<int>& fds = {}) {
    EXPECT_THAT(SendMessage(pair_.first.get(), command.SerializeAsString(), fds), IsOk());
  }

  // The next event that is no progress.
  pb::LoadEvent Next(std::vector<UniqueFd>* fds = nullptr) {
    while (true) {
      auto message = ReceiveMessage(pair_.first.get());
      EXPECT_THAT(message, IsOk());
      pb::LoadEvent event;
      if (!message.ok() || message->closed || !event.ParseFromString(message->bytes)) return {};
      if (event.has_progress()) continue;
      if (fds != nullptr) *fds = std::move(message->fds);
      return event;
    }
  }

  UniqueFd Allocate(int64_t size_bytes) {
    pb::LoadCommand command;
    command.mutable_allocate()->add_slab_bytes(size_bytes);
    Send(command);
    std::vector<UniqueFd> fds;
    const pb::LoadEvent event = Next(&fds);
    EXPECT_EQ(event.allocated().slabs_size(), 1);
    EXPECT_EQ(fds.size(), 1u);
    if (fds.empty()) return {};
    EXPECT_THAT(CheckWritableMemfd(fds[0].get(), event.allocated().slabs(0).size_bytes()), IsOk());
    return std::move(fds[0]);
  }

  void Commit(const std::vector<v1::Tensor>& rows) {
    const std::string manifest = SerializeManifest(rows).value();
    const UniqueFd memfd = CreateSealedMemfd("rows", std::as_bytes(std::span(manifest))).value();
    pb::LoadCommand command;
    command.mutable_commit()->set_manifest_bytes(static_cast<int64_t>(manifest.size()));
    Send(command, {memfd.get()});
  }

  absl::Status Refusal() { return ParseRpcStatus(Next().refused().SerializeAsString()); }

  static v1::Tensor Row(int64_t size_bytes = 4096) {
    v1::Tensor row;
    row.set_name("w");
    row.set_dtype(v1::DATA_TYPE_U8);
    row.add_shape(size_bytes);
    row.set_size_bytes(size_bytes);
    (*row.mutable_metadata())["k"] = "v";
    return row;
  }

  const TemporaryFolder folder_;
  pb::PublishOrder order_;
  SocketPair pair_;
  std::thread loader_;
  absl::Status result_;
};

TEST_F(PublishSessionTest, HandsOverSealedMemoryWithDigestsOfWhatWasWritten) {
  CheckpointBuilder().Tensor("a", "BF16", {4}).Write(folder_.path());
  Start();
  const UniqueFd fd = Allocate(4096);
  const std::string bytes = testing::TensorBytes("w", 4096);
  ASSERT_EQ(pwrite(fd.get(), bytes.data(), bytes.size(), 0), 4096);
  Commit({Row()});
  std::vector<UniqueFd> fds;
  const pb::LoadSealed sealed = Next(&fds).sealed();
  ASSERT_EQ(fds.size(), 2u);
  EXPECT_EQ(sealed.rank(), 3);
  EXPECT_EQ(sealed.tensor_count(), 1);
  EXPECT_THAT(CheckSealedMemfd(fds[0].get(), 4096), IsOk());
  std::string manifest(static_cast<size_t>(sealed.manifest_bytes()), '\0');
  ASSERT_EQ(pread(fds[1].get(), manifest.data(), manifest.size(), 0), sealed.manifest_bytes());
  const auto rows = ParseManifest(manifest);
  ASSERT_THAT(rows, IsOk());
  const Digest digest = ComputeDigest(std::as_bytes(std::span(bytes)));
  EXPECT_EQ(memcmp((*rows)[0].digest().data(), digest.data(), digest.size()), 0);
  EXPECT_EQ((*rows)[0].metadata().at("k"), "v");
  EXPECT_EQ(pwrite(fd.get(), "x", 1, 0), -1) << "the publisher can still write";
  loader_.join();
  EXPECT_THAT(result_, IsOk());
}

TEST_F(PublishSessionTest, RefusesToSealWhatIsMappedWritableAndTakesItOnceItIsNot) {
  CheckpointBuilder().Tensor("a", "BF16", {4}).Write(folder_.path());
  Start();
  const UniqueFd first = Allocate(4096);
  const UniqueFd second = Allocate(4096);
  void* const mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, second.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  Commit({Row()});
  EXPECT_THAT(Refusal(), StatusIs(Reason::kStillWritable));
  munmap(mapped, 4096);
  Commit({Row()});
  EXPECT_EQ(Next().sealed().slabs_size(), 2);
}

TEST_F(PublishSessionTest, RefusesWhatCannotBeCommittedAndGoesOn) {
  CheckpointBuilder().Tensor("a", "BF16", {4}).Write(folder_.path());
  order_.mutable_promise()->set_tensor_count(1);
  order_.mutable_promise()->set_size_bytes(100);
  Start();
  const UniqueFd fd = Allocate(4096);
  Commit({Row(5000)});
  EXPECT_THAT(Refusal(), StatusIs(Reason::kManifestInvalid));
  Commit({Row(99)});
  EXPECT_THAT(Refusal(), StatusIs(Reason::kPromiseBroken));
  pb::LoadCommand too_much;
  too_much.mutable_allocate()->add_slab_bytes(int64_t{1} << 60);
  Send(too_much);
  EXPECT_THAT(Refusal(), StatusIs(Reason::kMemoryExhausted));
  Commit({Row(100)});
  EXPECT_TRUE(Next().has_sealed());
}

TEST_F(PublishSessionTest, ChecksTheCheckpointWhereTheSpecSaysThatItIsQuantizedAsThatIs) {
  CheckpointBuilder()
      .Tensor("a", "BF16", {4})
      .Config(R"({"quantization_config": {"quant_method": "awq"}})")
      .Write(folder_.path());
  Start(kSpecAuto);
  EXPECT_THAT(ParseRpcStatus(Next().failed().SerializeAsString()), StatusIs(Reason::kQuantizationUnsupported));
}

TEST_F(PublishSessionTest, EndsWhenTheBrokerGoes) {
  CheckpointBuilder().Tensor("a", "BF16", {4}).Write(folder_.path());
  Start();
  const UniqueFd fd = Allocate(4096);
  pair_.first.reset();
  loader_.join();
  EXPECT_THAT(result_, StatusIs(Reason::kCancelled));
}

}  // namespace
}  // namespace weightbroker
