// Engines that publish to a GPU: the real broker and client library, and loaders in threads of this process, all with
// one driver in host memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/src/publish.h"
#include "client/src/redeem_ticket.h"
#include "common/device/gpu_digest.h"
#include "common/memory/cuda_slab.h"
#include "server/loader/publish_session.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/fake_gpu_inventory.h"
#include "tests/support/tensors_of_every_kind.h"
#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

using client::WeightsState;
using ::testing::AllOf;
using testing::AnyGpuFd;
using ::testing::AnyOf;
using testing::BytesOf;
using testing::Described;
using testing::FakeCudaDriver;
using testing::FakeGpuInventory;
using testing::FakeGpuUuid;
using testing::FakeLoader;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::ServiceTest;
using testing::StatusIs;
using testing::TensorBytes;
using testing::TensorsOfEveryKind;

constexpr int kRacers = 16;
constexpr int64_t kMiB = 1 << 20;

class GpuPublishTest : public ServiceTest, public ::testing::WithParamInterface<v1::HandleKind> {
 protected:
  void SetUp() override {
    if (!HasGpuKernels()) GTEST_SKIP() << "this build has no GPU kernels";
    StartWithGpus({FakeGpuUuid(1), FakeGpuUuid(2)});
  }

  ~GpuPublishTest() override {
    broker_.reset();  // before the catalog, and with it the last loader
    EXPECT_EQ(cuda_.live_objects(), 0) << cuda_.DescribeLive();
    EXPECT_EQ(cuda_.used_bytes(), 0);
  }

  void StartWithGpus(const std::vector<std::string>& uuids) {
    std::vector<GpuInfo> gpus;
    for (const std::string& uuid : uuids) {
      gpus.push_back({.ordinal = static_cast<int>(gpus.size()),
                      .uuid = uuid,
                      .name = "Fake GPU",
                      .compute_major = 9,
                      .compute_minor = 0,
                      .total_bytes = int64_t{1} << 30,
                      .free_bytes = int64_t{1} << 30});
    }
    auto inventory =
        std::make_shared<std::unique_ptr<GpuInventory>>(std::make_unique<FakeGpuInventory>(std::move(gpus)));
    catalog_ = std::make_unique<DeviceCatalog>(DeviceCatalogOptions{
        .open = [inventory]() -> absl::StatusOr<std::unique_ptr<GpuInventory>> { return std::move(*inventory); }});
    BrokerOptions options;
    options.devices = catalog_.get();
    options.check_gpu_fd = AnyGpuFd;
    Start(
        [this](FakeLoader& loader) {
          RunPublishSession(
              RealFileSystem(), loader.request(), loader.control_fd(), [] {},
              [this]() -> absl::StatusOr<CudaDriver*> { return &cuda_; })
              .IgnoreError();
        },
        std::move(options));
    services_ = *client::Services::Open({.socket_path = socket_path_});
  }

  PublishOptions OptionsFor(int cuda_device) const {
    PublishOptions options;
    options.attach.cuda_device = cuda_device;
    options.attach.handle_kinds = {static_cast<HandleKind>(GetParam())};
    return options;
  }

  absl::StatusOr<std::unique_ptr<WeightsState>> AttachOrPublish(const Client::Loader& load,
                                                                const PublishOptions& options,
                                                                Status* load_failure = nullptr) {
    v1::WeightSpec spec = testing::SpecOf("models:m");
    spec.set_layout("engine");
    spec.set_engine("e");
    spec.set_engine_version("1");
    spec.set_quantization("none");
    Status ignored;
    const auto engine = client::FindEngineDevice(cuda_, options.attach.cuda_device);
    if (!engine.ok()) return engine.status();
    return client::AttachOrPublish(*services_, spec, testing::TorchVersion("any"), *engine, load, options,
                                   load_failure == nullptr ? &ignored : load_failure);
  }

  absl::StatusOr<std::unique_ptr<WeightsState>> AttachOrPublish(const Client::Loader& load) {
    return AttachOrPublish(load, OptionsFor(0));
  }

  static absl::Status Verify(const WeightsState& weights) {
    return weights.memory->Verify(weights.manifest.tensors, 1);
  }

  static const Tensor& Find(const WeightsState& weights, const std::string& name) {
    return *client::FindTensor(weights.manifest.tensors, name);
  }

  void ExpectNothingLeft() { ExpectOnly(0); }
  // Of the GPUs' memory, what the test itself has taken.
  void ExpectOnly(int64_t own_bytes) {
    EXPECT_TRUE(testing::Eventually([&] {
      return Health().load_count() == 0 && Health().reserved_bytes() == 0 && spawner_->running_count() == 0 &&
             cuda_.used_bytes() == own_bytes;
    })) << cuda_.DescribeLive();
  }

  FakeCudaDriver cuda_{{{.uuid = FakeGpuUuid(1)}, {.uuid = FakeGpuUuid(2)}}};
  std::unique_ptr<DeviceCatalog> catalog_;
  std::shared_ptr<client::Services> services_;
};

INSTANTIATE_TEST_SUITE_P(Gpu, GpuPublishTest, ::testing::Values(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC),
                         [](const auto& kind) {
                           return kind.param == v1::HANDLE_KIND_CUDA_IPC ? "CudaIpc" : "CudaVmm";
                         });

TEST_P(GpuPublishTest, TensorsOfEveryKindComeBackExactlyWithTheirMetadata) {
  const TensorsOfEveryKind tensors;
  const auto put_all = [&](Publisher& publisher) -> Status {
    EXPECT_EQ(publisher.device().kind, DeviceKind::kCuda);
    EXPECT_EQ(publisher.device().uuid, FakeGpuUuid(1));
    return tensors.Put(publisher);
  };

  ASSERT_THAT(AttachOrPublish(put_all), IsOk());
  const auto weights = AttachOrPublish([](Publisher&) { return Status(StatusCode::kInternal, "UNWANTED", "again"); });

  ASSERT_THAT(weights, IsOk());
  EXPECT_THAT(Verify(**weights), IsOk());
  EXPECT_EQ((*weights)->memory->device().uuid, FakeGpuUuid(1));
  tensors.ExpectAll([&](const std::string& name) { return client::FindTensor((*weights)->manifest.tensors, name); },
                    BytesOf);
  const Tensor& odd = Find(**weights, "from_the_fourth_on");
  const Digest digest = ComputeDigest({odd.data, static_cast<size_t>(odd.size_bytes)});
  EXPECT_EQ(memcmp(odd.digest.data(), digest.data(), digest.size()), 0);
}

// Copies between places on the GPU are done as late as they may.
TEST_P(GpuPublishTest, WhatIsCopiedOnTheGpuIsThereBeforeDigestsAreTaken) {
  const CudaContext context = *CudaContext::Retain(cuda_, 0);
  const CudaIpcMemory source = *CudaIpcMemory::Allocate(context, 2 * kMiB);
  const std::string bytes = TensorBytes("source", 2 * kMiB);
  memcpy(reinterpret_cast<void*>(source.address()), bytes.data(), bytes.size());
  PublishTimes times;
  PublishOptions options = OptionsFor(0);
  options.on_published = [&](const PublishTimes& published) { times = published; };

  const auto weights = AttachOrPublish(
      [&](Publisher& publisher) {
        const Status status =
            publisher.Add(Described("w", DataType::kU8, {2 * kMiB}), reinterpret_cast<const void*>(source.address()));
        EXPECT_EQ(cuda_.CallCount("cuMemcpyHtoDAsync"), 0);
        return status;
      },
      options);

  ASSERT_THAT(weights, IsOk());
  EXPECT_EQ(BytesOf(Find(**weights, "w")), bytes);
  EXPECT_THAT(Verify(**weights), IsOk());
  EXPECT_EQ(times.copied_bytes, 2 * kMiB);
  EXPECT_GT(times.grant_seconds, 0);
  EXPECT_GT(times.commit_seconds, 0);
  EXPECT_GT(times.digest_seconds, 0);
}

TEST_P(GpuPublishTest, CopiesGoIntoTheStreamThatTheEngineNames) {
  const CudaContext context = *CudaContext::Retain(cuda_, 0);
  const CudaScope current(context);
  const CudaIpcMemory source = *CudaIpcMemory::Allocate(context, 2 * kMiB);
  CudaStream stream = nullptr;
  ASSERT_EQ(cuda_.StreamCreate(kCudaStreamNonBlocking, &stream), kCudaSuccess);

  const auto weights = AttachOrPublish([&](Publisher& publisher) {
    // Queued before the copy and, as in any stream, done before it.
    cuda_.MemsetD8Async(source.address(), 7, 2 * kMiB, stream);
    publisher.UseStream(stream);
    return publisher.Add(Described("w", DataType::kU8, {2 * kMiB}), reinterpret_cast<const void*>(source.address()));
  });

  ASSERT_THAT(weights, IsOk());
  EXPECT_EQ(BytesOf(Find(**weights, "w")), std::string(2 * kMiB, '\7'));
  cuda_.StreamDestroy(stream);
}

// In whichever stream: of one that does not wait for the default stream only the GPU itself knows.
TEST_P(GpuPublishTest, WhatIsCopiedFromAnotherGpuIsWhatThatGpuHadBeenAskedForBefore) {
  const CudaContext other = *CudaContext::Retain(cuda_, 1);
  const CudaIpcMemory source = *CudaIpcMemory::Allocate(other, 2 * kMiB);
  CudaStream stream = nullptr;
  {
    const CudaScope current(other);
    ASSERT_EQ(cuda_.StreamCreate(kCudaStreamNonBlocking, &stream), kCudaSuccess);
  }

  const auto weights = AttachOrPublish([&](Publisher& publisher) {
    {
      const CudaScope current(other);
      EXPECT_EQ(cuda_.MemsetD8Async(source.address(), 7, 2 * kMiB, stream), kCudaSuccess);
    }
    return publisher.Add(Described("w", DataType::kU8, {2 * kMiB}), reinterpret_cast<const void*>(source.address()));
  });

  ASSERT_THAT(weights, IsOk());
  EXPECT_EQ(BytesOf(Find(**weights, "w")), std::string(2 * kMiB, '\7'));
  const CudaScope current(other);
  cuda_.StreamDestroy(stream);
}

TEST_P(GpuPublishTest, AFailureOfTheOtherGpuIsSaidByTheCopyFromIt) {
  const CudaContext other = *CudaContext::Retain(cuda_, 1);
  const CudaIpcMemory source = *CudaIpcMemory::Allocate(other, 2 * kMiB);

  const auto weights = AttachOrPublish([&](Publisher& publisher) {
    EXPECT_TRUE(publisher.Allocate(Described("first", DataType::kU8, {1})).ok());  // of a slab that has room for both
    cuda_.Fail("cuCtxSynchronize", kCudaIllegalAddress);
    const Status added =
        publisher.Add(Described("w", DataType::kU8, {2 * kMiB}), reinterpret_cast<const void*>(source.address()));
    cuda_.StopFailing("cuCtxSynchronize");
    EXPECT_EQ(added.reason(), "CUDA_ERROR");
    EXPECT_EQ(cuda_.CallCount("cuMemcpyDtoDAsync"), 0);
    return added;
  });

  EXPECT_FALSE(weights.ok());
  ExpectOnly(2 * kMiB);
}

TEST_P(GpuPublishTest, MemoryThatIsAllocatedIsWrittenToWithoutACopy) {
  int64_t copied_bytes = -1;
  const auto weights = AttachOrPublish([&](Publisher& publisher) -> Status {
    for (int i = 0; i < 4; ++i) {  // more than one slab
      auto room = publisher.Allocate(Described("w" + std::to_string(i), DataType::kU8, {40 * kMiB}));
      if (!room.ok()) return room.status();
      memset(*room, i + 1, 4096);
    }
    copied_bytes = publisher.copied_bytes();
    return Status();
  });
  ASSERT_THAT(weights, IsOk());
  EXPECT_EQ(copied_bytes, 0);
  EXPECT_GT((*weights)->memory->slabs().size(), 1U);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(BytesOf(Find(**weights, "w" + std::to_string(i))).substr(0, 4097),
              std::string(4096, static_cast<char>(i + 1)) + std::string(1, '\0'));
  }
  EXPECT_THAT(Verify(**weights), IsOk());
}

TEST_P(GpuPublishTest, OfManyThatRaceOnePublishesAndAllHaveTheSame) {
  std::atomic<int> loads{0};
  std::vector<std::thread> racers;
  for (int i = 0; i < kRacers; ++i) {
    racers.emplace_back([&] {
      const auto weights = AttachOrPublish([&](Publisher& publisher) {
        const auto value = static_cast<int32_t>(++loads);
        return publisher.Add(Described("w", DataType::kI32, {1}), &value);
      });
      ASSERT_THAT(weights, IsOk());
      EXPECT_EQ(BytesOf(Find(**weights, "w")), std::string("\1\0\0\0", 4));
    });
  }
  for (std::thread& racer : racers) racer.join();
  EXPECT_EQ(loads, 1);
}

TEST_P(GpuPublishTest, APublisherThatFailsLeavesNothingAndTheNextPublishes) {
  Status failure;
  const auto failed = AttachOrPublish(
      [&](Publisher& publisher) {
        EXPECT_TRUE(publisher.Allocate(Described("w", DataType::kU8, {kMiB})).ok());
        EXPECT_GT(cuda_.used_bytes(), 0);
        return Status(StatusCode::kInternal, "MY_REASON", "my loader is broken");
      },
      OptionsFor(0), &failure);

  EXPECT_EQ(failure.reason(), "MY_REASON");
  EXPECT_THAT(failed.status(), StatusIs(Reason::kCancelled));
  ExpectNothingLeft();
  const char byte = 1;
  EXPECT_THAT(
      AttachOrPublish([&](Publisher& publisher) { return publisher.Add(Described("w", DataType::kU8, {1}), &byte); }),
      IsOk());
}

TEST_P(GpuPublishTest, MoreMemoryThanThereIsIsRefusedAndThePublicationGoesOn) {
  const char* const call = GetParam() == v1::HANDLE_KIND_CUDA_IPC ? "cuMemAlloc" : "cuMemCreate";
  const auto weights = AttachOrPublish([&](Publisher& publisher) {
    const auto more_than_nvml_says = publisher.Allocate(Described("huge", DataType::kU8, {int64_t{1} << 31}));
    EXPECT_EQ(more_than_nvml_says.status().reason(), "MEMORY_EXHAUSTED");
    cuda_.Fail(call, kCudaOutOfMemory);
    const auto more_than_the_driver_has = publisher.Allocate(Described("large", DataType::kU8, {kMiB}));
    EXPECT_EQ(more_than_the_driver_has.status().reason(), "MEMORY_EXHAUSTED");
    cuda_.StopFailing(call);
    EXPECT_EQ(Health().reserved_bytes(), 0);
    const char byte = 1;
    return publisher.Add(Described("w", DataType::kU8, {1}), &byte);
  });
  ASSERT_THAT(weights, IsOk());
  EXPECT_EQ((*weights)->manifest.tensors.size(), 1U);
}

TEST_P(GpuPublishTest, WhoeverPublishedIsSaidToBeAbleToWriteAndVerifyingFindsIt) {
  std::byte* published = nullptr;
  const auto weights = AttachOrPublish([&](Publisher& publisher) -> Status {
    auto room = publisher.Allocate(Described("w", DataType::kU8, {4096}));
    if (!room.ok()) return room.status();
    published = *room;
    memset(published, 1, 4096);
    return Status();
  });
  ASSERT_THAT(weights, IsOk());
  const v1::Shard shard = Health().weight_sets(0).shards(0);
  EXPECT_TRUE(shard.publisher_writable());
  EXPECT_EQ(shard.publisher_process_id(), getpid());
  EXPECT_THAT(Verify(**weights), IsOk());

  if (GetParam() == v1::HANDLE_KIND_CUDA_IPC) {
    published[17] = std::byte{2};  // the driver in host memory maps it where its maker has it
  } else {
    v1::ExportRequest request;
    request.set_fingerprint((*weights)->fingerprint);
    request.set_hold(true);
    testing::OpenExport open(*stub_, request);
    ASSERT_TRUE(open.ReadShard());
    const auto fds =
        client::RedeemTicket(socket_path_, open.header().ticket(), 1, client::DeadlineIn(std::chrono::seconds(10)));
    ASSERT_THAT(fds, IsOk());
    const CudaContext context = *CudaContext::Retain(cuda_, 0);
    const int64_t size_bytes = open.header().slabs(0).size_bytes();
    const auto memory = CudaVmmMemory::Import(context, (*fds)[0].get(), size_bytes);
    CudaReservation range = *CudaReservation::Reserve(context, size_bytes);
    ASSERT_THAT(range.Map(0, *memory, CudaAccess::kReadWrite), IsOk());
    reinterpret_cast<std::byte*>(range.address())[17] = std::byte{2};
  }

  EXPECT_THAT(Verify(**weights), AllOf(StatusIs(Reason::kDigestMismatch), HasMetadata("tensor", "w")));
}

TEST_P(GpuPublishTest, AnEngineOnAnotherGpuThanItsRankIsRefusedNamingBothAndLeavesNothing) {
  PublishOptions options = OptionsFor(0);
  options.attach.devices = {FakeGpuUuid(2)};
  options.expected_bytes = kMiB;
  EXPECT_THAT(AttachOrPublish([](Publisher&) { return Status(); }, options).status(),
              AllOf(StatusIs(Reason::kDeviceMismatch), HasMetadata("device_uuid", FakeGpuUuid(2)),
                    HasMetadata("wanted_uuid", FakeGpuUuid(1))));
  ExpectNothingLeft();
}

TEST_P(GpuPublishTest, AGpuThatTheServiceDoesNotHaveIsRefused) {
  broker_.reset();
  listener_.reset();
  StartWithGpus({FakeGpuUuid(2)});
  EXPECT_THAT(AttachOrPublish([](Publisher&) { return Status(); }).status(),
              StatusIs(Reason::kDeviceUnknown, HasSubstr(FakeGpuUuid(1))));
  broker_.reset();
  listener_.reset();
  StartWithGpus({});
  EXPECT_THAT(AttachOrPublish([](Publisher&) { return Status(); }).status(),
              AnyOf(StatusIs(Reason::kGpuUnavailable), StatusIs(Reason::kDeviceUnknown)));
}

TEST_P(GpuPublishTest, WhicheverCallOfTheDriverFailsNothingIsLeft) {
  for (const char* call : {"cuStreamCreate", "cuMemcpyHtoDAsync", "cuCtxSynchronize", "cuMemsetD8Async",
                           "cuModuleLoadData", "cuLaunchKernel"}) {
    cuda_.Fail(call, kCudaNotSupported);
    const char byte = 1;
    EXPECT_FALSE(AttachOrPublish([&](Publisher& publisher) {
                   return publisher.Add(Described("w", DataType::kU8, {1}), &byte);
                 }).ok())
        << call;
    cuda_.StopFailing(call);
    ExpectNothingLeft();
  }
}

TEST_P(GpuPublishTest, AReleasedSetGivesItsMemoryBack) {
  const char byte = 1;
  {
    const auto weights =
        AttachOrPublish([&](Publisher& publisher) { return publisher.Add(Described("w", DataType::kU8, {1}), &byte); });
    ASSERT_THAT(weights, IsOk());
    ASSERT_THAT(Unregister((*weights)->fingerprint, /*force=*/true), IsOk());
  }
  ExpectNothingLeft();
}

}  // namespace
}  // namespace weightbroker
