// The service on a node with GPUs: where Register puts a set, what Export hands out, what Health says. NVML and the
// loaders are scripted; everything between them is real.

#include <functional>
#include <thread>
#include <vector>

#include "tests/support/fake_gpu_events.h"
#include "tests/support/fake_gpu_inventory.h"
#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::AnyGpuFd;
using testing::Eventually;
using testing::FakeGpuInventory;
using testing::FakeLoader;
using testing::FakeLoaderSpawner;
using testing::HasMetadata;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOk;
using testing::LoadsWell;
using testing::OpenExport;
using testing::ServiceTest;
using ::testing::SizeIs;
using testing::StatusIs;

constexpr char kGpu[] = "GPU-00000001-0000-0000-0000-000000000000";

class GpuServiceTest : public ServiceTest {
 protected:
  ~GpuServiceTest() override { broker_.reset(); }  // before the catalog

  void StartWithGpu(FakeLoaderSpawner::Script script = LoadsWell(), int64_t free_bytes = int64_t{1} << 40) {
    const GpuInfo gpu = {.ordinal = 0,
                         .uuid = kGpu,
                         .name = "Fake GPU",
                         .compute_major = 9,
                         .compute_minor = 0,
                         .total_bytes = int64_t{1} << 40,
                         .free_bytes = free_bytes};
    auto inventory = std::make_unique<FakeGpuInventory>(std::vector<GpuInfo>{gpu});
    inventory->SetProcesses(kGpu, {{4711, int64_t{3} << 20}});
    inventory_ = inventory.get();
    auto shared = std::make_shared<std::unique_ptr<GpuInventory>>(std::move(inventory));
    catalog_ = std::make_unique<DeviceCatalog>(DeviceCatalogOptions{
        .open = [shared]() -> absl::StatusOr<std::unique_ptr<GpuInventory>> { return std::move(*shared); }});
    BrokerOptions options;
    options.devices = catalog_.get();
    options.check_gpu_fd = AnyGpuFd;
    if (trouble_ != nullptr) {
      options.open_gpu_events = [trouble = trouble_] { return std::make_unique<testing::FakeGpuEvents>(trouble); };
    }
    Start(std::move(script), std::move(options));
  }

  absl::StatusOr<v1::WeightSet> RegisterAs(std::vector<v1::HandleKind> kinds, const std::string& device = "") {
    v1::RegisterRequest request = RegisterRequestFor();
    for (const v1::HandleKind kind : kinds) request.add_handle_kinds(kind);
    if (!device.empty()) request.add_devices(device);
    return Register(request);
  }

  v1::ExportRequest ExportAs(std::vector<v1::HandleKind> kinds) const {
    v1::ExportRequest request = ExportRequestFor();
    for (const v1::HandleKind kind : kinds) request.add_handle_kinds(kind);
    return request;
  }

  // Makes `calls` at once, enough to take every thread of the service that they could block, and whether another call
  // is answered while the driver hangs under them.
  bool AnswersWhileTheDriverHangsUnder(const std::function<void()>& call) {
    constexpr int kCalls = 64;
    inventory_->Hang();
    std::vector<std::thread> callers;
    for (int i = 0; i < kCalls; ++i) callers.emplace_back(call);
    EXPECT_TRUE(Eventually([this] { return inventory_->waiting_count() > 0; }));
    bool answered = true;
    for (int i = 0; i < kCalls && answered; ++i) {  // the others may still be on their way
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
      v1::ListWeightSetsResponse response;
      answered = admin_->ListWeightSets(&context, {}, &response).ok();
    }
    inventory_->GoOn();
    for (std::thread& caller : callers) caller.join();
    return answered;
  }

  std::unique_ptr<DeviceCatalog> catalog_;
  testing::GpuTrouble* trouble_ = nullptr;  // what happens to the GPUs; nothing is watched without it
  FakeGpuInventory* inventory_ = nullptr;   // the catalog's
};

TEST_F(GpuServiceTest, RegisterTakesVmmMemoryOnAGpuUnlessTheCallerWantsOtherwise) {
  StartWithGpu();
  const auto set = Register();
  ASSERT_THAT(set, IsOk());
  EXPECT_EQ(set->shards(0).device(), kGpu);
  EXPECT_EQ(set->shards(0).handle_kind(), v1::HANDLE_KIND_CUDA_VMM_FD);
  EXPECT_EQ(set->shards(0).slabs(0).device_uuid(), kGpu);
}

TEST_F(GpuServiceTest, RegisterTakesTheFirstKindOfTheCallersListThatThereIs) {
  StartWithGpu();
  const auto set = RegisterAs({v1::HANDLE_KIND_CUDA_IPC, v1::HANDLE_KIND_CUDA_VMM_FD});
  ASSERT_THAT(set, IsOk());
  EXPECT_EQ(set->shards(0).handle_kind(), v1::HANDLE_KIND_CUDA_IPC);
}

TEST_F(GpuServiceTest, TheSameSpecOnTheHostIsAnotherSetBecauseTheDeviceIsPartOfTheFingerprint) {
  StartWithGpu();
  const auto on_gpu = Register();
  const auto on_host = RegisterAs({v1::HANDLE_KIND_HOST_MEMFD});
  ASSERT_THAT(on_host, IsOk());
  EXPECT_EQ(on_host->shards(0).device(), "host");
  EXPECT_NE(on_host->fingerprint(), on_gpu->fingerprint());
}

TEST_F(GpuServiceTest, ASetThatIsThereInAKindThatTheCallerCannotMapIsRefusedNamingBoth) {
  StartWithGpu();
  ASSERT_THAT(RegisterAs({v1::HANDLE_KIND_CUDA_IPC}), IsOk());
  EXPECT_THAT(RegisterAs({v1::HANDLE_KIND_CUDA_VMM_FD}),
              StatusIs(Reason::kHandleKindUnsupported, AllOf(HasSubstr("CUDA_IPC"), HasSubstr("CUDA_VMM_FD"))));
  EXPECT_THAT(OpenExport(*stub_, ExportAs({v1::HANDLE_KIND_CUDA_VMM_FD})).Finish(),
              AllOf(StatusIs(Reason::kHandleKindUnsupported, HasSubstr("CUDA_VMM_FD")),
                    HasMetadata("handle_kind", "CUDA_IPC")));
}

TEST_F(GpuServiceTest, ExportOfVmmMemoryGivesATicketAndNoIpcHandle) {
  StartWithGpu();
  ASSERT_THAT(Register(), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  EXPECT_EQ(open.header().device(), kGpu);
  EXPECT_THAT(open.header().ticket(), SizeIs(32));
  EXPECT_THAT(open.header().slabs(0).cuda_ipc_handle(), IsEmpty());
}

TEST_F(GpuServiceTest, ExportOfIpcMemoryGivesTheHandleInTheMessageAndNoTicket) {
  StartWithGpu();
  ASSERT_THAT(RegisterAs({v1::HANDLE_KIND_CUDA_IPC}), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  EXPECT_THAT(open.header().ticket(), IsEmpty());
  EXPECT_FALSE(open.header().has_ticket_expire_time());
  EXPECT_EQ(open.header().slabs(0).cuda_ipc_handle(), std::string(64, 'h'));
}

TEST_F(GpuServiceTest, ALookGivesNoIpcHandleAndNeitherDoesHealth) {
  StartWithGpu();
  ASSERT_THAT(RegisterAs({v1::HANDLE_KIND_CUDA_IPC}), IsOk());
  v1::ExportRequest request = ExportRequestFor();
  request.set_hold(false);
  OpenExport look(*stub_, request);
  ASSERT_TRUE(look.ReadShard());
  EXPECT_THAT(look.header().slabs(0).cuda_ipc_handle(), IsEmpty());
  EXPECT_THAT(Health().SerializeAsString(), ::testing::Not(HasSubstr("hhhhhhhh")));
}

TEST_F(GpuServiceTest, ExportBySpecFindsTheSetWhereverItIsAndPrefersTheCallersKinds) {
  StartWithGpu();
  const auto on_host = RegisterAs({v1::HANDLE_KIND_HOST_MEMFD});
  {
    OpenExport open(*stub_, ExportRequestFor());
    ASSERT_TRUE(open.ReadShard());
    EXPECT_EQ(open.header().fingerprint(), on_host->fingerprint());
  }
  const auto on_gpu = RegisterAs({v1::HANDLE_KIND_CUDA_VMM_FD});
  OpenExport open(*stub_, ExportAs({v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_HOST_MEMFD}));
  ASSERT_TRUE(open.ReadShard());
  EXPECT_EQ(open.header().fingerprint(), on_gpu->fingerprint());
}

TEST_F(GpuServiceTest, AfterTheExportersDeathExportIsRefusedAndCountedAndUnregisterMakesRoom) {
  std::atomic<FakeLoader*> exporter{nullptr};
  StartWithGpu([&](FakeLoader& loader) {
    exporter = &loader;
    LoadsWell()(loader);
  });
  const auto set = RegisterAs({v1::HANDLE_KIND_CUDA_IPC});
  ASSERT_THAT(set, IsOk());
  exporter.load()->Shutdown();
  EXPECT_THAT(OpenExport(*stub_, ExportRequestFor()).Finish(), StatusIs(Reason::kExporterDead));
  EXPECT_THAT(Health().weight_sets(0).shards(0).export_refusal(), HasSubstr("has ended"));
  ASSERT_THAT(Unregister(set->fingerprint()), IsOk());
  ASSERT_THAT(RegisterAs({v1::HANDLE_KIND_CUDA_IPC}), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  EXPECT_TRUE(open.ReadShard());
}

TEST_F(GpuServiceTest, HealthListsTheGpusAndTheKindsThatTheyOffer) {
  StartWithGpu();
  const v1::HealthResponse health = Health();
  ASSERT_THAT(health.devices(), SizeIs(1));
  EXPECT_EQ(health.devices(0).uuid(), kGpu);
  EXPECT_EQ(health.devices(0).name(), "Fake GPU");
  EXPECT_EQ(health.devices(0).compute_capability(), "9.0");
  EXPECT_EQ(health.devices(0).total_bytes(), int64_t{1} << 40);
  EXPECT_EQ(health.driver_version(), "999.1");
  EXPECT_THAT(health.gpu_refusal(), IsEmpty());
  EXPECT_THAT(health.handle_kinds(), ::testing::ElementsAre(v1::HANDLE_KIND_CUDA_VMM_FD, v1::HANDLE_KIND_CUDA_IPC,
                                                            v1::HANDLE_KIND_HOST_MEMFD));
}

TEST_F(GpuServiceTest, WithoutAGpuHealthSaysWhyAndAGpuKindIsRefusedNamingWhatThereIs) {
  Start();
  EXPECT_THAT(Health().gpu_refusal(), HasSubstr("--devices=host"));
  EXPECT_THAT(Health().handle_kinds(), ::testing::ElementsAre(v1::HANDLE_KIND_HOST_MEMFD));
  EXPECT_THAT(
      RegisterAs({v1::HANDLE_KIND_CUDA_VMM_FD}),
      AllOf(StatusIs(Reason::kGpuUnavailable, HasSubstr("--devices=host")), HasMetadata("handle_kind", "HOST_MEMFD")));
}

TEST_F(GpuServiceTest, AnUnknownUuidIsRefusedListingTheDevices) {
  StartWithGpu();
  EXPECT_THAT(RegisterAs({}, "GPU-ffffffff-0000-0000-0000-000000000000"),
              AllOf(StatusIs(Reason::kDeviceUnknown), HasMetadata("devices", std::string(kGpu) + ", host")));
}

TEST_F(GpuServiceTest, AGpuThatIsFullIsSaidWithNeedHaveAndHolders) {
  StartWithGpu(LoadsWell(), /*free_bytes=*/1000);
  EXPECT_THAT(Register(), AllOf(StatusIs(Reason::kMemoryExhausted, AllOf(HasSubstr(kGpu), HasSubstr("pid 4711"))),
                                HasMetadata("have_bytes", "1000"), HasMetadata("limited_by", "device"),
                                HasMetadata("holders", "pid 4711 (3 MiB)")));
}

TEST_F(GpuServiceTest, ADriverThatHangsUnderHealthHoldsUpNoOtherCall) {
  StartWithGpu();
  EXPECT_TRUE(AnswersWhileTheDriverHangsUnder([this] { EXPECT_EQ(Health().devices_size(), 1); }));
}

TEST_F(GpuServiceTest, ADriverThatHangsUnderAllocateSlabsHoldsUpNoOtherCall) {
  StartWithGpu([](FakeLoader& loader) {
    while (loader.NextCommand().has_value()) {
      internal::v1::LoadEvent event;
      event.mutable_allocated();
      loader.SendRaw(event.SerializeAsString());
    }
  });
  v1::RegisterRequest offer = RegisterRequestFor();
  offer.mutable_spec()->set_layout("engine");
  offer.mutable_spec()->set_engine("engine");
  offer.mutable_spec()->set_engine_version("1");
  offer.mutable_publish();
  grpc::ClientContext context;
  const auto stream = stub_->Register(&context, offer);
  v1::RegisterResponse granted;
  while (!granted.has_publish_grant()) ASSERT_TRUE(stream->Read(&granted)) << stream->Finish().error_message();
  v1::AllocateSlabsRequest request;
  request.set_publication_token(granted.publish_grant().publication_token());

  EXPECT_TRUE(AnswersWhileTheDriverHangsUnder([&] {
    grpc::ClientContext call_context;
    v1::AllocateSlabsResponse response;
    (void)stub_->AllocateSlabs(&call_context, request, &response);  // one at a time is granted, others refused
  }));

  context.TryCancel();
  (void)stream->Finish();
}

TEST_F(GpuServiceTest, FingerprintIsThatOfTheResidentSetOrOfTheDevicesThatAreNamed) {
  StartWithGpu();
  const auto on_host = RegisterAs({v1::HANDLE_KIND_HOST_MEMFD});
  v1::FingerprintRequest request;
  *request.mutable_spec() = RegisterRequestFor().spec();
  *request.mutable_environment() = RegisterRequestFor().environment();
  const auto ask = [&] {
    grpc::ClientContext context;
    v1::FingerprintResponse response;
    EXPECT_TRUE(stub_->Fingerprint(&context, request, &response).ok());
    return response;
  };
  EXPECT_EQ(ask().fingerprint(), on_host->fingerprint());
  EXPECT_TRUE(ask().resident());
  request.add_devices(kGpu);
  const v1::FingerprintResponse on_gpu = ask();
  EXPECT_FALSE(on_gpu.resident());
  const auto field = std::find_if(on_gpu.components().begin(), on_gpu.components().end(),
                                  [](const auto& c) { return c.field() == "device.compute_capability"; });
  ASSERT_NE(field, on_gpu.components().end());
  EXPECT_EQ(field->value(), "9.0");
  EXPECT_EQ(on_gpu.fingerprint(), Register()->fingerprint());
}

TEST_F(GpuServiceTest, AFaultOfItsGpuPutsASetInQuarantineAndLeavesThoseElsewhereAlone) {
  testing::GpuTrouble trouble;
  trouble_ = &trouble;
  StartWithGpu();
  ASSERT_THAT(RegisterAs({v1::HANDLE_KIND_CUDA_VMM_FD}), IsOk());
  ASSERT_THAT(RegisterAs({v1::HANDLE_KIND_HOST_MEMFD}), IsOk());

  trouble.Happen({.uuid = "GPU-another", .xid = 79});
  trouble.Happen({.uuid = kGpu, .xid = 79});

  EXPECT_TRUE(Eventually([this] { return Health().status() == v1::HealthResponse::STATUS_QUARANTINED; }));
  OpenExport on_gpu(*stub_, ExportAs({v1::HANDLE_KIND_CUDA_VMM_FD}));
  EXPECT_THAT(on_gpu.Finish(), StatusIs(Reason::kQuarantined, HasSubstr("XID 79")));
  OpenExport on_host(*stub_, ExportAs({v1::HANDLE_KIND_HOST_MEMFD}));
  EXPECT_TRUE(on_host.ReadShard());
  broker_.reset();  // before the trouble
}

}  // namespace
}  // namespace weightbroker
