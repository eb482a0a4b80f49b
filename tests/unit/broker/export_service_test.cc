#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>

#include "client/include/weightbroker/redeem.h"
#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::Eventually;
using testing::FakeLoader;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::LoadsWell;
using testing::OpenExport;
using testing::ServiceTest;
using ::testing::SizeIs;
using testing::StatusIs;
using testing::TorchVersion;

class ExportServiceTest : public ServiceTest {
 protected:
  // Exchanges the header's ticket; the descriptors are in `fds`. Gives RedeemTicket's code.
  int Redeem(const v1::ExportHeader& header, std::vector<UniqueFd>* fds) const {
    int numbers[16];
    size_t count = 0;
    char error[kRedeemErrorBytes];
    const int code = RedeemTicket(socket_path_.c_str(), header.ticket().data(), header.ticket().size(), numbers, 16,
                                  &count, 2000, error, sizeof(error));
    for (size_t i = 0; i < count; ++i) fds->emplace_back(numbers[i]);
    return code;
  }

  static v1::ExportRequest RenewalOf(const v1::ExportHeader& header) {
    v1::ExportRequest request;
    request.set_fingerprint(header.fingerprint());
    request.set_hold(true);
    request.mutable_renewal()->set_generation(header.generation());
    *request.mutable_renewal()->mutable_resident_time() = header.resident_time();
    return request;
  }

  absl::Status FailureOf(const v1::ExportRequest& request) { return OpenExport(*stub_, request).Finish(); }
};

TEST_F(ExportServiceTest, SendsHeaderAndManifestThenStaysOpenAsTheLease) {
  Start(LoadsWell(5));
  const auto set = Register();
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  EXPECT_EQ(open.header().fingerprint(), set->fingerprint());
  EXPECT_EQ(open.header().generation(), 1);
  EXPECT_EQ(open.header().device(), "host");
  EXPECT_THAT(open.header().slabs(), SizeIs(1));
  EXPECT_THAT(open.header().ticket(), SizeIs(32));
  EXPECT_GT(open.header().lease_id(), 0);
  EXPECT_THAT(open.tensors(), SizeIs(5));
  EXPECT_EQ(Health().lease_count(), 1);
}

TEST_F(ExportServiceTest, SendsALargeManifestInMessagesThatABareStubTakes) {
  Start(LoadsWell(40'000));
  ASSERT_THAT(Register(), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  EXPECT_THAT(open.tensors(), SizeIs(40'000));
  EXPECT_GE(open.chunk_count(), 2);
}

TEST_F(ExportServiceTest, GivesATicketThatIsExchangedOnceForTheSlabs) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  std::vector<UniqueFd> fds;
  ASSERT_EQ(Redeem(open.header(), &fds), 0);
  ASSERT_THAT(fds, SizeIs(1));
  struct stat stat = {};
  ASSERT_EQ(fstat(fds[0].get(), &stat), 0);
  EXPECT_EQ(stat.st_size, open.header().slabs(0).size_bytes());
  EXPECT_NE(Redeem(open.header(), &fds), 0);
}

TEST_F(ExportServiceTest, DropsLeaseAndTicketWhenTheCallerLeaves) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  v1::ExportHeader header;
  {
    OpenExport open(*stub_, ExportRequestFor());
    ASSERT_TRUE(open.ReadShard());
    header = open.header();
  }
  EXPECT_TRUE(Eventually([&] { return Health().lease_count() == 0; }));
  std::vector<UniqueFd> fds;
  EXPECT_NE(Redeem(header, &fds), 0);
}

TEST_F(ExportServiceTest, DropsTheLeaseWhenTheConnectionGoes) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  auto own_channel = grpc::CreateCustomChannel("unix:" + socket_path_, grpc::InsecureChannelCredentials(), [] {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return arguments;
  }());
  auto own_stub = v1::WeightBrokerService::NewStub(own_channel);
  auto open = std::make_unique<OpenExport>(*own_stub, ExportRequestFor());
  ASSERT_TRUE(open->ReadShard());
  EXPECT_EQ(Health().lease_count(), 1);
  open.reset();
  own_stub.reset();
  own_channel.reset();
  EXPECT_TRUE(Eventually([&] { return Health().lease_count() == 0; }));
}

TEST_F(ExportServiceTest, WithoutHoldShowsTheShardAndEnds) {
  Start(LoadsWell(5));
  ASSERT_THAT(Register(), IsOk());
  v1::ExportRequest request = ExportRequestFor();
  request.set_hold(false);
  OpenExport open(*stub_, request);
  ASSERT_TRUE(open.ReadShard());
  EXPECT_THAT(open.Finish(), IsOk());
  EXPECT_EQ(open.header().ticket(), "");
  EXPECT_EQ(open.header().lease_id(), 0);
  EXPECT_EQ(open.header().generation(), 1);
  EXPECT_EQ(Health().lease_count(), 0);
}

TEST_F(ExportServiceTest, TakesAFingerprintInPlaceOfASpec) {
  Start();
  const auto set = Register();
  v1::ExportRequest request;
  request.set_fingerprint(set->fingerprint());
  request.set_hold(true);
  EXPECT_TRUE(OpenExport(*stub_, request).ReadShard());
  *request.mutable_environment() = TorchVersion("2.11.0");
  EXPECT_TRUE(OpenExport(*stub_, request).ReadShard());
}

TEST_F(ExportServiceTest, RenewsALeaseWithoutTicketAndManifest) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  v1::ExportRequest request;
  {
    OpenExport first(*stub_, ExportRequestFor());
    ASSERT_TRUE(first.ReadShard());
    request = RenewalOf(first.header());
  }

  grpc::ClientContext context;
  const auto renewed = stub_->Export(&context, request);
  v1::ExportResponse response;
  ASSERT_TRUE(renewed->Read(&response));

  EXPECT_EQ(response.header().generation(), 1);
  EXPECT_TRUE(response.header().ticket().empty());
  EXPECT_TRUE(Eventually([&] { return Health().lease_count() == 1; }));
  ASSERT_THAT(Unregister(response.header().fingerprint(), /*force=*/true), IsOk());
  ASSERT_TRUE(renewed->Read(&response)) << "no manifest, so that the next message is the event";
  EXPECT_EQ(response.event().kind(), v1::ExportEvent::KIND_DRAINING);
}

TEST_F(ExportServiceTest, RenewsNoLeaseOnOtherMemoryOfTheSameContents) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  v1::ExportRequest request;
  {
    OpenExport first(*stub_, ExportRequestFor());
    ASSERT_TRUE(first.ReadShard());
    request = RenewalOf(first.header());
  }
  v1::ExportRequest of_another_time = request;
  of_another_time.mutable_renewal()->mutable_resident_time()->set_nanos(1);
  EXPECT_THAT(FailureOf(of_another_time), StatusIs(Reason::kGenerationMismatch));

  ASSERT_THAT(Unregister(request.fingerprint(), /*force=*/true), IsOk());
  EXPECT_THAT(FailureOf(request), StatusIs(Reason::kNotResident));
  ASSERT_THAT(Register(), IsOk());

  EXPECT_THAT(FailureOf(request),
              AllOf(StatusIs(Reason::kGenerationMismatch, HasSubstr("generation 1")), HasMetadata("generation", "2")));
  EXPECT_EQ(Health().lease_count(), 0);
}

TEST_F(ExportServiceTest, TakesARenewalOnlyByFingerprintAndWithHold) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  v1::ExportRequest request = ExportRequestFor();
  request.mutable_renewal()->set_generation(1);
  EXPECT_THAT(FailureOf(request), StatusIs(Reason::kInvalidArgument, HasSubstr("by fingerprint")));
}

TEST_F(ExportServiceTest, ComparesTheEnvironmentOfAFingerprintIfOneIsGiven) {
  Start();
  const auto set = Register();
  v1::ExportRequest request;
  request.set_fingerprint(set->fingerprint());
  *request.mutable_environment() = TorchVersion("2.6.0");
  EXPECT_THAT(FailureOf(request), AllOf(StatusIs(Reason::kFingerprintMismatch, HasSubstr("2.6.0")),
                                        HasMetadata("environment.torch_version.resident", "2.11.0")));
}

TEST_F(ExportServiceTest, NamesEveryFieldThatDiffersWithBothValues) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  testing::CheckpointBuilder().Tensor("a", "BF16", {4, 8}).Write(model_);
  const absl::Status status = FailureOf(ExportRequestFor("2.6.0"));
  EXPECT_THAT(status, StatusIs(Reason::kFingerprintMismatch, AllOf(HasSubstr("environment.torch_version"),
                                                                   HasSubstr("model.safetensors.header_sha256"))));
  const auto metadata = GetErrorDetails(status).metadata;
  EXPECT_THAT(metadata.at("environment.torch_version.requested"), HasSubstr("2.6.0"));
  EXPECT_THAT(metadata.at("environment.torch_version.resident"), HasSubstr("2.11.0"));
  EXPECT_GE(std::stoi(metadata.at("difference_count")), 2);
}

TEST_F(ExportServiceTest, ExportsAgainOnceTheChangedModelIsRegistered) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  testing::CheckpointBuilder().Tensor("a", "BF16", {4, 8}).Write(model_);
  ASSERT_THAT(FailureOf(ExportRequestFor()), StatusIs(Reason::kFingerprintMismatch));
  ASSERT_THAT(Register(), IsOk());
  EXPECT_TRUE(OpenExport(*stub_, ExportRequestFor()).ReadShard());
}

TEST_F(ExportServiceTest, SaysThatNothingOfTheModelIsResident) {
  Start();
  EXPECT_THAT(FailureOf(ExportRequestFor()), StatusIs(Reason::kNotResident, HasSubstr("call Register")));
}

TEST_F(ExportServiceTest, SaysThatAFingerprintIsNotResident) {
  Start();
  v1::ExportRequest request;
  request.set_fingerprint("0123abcd");
  EXPECT_THAT(FailureOf(request), StatusIs(Reason::kNotResident, HasSubstr("0123abcd")));
}

TEST_F(ExportServiceTest, ChecksTheEnvironmentOfAFingerprintBeforeItLooksForTheSet) {
  Start();
  v1::ExportRequest request;
  request.set_fingerprint("0123abcd");
  request.mutable_environment();
  EXPECT_THAT(FailureOf(request), StatusIs(Reason::kEnvironmentRequired));
}

TEST_F(ExportServiceTest, KeepsTheReasonOfAnErrorThatQuotesACharacterItWouldHaveCut) {
  Start();
  v1::ExportRequest request;
  request.set_fingerprint(std::string(63, 'x') + "\xc3\xa9" + std::string(300, 'y'));
  const absl::Status status = FailureOf(request);
  EXPECT_THAT(status, StatusIs(Reason::kNotResident, HasSubstr("x\xc3\xa9yyy")));
  EXPECT_THAT(GetErrorDetails(status).metadata.at("fingerprint"), HasSubstr(" more bytes)"));
}

TEST_F(ExportServiceTest, NeedsATarget) {
  Start();
  EXPECT_THAT(FailureOf({}), StatusIs(Reason::kInvalidArgument, HasSubstr("a spec, a fingerprint or an alias")));
}

TEST_F(ExportServiceTest, SaysHowFarALoadUnderWayIs) {
  Start([](FakeLoader& loader) {
    if (loader.Plan(4096, 2)) loader.Progress(v1::WEIGHT_SET_STATE_LOADING, 100);
    loader.WaitForTheEnd();
  });
  v1::RegisterRequest request = RegisterRequestFor();
  request.set_wait(false);
  ASSERT_THAT(Register(request), IsOk());
  absl::Status status;
  EXPECT_TRUE(Eventually([&] {
    status = FailureOf(ExportRequestFor());
    return GetErrorDetails(status).metadata["done_bytes"] == "100";
  }));
  EXPECT_THAT(status, AllOf(StatusIs(Reason::kStillLoading), HasMetadata("total_bytes", "512")));
}

TEST_F(ExportServiceTest, RefusesRanksAndHandleKindsThatAreNotThere) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  v1::ExportRequest request = ExportRequestFor();
  request.set_rank(3);
  EXPECT_THAT(FailureOf(request), AllOf(StatusIs(Reason::kRankOutOfRange), HasMetadata("rank_count", "1")));
  request = ExportRequestFor();
  request.add_handle_kinds(static_cast<v1::HandleKind>(7));
  EXPECT_THAT(FailureOf(request),
              AllOf(StatusIs(Reason::kHandleKindUnsupported, HasSubstr("can map only 7")), HasMetadata("wanted", "7")));
}

TEST_F(ExportServiceTest, RefusesBytesThatAreNotARequest) {
  Start();
  // The raw method parses for itself, so a broken message must be refused there.
  grpc::ByteBuffer request;
  const grpc::Slice slice(std::string("\xff\xff\xff\xff"));
  request = grpc::ByteBuffer(&slice, 1);
  grpc::ClientContext context;
  grpc::internal::RpcMethod method("/weightbroker.v1.WeightBrokerService/Export",
                                   grpc::internal::RpcMethod::SERVER_STREAMING);
  std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> reader(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(channel_.get(), method, &context, request));
  EXPECT_THAT(testing::FromGrpc(reader->Finish()), StatusIs(Reason::kInvalidArgument));
}

// ---- Unregister.

TEST_F(ExportServiceTest, RefusesToUnregisterALeasedSet) {
  Start();
  const auto set = Register();
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  EXPECT_THAT(Unregister(set->fingerprint()), AllOf(StatusIs(Reason::kLeased), HasMetadata("lease_count", "1")));
}

TEST_F(ExportServiceTest, UnregisterByForceTellsTheHolderAndEndsTheStream) {
  Start();
  const auto set = Register();
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  const auto unregistered = Unregister(set->fingerprint().substr(0, 8), /*force=*/true);
  ASSERT_THAT(unregistered, IsOk());
  EXPECT_EQ(unregistered->ended_lease_count(), 1);
  EXPECT_EQ(unregistered->weight_set().state(), v1::WEIGHT_SET_STATE_RELEASED);
  const auto event = open.ReadNext();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event().kind(), v1::ExportEvent::KIND_DRAINING);
  EXPECT_THAT(open.Finish(), IsOk());
  std::vector<UniqueFd> fds;
  EXPECT_NE(Redeem(open.header(), &fds), 0);
}

TEST_F(ExportServiceTest, UnregisterFreesTheMemoryAndTheNextRegisterIsANewGeneration) {
  Start();
  const auto set = Register();
  EXPECT_GT(Health().reserved_bytes(), 0);
  ASSERT_THAT(Unregister(set->fingerprint()), IsOk());
  EXPECT_EQ(Health().reserved_bytes(), 0);
  EXPECT_EQ(Register()->generation(), 2);
}

TEST_F(ExportServiceTest, UnregisterByForceStopsALoadAndTellsThoseWhoWait) {
  Start([](FakeLoader& loader) {
    loader.Plan(4096, 2);
    loader.WaitForTheEnd();
  });
  grpc::ClientContext context;
  const auto reader = stub_->Register(&context, RegisterRequestFor());
  v1::RegisterResponse response;
  ASSERT_TRUE(reader->Read(&response));
  const std::string fingerprint = response.progress().fingerprint();
  EXPECT_THAT(Unregister(fingerprint), StatusIs(Reason::kStillLoading));
  EXPECT_THAT(Unregister(fingerprint, /*force=*/true), IsOk());
  while (reader->Read(&response)) {
  }
  EXPECT_THAT(testing::FromGrpc(reader->Finish()), StatusIs(Reason::kCancelled, HasSubstr("operator")));
  EXPECT_EQ(Health().reserved_bytes(), 0);
}

TEST_F(ExportServiceTest, UnregisterRefusesFingerprintsThatFitNothing) {
  Start();
  EXPECT_THAT(Unregister("01234567"), StatusIs(Reason::kWeightSetUnknown));
  EXPECT_THAT(Unregister("0123"), StatusIs(Reason::kInvalidArgument));
}

TEST_F(ExportServiceTest, ListsSetsWithTheirLeases) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  grpc::ClientContext context;
  v1::ListWeightSetsResponse response;
  ASSERT_TRUE(admin_->ListWeightSets(&context, {}, &response).ok());
  ASSERT_THAT(response.weight_sets(), SizeIs(1));
  EXPECT_EQ(response.weight_sets(0).shards(0).lease_count(), 1);
}

}  // namespace
}  // namespace weightbroker
