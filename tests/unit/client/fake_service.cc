#include "tests/unit/client/fake_service.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>
#include <utility>

#include "common/base/error.h"
#include "common/memory/digest.h"

namespace weightbroker::testing {
namespace {

// Test set-up that fails leaves nothing to test.
template <typename T>
T OrDie(absl::StatusOr<T> result) {
  if (!result.ok()) {
    fprintf(stderr, "%s\n", result.status().ToString().c_str());
    abort();
  }
  return *std::move(result);
}

v1::Tensor MakeRow(HostSlab& slab, const std::string& name, v1::DataType dtype, const std::vector<int64_t>& shape,
                   int64_t offset_bytes, int64_t size_bytes) {
  const auto bytes = slab.writable_bytes().subspan(static_cast<size_t>(offset_bytes), static_cast<size_t>(size_bytes));
  std::fill(bytes.begin(), bytes.end(), static_cast<std::byte>(name[0]));
  const Digest digest = ComputeDigest(bytes);
  v1::Tensor row;
  row.set_name(name);
  row.set_dtype(dtype);
  row.mutable_shape()->Add(shape.begin(), shape.end());
  row.set_offset_bytes(offset_bytes);
  row.set_size_bytes(size_bytes);
  row.set_digest(digest.data(), digest.size());
  return row;
}

std::string MakeFolder() {
  std::string folder = (std::filesystem::temp_directory_path() / "fake_service_XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) abort();
  return folder;
}

}  // namespace

FakeService::FakeService() : folder_(MakeFolder()) {
  HostSlab slab = OrDie(HostSlab::Create(4096));
  rows_ = {MakeRow(slab, "a", v1::DATA_TYPE_BF16, {4, 3}, 0, 24),
           MakeRow(slab, "b", v1::DATA_TYPE_U8, {100}, 256, 100)};
  SealedSlab sealed = OrDie(std::move(slab).Seal());
  slab_bytes_ = sealed.size_bytes;
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(sealed.fd));
  fds_ = std::make_shared<const std::vector<UniqueFd>>(std::move(fds));

  listener_ = OrDie(Listener::Create({.path = folder_ + "/socket"}));
  grpc::ServerBuilder builder;
  builder.RegisterService(static_cast<v1::WeightBrokerService::Service*>(this));
  builder.RegisterService(static_cast<v1::WeightBrokerAdminService::Service*>(this));
  server_ = builder.BuildAndStart();
  endpoint_ = std::make_unique<Endpoint>(
      EndpointOptions{.listen_fd = listener_->fd(), .server = server_.get(), .tickets = &tickets_, .peers = &peers_});
}

void FakeService::ReplaceSlab(UniqueFd fd, int64_t size_bytes) {
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(fd));
  fds_ = std::make_shared<const std::vector<UniqueFd>>(std::move(fds));
  slab_bytes_ = size_bytes;
}

std::string FakeService::SlabContents() {
  std::string contents(4096, '\0');
  contents.replace(0, 24, 24, 'a');
  contents.replace(256, 100, 100, 'b');
  return contents;
}

grpc::Status FakeService::Fingerprint(grpc::ServerContext* /*context*/, const v1::FingerprintRequest* request,
                                      v1::FingerprintResponse* response) {
  return on_fingerprint(*request, response);
}

FakeService::~FakeService() {
  endpoint_->Stop();
  server_->Shutdown(std::chrono::system_clock::now());
  endpoint_.reset();
  listener_.reset();
  std::filesystem::remove_all(folder_);
}

grpc::Status FakeService::Export(grpc::ServerContext* context, const v1::ExportRequest* request,
                                 grpc::ServerWriter<v1::ExportResponse>* writer) {
  ++open_exports_;
  ExportCall call(*this, *context, *request, *writer);
  const grpc::Status status = request->has_renewal() ? AnswerRenewal(call) : AnswerExport(call);
  --open_exports_;
  return status;
}

grpc::Status FakeService::AnswerExport(ExportCall& call) {
  ++export_count_;
  return on_export ? on_export(call) : (call.Send(), call.Hold());
}

grpc::Status FakeService::AnswerRenewal(ExportCall& call) {
  return on_renewal ? on_renewal(call) : ToGrpc(MakeError(Reason::kNotResident, "it has gone"));
}

grpc::Status FakeService::Unregister(grpc::ServerContext* context, const v1::UnregisterRequest* request,
                                     v1::UnregisterResponse* response) {
  unregistered = *request;
  return on_unregister(*context, *response);
}

grpc::Status FakeService::ListWeightSets(grpc::ServerContext* /*context*/, const v1::ListWeightSetsRequest* /*request*/,
                                         v1::ListWeightSetsResponse* response) {
  if (on_list) on_list(*response);
  return grpc::Status::OK;
}

grpc::Status FakeService::Register(grpc::ServerContext* /*context*/, const v1::RegisterRequest* request,
                                   grpc::ServerWriter<v1::RegisterResponse>* writer) {
  return on_register(*request, *writer);
}

void FakeService::ExportCall::Send(const std::function<void(v1::ExportHeader&)>& change_header,
                                   const std::function<void(v1::ManifestChunk&)>& change_manifest) {
  const Ticket ticket =
      service_.tickets_.Issue({.uid = geteuid(), .lease_id = 1, .fds = service_.fds_}, std::chrono::seconds(10));
  v1::ExportResponse response;
  v1::ExportHeader& header = *response.mutable_header();
  FillHeader(&header);
  header.set_ticket(ticket.data(), ticket.size());
  if (change_header) change_header(header);
  writer_.Write(response);

  v1::ManifestChunk& manifest = *response.mutable_manifest();
  for (const v1::Tensor& row : service_.rows_) *manifest.add_tensors() = row;
  if (change_manifest) change_manifest(manifest);
  writer_.Write(response);
}

void FakeService::ExportCall::SendRenewal(const std::function<void(v1::ExportHeader&)>& change_header) {
  v1::ExportResponse response;
  FillHeader(response.mutable_header());
  if (change_header) change_header(*response.mutable_header());
  writer_.Write(response);
}

void FakeService::ExportCall::FillHeader(v1::ExportHeader* header) const {
  header->set_fingerprint(service_.fingerprint());
  header->set_generation(7);
  header->mutable_resident_time()->set_seconds(1000);
  header->set_device("host");
  header->add_slabs()->set_size_bytes(service_.slab_bytes_);
  header->mutable_slabs(0)->set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
  header->set_tensor_count(static_cast<int64_t>(service_.rows_.size()));
}

void FakeService::ExportCall::SendEvent(const std::string& message) {
  v1::ExportResponse response;
  response.mutable_event()->set_kind(v1::ExportEvent::KIND_DRAINING);
  response.mutable_event()->set_message(message);
  writer_.Write(response);
}

grpc::Status FakeService::ExportCall::Hold() {
  while (!context_.IsCancelled()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return grpc::Status::CANCELLED;
}

grpc::Status FakeService::ExportCall::BreakConnection() { return BreakConnectionUnder(context_); }

grpc::Status BreakConnectionUnder(grpc::ServerContext& context) {
  int fd = -1;
  if (sscanf(context.peer().c_str(), "fd:%d", &fd) == 1) shutdown(fd, SHUT_RDWR);
  return grpc::Status::CANCELLED;
}

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message()), SerializeRpcStatus(status)};
}

}  // namespace weightbroker::testing
