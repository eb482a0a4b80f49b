// Attaching an engine that computes on a GPU, with a driver in host memory and a service that does as it is told.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "client/src/attach.h"
#include "common/base/error.h"
#include "common/memory/cuda_slab.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/client/fake_service.h"

namespace weightbroker::client {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::FakeCudaDriver;
using ::weightbroker::testing::FakeGpu;
using ::weightbroker::testing::FakeGpuUuid;
using ::weightbroker::testing::FakeService;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ExportCall = FakeService::ExportCall;

constexpr int64_t kSlabBytes = FakeCudaDriver::kGranularityBytes;

class GpuAttachTest : public ::testing::Test {
 protected:
  GpuAttachTest() : range_(*CudaReservation::Reserve(context_, kSlabBytes)) {
    auto memory = CudaVmmMemory::Create(context_, kSlabBytes);
    EXPECT_THAT(range_.Map(0, *memory, CudaAccess::kReadWrite), IsOk());
    const std::string contents = FakeService::SlabContents();
    memcpy(reinterpret_cast<void*>(range_.address()), contents.data(), contents.size());
    service_.ReplaceSlab(*memory->Export(), kSlabBytes);
    service_.on_export = [this](ExportCall& call) {
      request_ = call.request();
      call.Send([this](v1::ExportHeader& header) { Describe(&header); });
      return call.Hold();
    };
    services_ = *Services::Open({.socket_path = service_.socket_path()});
  }

  void Describe(v1::ExportHeader* header) const {
    header->set_device(FakeGpuUuid(1));
    header->mutable_slabs(0)->set_handle_kind(kind_);
    header->mutable_slabs(0)->set_device_uuid(FakeGpuUuid(1));
    header->mutable_slabs(0)->set_cuda_ipc_handle(ipc_handle_);
    if (kind_ == v1::HANDLE_KIND_CUDA_IPC) header->clear_ticket();
  }

  absl::StatusOr<std::unique_ptr<WeightsState>> Attach(int cuda_device, const AttachOptions& options = {}) {
    v1::WeightSpec spec;
    spec.set_model("/models/tiny");
    v1::Environment environment;
    environment.set_torch_version("any");
    return AttachToService(*services_, spec, environment, *FindEngineDevice(cuda_, cuda_device), options);
  }

  FakeCudaDriver cuda_{{FakeGpu{.uuid = FakeGpuUuid(2)}, FakeGpu{.uuid = FakeGpuUuid(1)}}};
  CudaContext context_ = *CudaContext::Retain(cuda_, 1);
  CudaReservation range_;
  FakeService service_;
  std::shared_ptr<Services> services_;
  v1::HandleKind kind_ = v1::HANDLE_KIND_CUDA_VMM_FD;
  std::string ipc_handle_;
  v1::ExportRequest request_;
};

TEST_F(GpuAttachTest, GivesTensorsAddressesOfTheGpuThatHoldsThem) {
  const auto weights = Attach(/*cuda_device=*/1);

  ASSERT_THAT(weights, IsOk());
  const Tensor* b = FindTensor((*weights)->manifest.tensors, "b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->data, (*weights)->memory->slabs()[0].data + 256);
  EXPECT_EQ(b->data[99], std::byte{'b'});
  EXPECT_EQ((*weights)->memory->device().ordinal, 1);
  EXPECT_THAT((*weights)->memory->Verify((*weights)->manifest.tensors, 1), IsOk());
  EXPECT_GT((*weights)->times.mapped_seconds, 0);
  EXPECT_THAT(request_.handle_kinds(), ElementsAre(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC));
}

TEST_F(GpuAttachTest, AsksForTheKindsThatTheEngineWants) {
  AttachOptions options;
  options.handle_kinds = {HandleKind::kCudaIpc};

  static_cast<void>(Attach(1, options));

  EXPECT_THAT(request_.handle_kinds(), ElementsAre(v1::HANDLE_KIND_CUDA_IPC));
}

TEST_F(GpuAttachTest, RefusesWeightsOnAnotherGpuThanTheEnginesNamingBoth) {
  EXPECT_THAT(Attach(/*cuda_device=*/0),
              AllOf(StatusIs(Reason::kDeviceMismatch, HasSubstr("cuda:1 here")),
                    HasMetadata("device_uuid", FakeGpuUuid(1)), HasMetadata("wanted_uuid", FakeGpuUuid(2))));
}

TEST_F(GpuAttachTest, BelievesTheMemoryAndNotTheServiceAboutWhereItIs) {
  service_.on_export = [&](ExportCall& call) {
    call.Send([&](v1::ExportHeader& header) {
      Describe(&header);
      header.set_device(FakeGpuUuid(2));
    });
    return call.Hold();
  };

  EXPECT_THAT(Attach(/*cuda_device=*/0),
              AllOf(StatusIs(Reason::kDeviceMismatch), HasMetadata("device_uuid", FakeGpuUuid(1))));
}

TEST_F(GpuAttachTest, RedeemsItsTicketBeforeItTakesTheTimeThatAContextTakes) {
  const int before = cuda_.CallCount("cuDevicePrimaryCtxRetain");
  service_.on_export = [&](ExportCall& call) {
    call.Send([&](v1::ExportHeader& header) {
      Describe(&header);
      header.set_ticket(std::string(32, 'x'));  // another broker's
    });
    return call.Hold();
  };

  EXPECT_THAT(Attach(1), StatusIs(Reason::kTicketInvalid));
  EXPECT_EQ(cuda_.CallCount("cuDevicePrimaryCtxRetain"), before);
}

TEST_F(GpuAttachTest, OpensCudaIpcHandlesFromTheMessageWithoutATicket) {
  auto allocated = CudaIpcMemory::Allocate(context_, kSlabBytes);
  const std::string contents = FakeService::SlabContents();
  memcpy(reinterpret_cast<void*>(allocated->address()), contents.data(), contents.size());
  const CudaIpcHandle handle = *allocated->Export();
  ipc_handle_.assign(reinterpret_cast<const char*>(handle.data()), handle.size());
  kind_ = v1::HANDLE_KIND_CUDA_IPC;

  const auto weights = Attach(1);

  ASSERT_THAT(weights, IsOk());
  EXPECT_THAT((*weights)->memory->Verify((*weights)->manifest.tensors, 1), IsOk());
}

TEST_F(GpuAttachTest, SaysThatTheExporterOfACudaIpcHandleHasGone) {
  kind_ = v1::HANDLE_KIND_CUDA_IPC;
  ipc_handle_.assign(64, '\7');

  EXPECT_THAT(Attach(1), StatusIs(Reason::kHandleStale));
}

TEST_F(GpuAttachTest, TrustsNoHandleOfAnotherLengthAndNoMixedKinds) {
  kind_ = v1::HANDLE_KIND_CUDA_IPC;
  ipc_handle_ = "short";
  EXPECT_THAT(Attach(1), StatusIs(Reason::kProtocolError, HasSubstr("5 bytes")));

  kind_ = v1::HANDLE_KIND_HOST_MEMFD;
  EXPECT_THAT(Attach(1), StatusIs(Reason::kProtocolError, HasSubstr("HANDLE_KIND_HOST_MEMFD")));
}

TEST_F(GpuAttachTest, LeavesNothingOnTheGpuWhereTheManifestIsWrong) {
  const int before = cuda_.live_objects();
  service_.on_export = [&](ExportCall& call) {
    call.Send([&](v1::ExportHeader& header) { Describe(&header); },
              [](v1::ManifestChunk& manifest) { manifest.mutable_tensors(0)->clear_name(); });
    return call.Hold();
  };

  EXPECT_THAT(Attach(1), StatusIs(Reason::kProtocolError));

  EXPECT_EQ(cuda_.live_objects(), before) << cuda_.DescribeLive();
}

TEST_F(GpuAttachTest, GivesEverythingBackWithTheWeights) {
  const int before = cuda_.live_objects();

  Attach(1).value().reset();

  EXPECT_EQ(cuda_.live_objects(), before) << cuda_.DescribeLive();
}

TEST_F(GpuAttachTest, RegistersOnTheEnginesOwnGpu) {
  v1::RegisterRequest registered;
  service_.on_export = [&](ExportCall& call) {
    if (registered.devices().empty()) {
      const absl::Status missing = MakeError(Reason::kNotResident, "not yet");
      return grpc::Status(static_cast<grpc::StatusCode>(missing.code()), "not yet", SerializeRpcStatus(missing));
    }
    call.Send([this](v1::ExportHeader& header) { Describe(&header); });
    return call.Hold();
  };
  service_.on_register = [&](const v1::RegisterRequest& request, grpc::ServerWriter<v1::RegisterResponse>& writer) {
    registered = request;
    v1::RegisterResponse response;
    response.mutable_weight_set()->set_fingerprint(service_.fingerprint());
    writer.Write(response);
    return grpc::Status::OK;
  };
  AttachOptions options;
  options.register_if_missing = true;

  EXPECT_THAT(Attach(1, options), IsOk());

  EXPECT_THAT(registered.devices(), ElementsAre(FakeGpuUuid(1)));
  EXPECT_THAT(registered.handle_kinds(), ElementsAre(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC));
  EXPECT_TRUE(registered.ranks().empty());
}

}  // namespace
}  // namespace weightbroker::client
