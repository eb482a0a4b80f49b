#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "common/base/error.h"
#include "common/base/unique_fd.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/thread_limit.h"
#include "tests/unit/client/fake_service.h"
#include "weightbroker/client.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::FakeService;
using ::weightbroker::testing::ThreadLimit;
using ::weightbroker::testing::ToGrpc;
using ExportCall = FakeService::ExportCall;

Client Connect(const FakeService& service) {
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = service.socket_path();
  return *Client::Create(options);
}

WeightSpec Spec() {
  WeightSpec spec;
  spec.model = "/models/tiny";
  return spec;
}

AttachOptions NoFallback() {
  AttachOptions options;
  options.fallback = Fallback::kFail;
  return options;
}

// Whether `condition` becomes true within a generous time.
bool Eventually(const std::function<bool()>& condition) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

TEST(Attach, GivesTensorsThatLieInTheServicesMemory) {
  FakeService service;
  const Client client = Connect(service);

  const auto weights = client.Attach(Spec(), NoFallback());

  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(weights->source().kind, SourceKind::kAttached);
  EXPECT_TRUE(weights->source().why_not_attached.ok());
  EXPECT_EQ(weights->fingerprint(), service.fingerprint());
  EXPECT_EQ(weights->generation(), 7);
  EXPECT_EQ(weights->total_bytes(), 124);
  EXPECT_EQ(weights->Find("c"), nullptr);
  const Tensor* a = weights->Find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_THAT(a->shape, ElementsAre(4, 3));
  EXPECT_EQ(a->data[23], std::byte{'a'});
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_FALSE(weights->lease_lost());
}

TEST(Attach, AsksForWhatTheEngineWantsAndCanMap) {
  FakeService service;
  v1::ExportRequest asked;
  service.on_export = [&](ExportCall& call) {
    asked = call.request();
    return ToGrpc(MakeError(Reason::kNotResident, "enough seen"));
  };
  WeightSpec spec = Spec();
  spec.dtype = "BF16";
  AttachOptions options = NoFallback();
  options.rank = 3;

  static_cast<void>(Connect(service).Attach(spec, options));

  EXPECT_EQ(asked.spec().model(), "/models/tiny");
  EXPECT_EQ(asked.spec().dtype(), "BF16");
  EXPECT_EQ(asked.environment().torch_version(), "any");
  EXPECT_EQ(asked.rank(), 3);
  EXPECT_TRUE(asked.hold());
  EXPECT_THAT(asked.handle_kinds(), ElementsAre(v1::HANDLE_KIND_HOST_MEMFD));
}

TEST(Attach, AsksForTheWeightSetWithAFingerprintAndRegistersNoOther) {
  FakeService service;
  v1::ExportRequest asked;
  service.on_export = [&](ExportCall& call) {
    asked = call.request();
    return ToGrpc(MakeError(Reason::kNotResident, "there is none"));
  };
  int registrations = 0;
  service.on_register = [&](const v1::RegisterRequest&, grpc::ServerWriter<v1::RegisterResponse>&) {
    ++registrations;
    return grpc::Status::OK;
  };
  AttachOptions options = NoFallback();
  options.fingerprint = service.fingerprint();
  options.register_if_missing = true;

  const auto weights = Connect(service).Attach(Spec(), options);

  EXPECT_EQ(weights.status().reason(), "NOT_RESIDENT");
  EXPECT_EQ(asked.fingerprint(), service.fingerprint());
  EXPECT_FALSE(asked.has_spec());
  EXPECT_EQ(registrations, 0);
}

TEST(Attach, HoldsTheLeaseUntilTheWeightsAreDestroyed) {
  FakeService service;
  {
    auto weights = Connect(service).Attach(Spec(), NoFallback());  // the client has gone, the lease has not
    ASSERT_TRUE(weights.ok());
    const MappedWeights moved = *std::move(weights);
    EXPECT_EQ(service.open_exports(), 1);
    EXPECT_FALSE(moved.lease_lost());
  }
  EXPECT_TRUE(Eventually([&] { return service.open_exports() == 0; }));
}

TEST(Attach, KeepsTheMemoryWhenTheLeaseIsLostAndSaysWhy) {
  FakeService service;
  service.on_export = [](ExportCall& call) {
    call.Send();
    return ToGrpc(MakeError(Reason::kDraining, "unregistered by force"));
  };
  const auto weights = Connect(service).Attach(Spec(), NoFallback());
  ASSERT_TRUE(weights.ok());

  EXPECT_TRUE(Eventually([&] { return weights->lease_lost(); }));
  EXPECT_EQ(weights->lease_status().reason(), "DRAINING");
  EXPECT_THAT(weights->lease_status().message(), HasSubstr("unregistered by force"));
  EXPECT_TRUE(weights->Verify().ok());
}

TEST(Attach, TellsThatTheServiceDrainsWhileTheLeaseIsStillHeld) {
  FakeService service;
  service.on_export = [](ExportCall& call) {
    call.Send();
    call.SendEvent("shutting down");
    return call.Hold();
  };
  const auto weights = Connect(service).Attach(Spec(), NoFallback());
  ASSERT_TRUE(weights.ok());

  EXPECT_TRUE(Eventually([&] { return weights->lease_status().reason() == "DRAINING"; }));
  EXPECT_FALSE(weights->lease_lost());
}

TEST(Attach, RemembersWhyTheServiceDrainedOnceTheLeaseIsLost) {
  FakeService service;
  service.on_export = [](ExportCall& call) {
    call.Send();
    call.SendEvent("unregistered by force");
    return grpc::Status::OK;
  };
  const auto weights = Connect(service).Attach(Spec(), NoFallback());
  ASSERT_TRUE(weights.ok());

  EXPECT_TRUE(Eventually([&] { return weights->lease_lost(); }));
  EXPECT_THAT(weights->lease_status().message(), HasSubstr("unregistered by force"));
}

TEST(Attach, TriesACallOnceMoreWhenTheConnectionBreaksUnderIt) {
  FakeService service;
  service.on_export = [&](ExportCall& call) {
    if (service.export_count() == 1) return call.BreakConnection();
    call.Send();
    return call.Hold();
  };

  const auto weights = Connect(service).Attach(Spec(), NoFallback());

  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(service.export_count(), 2);
}

TEST(Attach, EndsNoMoreThanFiveServicesWithTheSameCall) {
  FakeService service;
  service.on_export = [](ExportCall& call) { return call.BreakConnection(); };

  const auto weights = Connect(service).Attach(Spec(), NoFallback());

  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().reason(), "SERVICE_UNAVAILABLE");
  EXPECT_EQ(service.export_count(), 5);
}

TEST(Attach, IsMadeAnewWhenItsTicketDiedWithTheBrokerThatGaveIt) {
  FakeService service;
  service.on_export = [&](ExportCall& call) {
    const bool first = service.export_count() == 1;
    call.Send([first](v1::ExportHeader& header) {
      if (first) header.set_ticket(std::string(32, 'x'));
    });
    return call.Hold();
  };

  const auto weights = Connect(service).Attach(Spec(), NoFallback());

  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(service.export_count(), 2);
  EXPECT_TRUE(Eventually([&] { return service.open_exports() == 1; })) << "the first one's lease has ended";
}

TEST(Attach, OutwaitsAServiceThatIsShuttingDown) {
  FakeService service;
  service.on_export = [&](ExportCall& call) {
    if (service.export_count() <= 8) return ToGrpc(MakeError(Reason::kDraining, "going down"));
    call.Send();
    return call.Hold();
  };

  const auto weights = Connect(service).Attach(Spec(), NoFallback());

  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
}

TEST(Attach, WaitsUntilItsDeadlineForAServiceThatHasLeftItsSocketBehind) {
  const weightbroker::testing::TemporaryFolder folder;
  const std::string path = folder / "socket";
  {
    const UniqueFd left(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(bind(left.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }
  ClientOptions client_options;
  client_options.mode = Mode::kClient;
  client_options.torch_version = "any";
  client_options.socket_path = path;
  AttachOptions options = NoFallback();
  options.deadline = milliseconds(300);
  const auto start = std::chrono::steady_clock::now();

  const auto weights = Client::Create(client_options)->Attach(Spec(), options);

  EXPECT_EQ(weights.status().reason(), "SERVICE_UNAVAILABLE");
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(300));
}

TEST(Attach, FailsWithoutEndingTheProcessWhereNoThreadIsToBeHad) {
  FakeService service;
  const Client client = Connect(service);
  ASSERT_TRUE(client.Attach(Spec(), NoFallback()).ok());  // gRPC has its threads from here on
  const ThreadLimit limit(0);

  const auto weights = client.Attach(Spec(), NoFallback());

  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().reason(), "SYSTEM_ERROR");
  EXPECT_THAT(weights.status().message(), HasSubstr("thread"));
}

TEST(Attach, GivesTheServicesReasonAndMetadata) {
  FakeService service;
  service.on_export = [](ExportCall&) {
    return ToGrpc(MakeError(Reason::kFingerprintMismatch, "two fields differ", {{"spec.dtype", "BF16, resident F16"}}));
  };

  const auto weights = Connect(service).Attach(Spec(), NoFallback());

  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(weights.status().reason(), "FINGERPRINT_MISMATCH");
  EXPECT_EQ(weights.status().metadata().at("spec.dtype"), "BF16, resident F16");
}

TEST(Attach, GivesUpAtItsDeadlineAndLetsTheCallGo) {
  FakeService service;
  service.on_export = [](ExportCall& call) { return call.Hold(); };
  AttachOptions options = NoFallback();
  options.deadline = milliseconds(100);

  const auto start = std::chrono::steady_clock::now();
  const auto weights = Connect(service).Attach(Spec(), options);

  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().reason(), "DEADLINE_EXCEEDED");
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(100));
  EXPECT_TRUE(Eventually([&] { return service.open_exports() == 0; }));
}

TEST(Attach, FailsAtOnceWhereNoServiceIs) {
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = "/tmp/no_such_folder_here/socket";
  const Result<Client> client = Client::Create(options);
  ASSERT_TRUE(client.ok());

  const auto weights = client->Attach(Spec(), NoFallback());

  ASSERT_FALSE(weights.ok());
  EXPECT_EQ(weights.status().reason(), "SERVICE_UNAVAILABLE");
  EXPECT_EQ(weights.status().metadata().at("socket"), "/tmp/no_such_folder_here/socket");
  EXPECT_EQ(client->WaitUntilConnected(milliseconds(20)).reason(), "SERVICE_UNAVAILABLE");
}

TEST(Attach, RegistersWhatIsMissingShowingProgressAndThenAttaches) {
  FakeService service;
  service.on_export = [&](ExportCall& call) {
    if (call.request().has_spec()) return ToGrpc(MakeError(Reason::kNotResident, "not there"));
    EXPECT_EQ(call.request().fingerprint(), service.fingerprint());
    call.Send();
    return call.Hold();
  };
  service.on_register = [&](const v1::RegisterRequest& request, grpc::ServerWriter<v1::RegisterResponse>& writer) {
    EXPECT_TRUE(request.wait());
    v1::RegisterResponse response;
    response.mutable_progress()->set_phase(v1::WEIGHT_SET_STATE_LOADING);
    response.mutable_progress()->set_done_bytes(5);
    response.mutable_progress()->set_total_bytes(10);
    writer.Write(response);
    response.mutable_weight_set()->set_fingerprint(service.fingerprint());
    writer.Write(response);
    return grpc::Status::OK;
  };
  std::vector<LoadProgress> seen;
  AttachOptions options = NoFallback();
  options.register_if_missing = true;
  options.on_progress = [&](const LoadProgress& progress) { seen.push_back(progress); };

  const auto weights = Connect(service).Attach(Spec(), options);

  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].phase, "LOADING");
  EXPECT_EQ(seen[0].done_bytes, 5);
}

// What a service sends that is broken, hostile or of another version; the library must say so and map nothing. One
// attach for each test: a hook cannot be changed while a call runs in it.
class HostileServiceTest : public ::testing::Test {
 protected:
  Status AttachTo(const std::function<void(v1::ExportHeader&)>& change_header,
                  const std::function<void(v1::ManifestChunk&)>& change_manifest = nullptr) {
    service_.on_export = [=](ExportCall& call) {
      call.Send(change_header, change_manifest);
      return call.Hold();
    };
    return Connect(service_).Attach(Spec(), NoFallback()).status();
  }

  FakeService service_;
};

TEST_F(HostileServiceTest, IsRefusedForASlabLongerThanItsMemory) {
  EXPECT_EQ(AttachTo([](v1::ExportHeader& header) { header.mutable_slabs(0)->set_size_bytes(1 << 20); }).reason(),
            "PROTOCOL_ERROR");
}

TEST_F(HostileServiceTest, IsRefusedForASlabOfUnknownKind) {
  EXPECT_EQ(AttachTo([](v1::ExportHeader& header) { header.mutable_slabs(0)->clear_handle_kind(); }).reason(),
            "PROTOCOL_ERROR");
}

TEST_F(HostileServiceTest, IsRefusedForASlabWithoutLength) {
  EXPECT_EQ(AttachTo([](v1::ExportHeader& header) { header.mutable_slabs(0)->set_size_bytes(-1); }).reason(),
            "PROTOCOL_ERROR");
}

TEST_F(HostileServiceTest, IsRefusedForMoreSlabsThanDescriptors) {
  EXPECT_EQ(AttachTo([](v1::ExportHeader& header) { *header.add_slabs() = header.slabs(0); }).reason(),
            "PROTOCOL_ERROR");
}

TEST_F(HostileServiceTest, IsRefusedForATicketThatItDoesNotHonour) {
  EXPECT_EQ(AttachTo([](v1::ExportHeader& header) { header.set_ticket(std::string(32, 'x')); }).reason(),
            "TICKET_INVALID");
}

TEST_F(HostileServiceTest, IsRefusedForATensorOutsideItsSlab) {
  const Status status =
      AttachTo(nullptr, [](v1::ManifestChunk& manifest) { manifest.mutable_tensors(1)->set_offset_bytes(1 << 20); });

  EXPECT_EQ(status.reason(), "PROTOCOL_ERROR");
  EXPECT_EQ(status.metadata().at("tensor"), "b");
}

TEST_F(HostileServiceTest, IsRefusedForAStreamThatEndsBeforeTheManifest) {
  service_.on_export = [](ExportCall& call) {
    call.Send([](v1::ExportHeader& header) { header.set_tensor_count(3); });
    return grpc::Status::OK;
  };

  EXPECT_EQ(Connect(service_).Attach(Spec(), NoFallback()).status().reason(), "PROTOCOL_ERROR");
}

TEST_F(HostileServiceTest, IsFoundOutByVerify) {
  service_.on_export = [](ExportCall& call) {
    call.Send(nullptr,
              [](v1::ManifestChunk& manifest) { manifest.mutable_tensors(1)->set_digest(std::string(16, 'x')); });
    return call.Hold();
  };
  const auto weights = Connect(service_).Attach(Spec(), NoFallback());
  ASSERT_TRUE(weights.ok());

  const Status status = weights->Verify();

  EXPECT_EQ(status.reason(), "DIGEST_MISMATCH");
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_EQ(status.metadata().at("tensor"), "b");
}

}  // namespace
}  // namespace weightbroker
