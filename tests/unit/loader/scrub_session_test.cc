// A scrub as the loader runs it: what it reads, what it finds, and what it makes of an order that makes no sense.

#include "server/loader/scrub_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/device/gpu_digest.h"
#include "common/identity/sha256.h"
#include "common/memory/cuda_slab.h"
#include "common/memory/host_slab.h"
#include "common/plan/manifest.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;
using testing::FakeCudaDriver;
using testing::FakeGpuUuid;
using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr int64_t kTensorBytes = 4096;
constexpr int64_t kSlabBytes = 2 << 20;

std::byte ByteAt(int64_t offset) { return static_cast<std::byte>(offset * 7 + offset / 256); }

std::vector<std::byte> Contents() {
  std::vector<std::byte> bytes(kSlabBytes);
  for (int64_t i = 0; i < kSlabBytes; ++i) bytes[static_cast<size_t>(i)] = ByteAt(i);
  return bytes;
}

// Three tensors one after the other, and an alias of the second.
std::vector<v1::Tensor> Rows(const std::vector<std::byte>& contents) {
  std::vector<v1::Tensor> rows;
  for (const auto& [name, index] :
       std::vector<std::pair<std::string, int>>{{"a", 0}, {"b", 1}, {"b.alias", 1}, {"c", 2}}) {
    v1::Tensor& row = rows.emplace_back();
    row.set_name(name);
    row.set_dtype(v1::DATA_TYPE_U8);
    row.add_shape(kTensorBytes);
    row.set_offset_bytes(index * kTensorBytes);
    row.set_size_bytes(kTensorBytes);
    if (name == "b.alias") row.set_alias_of("b");
    const Digest digest = ComputeDigest(
        std::span(contents).subspan(static_cast<size_t>(index * kTensorBytes), static_cast<size_t>(kTensorBytes)));
    row.set_digest(reinterpret_cast<const char*>(digest.data()), digest.size());
  }
  return rows;
}

struct Outcome {
  absl::Status status;  // what the session returned
  std::optional<pb::ScrubResult> result;
  absl::Status failed;  // what it told the broker
  int progress_count = 0;
};

class ScrubSessionTest : public ::testing::Test {
 protected:
  pb::LoadRequest Request(v1::HandleKind kind, const std::string& manifest) {
    pb::LoadRequest request;
    request.set_handle_kind(kind);
    request.add_ranks()->set_device(kind == v1::HANDLE_KIND_HOST_MEMFD ? "host" : FakeGpuUuid(1));
    v1::Slab& slab = *request.mutable_scrub()->add_slabs();
    slab.set_size_bytes(kSlabBytes);
    slab.set_handle_kind(kind);
    request.mutable_scrub()->set_manifest_bytes(static_cast<int64_t>(manifest.size()));
    request.mutable_scrub()->set_manifest_sha256(Sha256Bytes(manifest));
    return request;
  }

  // Plays the broker: hands over `slab_fd`, if it is valid, and the manifest.
  Outcome Scrub(const pb::LoadRequest& request, int slab_fd, const std::string& manifest) {
    SocketPair pair = *CreateSeqpacketPair();
    const UniqueFd manifest_fd = *CreateSealedMemfd("manifest", std::as_bytes(std::span(manifest)));
    std::vector<int> fds;
    if (slab_fd >= 0) fds.push_back(slab_fd);
    fds.push_back(manifest_fd.get());
    pb::LoadCommand command;
    command.set_proceed(true);
    EXPECT_THAT(SendMessage(pair.first.get(), command.SerializeAsString(), fds), IsOk());
    Outcome outcome;
    std::thread loader([&] {
      outcome.status = RunScrubSession(
          request, pair.second.get(), [] {}, [this] { return absl::StatusOr<CudaDriver*>(&cuda_); });
      pair.second.reset();
    });
    while (true) {
      const auto message = ReceiveMessage(pair.first.get());
      if (!message.ok() || message->closed) break;
      pb::LoadEvent event;
      EXPECT_TRUE(event.ParseFromString(message->bytes));
      if (event.has_progress()) ++outcome.progress_count;
      if (event.has_scrubbed()) outcome.result = event.scrubbed();
      if (event.has_failed()) outcome.failed = ParseRpcStatus(event.failed().SerializeAsString());
    }
    loader.join();
    return outcome;
  }

  static SealedSlab Seal(const std::vector<std::byte>& contents) {
    HostSlab slab = HostSlab::Create(kSlabBytes).value();
    const std::span<const std::byte> part(contents);
    EXPECT_THAT(slab.Write(0, std::span(&part, 1)), IsOk());
    return std::move(slab).Seal().value();
  }

  FakeCudaDriver cuda_;
};

TEST_F(ScrubSessionTest, FindsEveryTensorOfSoundHostMemoryIntact) {
  const std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  const SealedSlab slab = Seal(contents);

  const Outcome outcome = Scrub(Request(v1::HANDLE_KIND_HOST_MEMFD, manifest), slab.fd.get(), manifest);

  ASSERT_THAT(outcome.status, IsOk());
  ASSERT_TRUE(outcome.result.has_value());
  EXPECT_THAT(outcome.result->damaged(), SizeIs(0));
  EXPECT_EQ(outcome.result->tensor_count(), 3) << "an alias is checked where its memory is";
  EXPECT_EQ(outcome.result->checked_bytes(), 3 * kTensorBytes);
}

TEST_F(ScrubSessionTest, NamesTheTensorOfHostMemoryInWhichOneBitDiffersAndItsPlace) {
  std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  contents[kTensorBytes + 100] ^= std::byte{4};
  const SealedSlab slab = Seal(contents);

  const Outcome outcome = Scrub(Request(v1::HANDLE_KIND_HOST_MEMFD, manifest), slab.fd.get(), manifest);

  ASSERT_TRUE(outcome.result.has_value());
  ASSERT_THAT(outcome.result->damaged(), SizeIs(1));
  EXPECT_EQ(outcome.result->damaged(0).name(), "b");
  EXPECT_EQ(outcome.result->damaged(0).offset_bytes(), kTensorBytes);
  EXPECT_EQ(outcome.result->damaged(0).size_bytes(), kTensorBytes);
  EXPECT_NE(outcome.result->damaged(0).found_digest(), outcome.result->damaged(0).expected_digest());
}

TEST_F(ScrubSessionTest, KeepsToItsBandwidthAndSaysThatItIsAliveMeanwhile) {
  const std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  const SealedSlab slab = Seal(contents);
  pb::LoadRequest request = Request(v1::HANDLE_KIND_HOST_MEMFD, manifest);
  request.mutable_scrub()->set_bytes_per_second(3 * kTensorBytes);  // all of it in a second
  const auto start = std::chrono::steady_clock::now();

  const Outcome outcome = Scrub(request, slab.fd.get(), manifest);

  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(999));
  ASSERT_TRUE(outcome.result.has_value());
  EXPECT_GE(outcome.progress_count, 2);
}

TEST_F(ScrubSessionTest, RefusesAManifestOfAnotherSha256) {
  const std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  const SealedSlab slab = Seal(contents);
  pb::LoadRequest request = Request(v1::HANDLE_KIND_HOST_MEMFD, manifest);
  request.mutable_scrub()->set_manifest_sha256(std::string(32, 'x'));

  const Outcome outcome = Scrub(request, slab.fd.get(), manifest);

  EXPECT_FALSE(outcome.result.has_value());
  EXPECT_THAT(outcome.failed, StatusIs(Reason::kProtocolError, HasSubstr("SHA-256")));
}

TEST_F(ScrubSessionTest, RefusesASlabThatIsShorterThanIsSaid) {
  const std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  const SealedSlab slab = Seal(contents);
  pb::LoadRequest request = Request(v1::HANDLE_KIND_HOST_MEMFD, manifest);
  request.mutable_scrub()->mutable_slabs(0)->set_size_bytes(kSlabBytes + 1);

  EXPECT_THAT(Scrub(request, slab.fd.get(), manifest).failed, StatusIs(Reason::kProtocolError));
}

// GPU memory is written to here as its maker does; nothing of it is left afterwards.
class GpuScrubSessionTest : public ScrubSessionTest {
 protected:
  void TearDown() override { EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive(); }

  static void Fill(CudaDevicePtr address, const std::vector<std::byte>& contents) {
    std::memcpy(reinterpret_cast<void*>(address), contents.data(), contents.size());
  }

  // The descriptor of VMM memory with these contents.
  UniqueFd MakeVmm(const std::vector<std::byte>& contents) {
    const CudaContext context = CudaContext::Retain(cuda_, 0).value();
    const CudaVmmMemory memory = CudaVmmMemory::Create(context, kSlabBytes).value();
    CudaReservation range = CudaReservation::Reserve(context, kSlabBytes).value();
    EXPECT_THAT(range.Map(0, memory, CudaAccess::kReadWrite), IsOk());
    Fill(range.address(), contents);
    return memory.Export().value();
  }
};

TEST_F(GpuScrubSessionTest, FindsSoundVmmMemoryIntactAndLeavesNothingMapped) {
  const std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  const UniqueFd fd = MakeVmm(contents);

  const Outcome outcome = Scrub(Request(v1::HANDLE_KIND_CUDA_VMM_FD, manifest), fd.get(), manifest);

  ASSERT_THAT(outcome.status, IsOk());
  ASSERT_TRUE(outcome.result.has_value());
  EXPECT_THAT(outcome.result->damaged(), SizeIs(0));
  EXPECT_EQ(outcome.result->checked_bytes(), 3 * kTensorBytes);
}

TEST_F(GpuScrubSessionTest, NamesTheTensorOfVmmMemoryInWhichOneBitDiffers) {
  std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  contents[2 * kTensorBytes] ^= std::byte{128};
  const UniqueFd fd = MakeVmm(contents);

  const Outcome outcome = Scrub(Request(v1::HANDLE_KIND_CUDA_VMM_FD, manifest), fd.get(), manifest);

  ASSERT_TRUE(outcome.result.has_value());
  ASSERT_THAT(outcome.result->damaged(), SizeIs(1));
  EXPECT_EQ(outcome.result->damaged(0).name(), "c");
}

TEST_F(GpuScrubSessionTest, NamesTheTensorOfIpcMemoryInWhichOneBitDiffers) {
  std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  contents[0] ^= std::byte{1};
  const CudaContext context = CudaContext::Retain(cuda_, 0).value();
  const CudaIpcMemory memory = CudaIpcMemory::Allocate(context, kSlabBytes).value();
  Fill(memory.address(), contents);
  const CudaIpcHandle handle = memory.Export().value();
  pb::LoadRequest request = Request(v1::HANDLE_KIND_CUDA_IPC, manifest);
  request.mutable_scrub()->mutable_slabs(0)->set_cuda_ipc_handle(
      std::string(reinterpret_cast<const char*>(handle.data()), handle.size()));

  const Outcome outcome = Scrub(request, -1, manifest);

  ASSERT_TRUE(outcome.result.has_value()) << outcome.failed;
  ASSERT_THAT(outcome.result->damaged(), SizeIs(1));
  EXPECT_EQ(outcome.result->damaged(0).name(), "a");
}

TEST_F(GpuScrubSessionTest, SaysWhyGpuMemoryCannotBeRead) {
  const std::vector<std::byte> contents = Contents();
  const std::string manifest = SerializeManifest(Rows(contents)).value();
  const UniqueFd fd = MakeVmm(contents);
  cuda_.Fail("cuMemImportFromShareableHandle", 999);

  const Outcome outcome = Scrub(Request(v1::HANDLE_KIND_CUDA_VMM_FD, manifest), fd.get(), manifest);

  EXPECT_FALSE(outcome.result.has_value()) << "which says nothing of the bytes";
  EXPECT_THAT(outcome.failed, StatusIs(Reason::kCudaError));
}

}  // namespace
}  // namespace weightbroker
