// A real broker behind a real Unix socket, spoken to through the generated stub; only the loaders are scripted.
#pragma once

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "grpc/health/v1/health.grpc.pb.h"
#include "server/broker/broker.h"
#include "server/endpoint/listener.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/broker/fake_loader.h"
#include "weightbroker/v1/weight_broker_admin_service.grpc.pb.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace weightbroker::testing {

// The status that the service sent, with its details.
inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  if (!status.error_details().empty()) return ParseRpcStatus(status.error_details());
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// Calls `done` until it says true; false after ten seconds.
template <typename Condition>
bool Eventually(Condition done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!done()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline v1::WeightSpec SpecOf(const std::string& model) {
  v1::WeightSpec spec;
  spec.set_model(model);
  return spec;
}

inline v1::Environment TorchVersion(const std::string& version) {
  v1::Environment environment;
  environment.set_torch_version(version);
  return environment;
}

// Keeps an Export stream open.
class OpenExport {
 public:
  OpenExport(v1::WeightBrokerService::Stub& stub, const v1::ExportRequest& request)
      : reader_(stub.Export(&context_, request)) {}
  ~OpenExport() {
    context_.TryCancel();
    if (!finished_) reader_->Finish();
  }

  // Header and manifest, or false if the stream ended before.
  bool ReadShard() {
    v1::ExportResponse response;
    if (!reader_->Read(&response) || !response.has_header()) return false;
    header_ = response.header();
    while (static_cast<int64_t>(tensors_.size()) < header_.tensor_count()) {
      if (!reader_->Read(&response) || !response.has_manifest()) return false;
      ++chunk_count_;
      tensors_.insert(tensors_.end(), response.manifest().tensors().begin(), response.manifest().tensors().end());
    }
    return true;
  }

  // What comes next, or nothing if the stream has ended.
  std::optional<v1::ExportResponse> ReadNext() {
    v1::ExportResponse response;
    if (!reader_->Read(&response)) return std::nullopt;
    return response;
  }

  absl::Status Finish() {
    v1::ExportResponse response;
    while (reader_->Read(&response)) {
    }
    finished_ = true;
    return FromGrpc(reader_->Finish());
  }

  void Cancel() { context_.TryCancel(); }

  const v1::ExportHeader& header() const { return header_; }
  const std::vector<v1::Tensor>& tensors() const { return tensors_; }
  int chunk_count() const { return chunk_count_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::ExportResponse>> reader_;
  bool finished_ = false;
  v1::ExportHeader header_;
  std::vector<v1::Tensor> tensors_;
  int chunk_count_ = 0;
};

// GET /metrics, the body.
inline std::string Scrape(int port) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) return "";
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  if (write(socket.get(), request.data(), request.size()) < 0) return "";
  std::string response;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(socket.get(), buffer, sizeof(buffer))) > 0;)
    response.append(buffer, static_cast<size_t>(n));
  return response.substr(response.find("\r\n\r\n") + 4);
}

class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() : socket_path_(folder_ / "s.sock"), model_(folder_ / "models/m") {
    std::filesystem::create_directories(model_);
    CheckpointBuilder().Tensor("a", "BF16", {4, 4}).Write(model_);
  }

  ~ServiceTest() override {
    stub_.reset();
    channel_.reset();
    broker_.reset();
  }

  void Start(FakeLoaderSpawner::Script script = LoadsWell()) { Start(std::move(script), {}); }

  void Start(FakeLoaderSpawner::Script script, BrokerOptions options) {
    spawner_ = std::make_unique<FakeLoaderSpawner>(std::move(script));
    options.model_roots = {{"models", folder_ / "models"}};
    options.spawner = spawner_.get();
    options.version = "1.2.3";
    options.host_memory = [] { return HostMemory{int64_t{1} << 40, "machine"}; };
    options.shutdown_timeout = std::chrono::milliseconds(1000);
    listener_.emplace(Listener::Create({.path = socket_path_}).value());
    broker_ = Broker::Start(std::move(options), listener_->fd()).value();
    channel_ = grpc::CreateChannel("unix:" + socket_path_, grpc::InsecureChannelCredentials());
    stub_ = v1::WeightBrokerService::NewStub(channel_);
    admin_ = v1::WeightBrokerAdminService::NewStub(channel_);
    health_ = grpc::health::v1::Health::NewStub(channel_);
  }

  v1::RegisterRequest RegisterRequestFor(const std::string& model = "models:m") const {
    v1::RegisterRequest request;
    *request.mutable_spec() = SpecOf(model);
    *request.mutable_environment() = TorchVersion("2.11.0");
    request.set_wait(true);
    return request;
  }

  // Reads the stream to its end; the weight set that came last.
  absl::StatusOr<v1::WeightSet> Register(const v1::RegisterRequest& request,
                                         std::atomic<int>* progress_count = nullptr) {
    grpc::ClientContext context;
    const auto reader = stub_->Register(&context, request);
    v1::RegisterResponse response;
    v1::WeightSet set;
    while (reader->Read(&response)) {
      if (response.has_weight_set()) set = response.weight_set();
      if (response.has_progress() && progress_count != nullptr) ++*progress_count;
    }
    const absl::Status status = FromGrpc(reader->Finish());
    if (!status.ok()) return status;
    return set;
  }

  absl::StatusOr<v1::WeightSet> Register() { return Register(RegisterRequestFor()); }

  v1::ExportRequest ExportRequestFor(const std::string& torch_version = "2.11.0") const {
    v1::ExportRequest request;
    *request.mutable_spec() = SpecOf("models:m");
    *request.mutable_environment() = TorchVersion(torch_version);
    request.set_hold(true);
    return request;
  }

  v1::HealthResponse Health() {
    grpc::ClientContext context;
    v1::HealthResponse response;
    EXPECT_TRUE(stub_->Health(&context, {}, &response).ok());
    return response;
  }

  absl::StatusOr<v1::UnregisterResponse> Unregister(const std::string& fingerprint, bool force = false) {
    grpc::ClientContext context;
    v1::UnregisterRequest request;
    request.set_fingerprint(fingerprint);
    request.set_force(force);
    v1::UnregisterResponse response;
    const absl::Status status = FromGrpc(admin_->Unregister(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  const TemporaryFolder folder_;
  const std::string socket_path_;
  const std::string model_;
  std::optional<Listener> listener_;
  std::unique_ptr<FakeLoaderSpawner> spawner_;
  std::unique_ptr<Broker> broker_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::WeightBrokerService::Stub> stub_;
  std::unique_ptr<v1::WeightBrokerAdminService::Stub> admin_;
  std::unique_ptr<grpc::health::v1::Health::Stub> health_;
};

}  // namespace weightbroker::testing
