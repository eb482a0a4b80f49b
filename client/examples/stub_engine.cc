// An inference engine's start-up with the generated stub and weightbroker/redeem.h, and nothing else of weightbroker:
// for engines in other languages to follow, and for those that want no library.
//
//   stub_engine --socket /run/weightbroker/weightbroker.sock --model /models/llama --torch_version any --register
//
// With --cuda_ipc the weights are in GPU memory, and redeem.h is not needed either: their handles are in the message.

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "client/examples/example_support.h"
#include "client/examples/gpu_memory.h"
#include "weightbroker/redeem.h"
#include "weightbroker/v1/weight_broker_service.grpc.pb.h"

namespace {

namespace v1 = ::weightbroker::v1;

// The sizes are the service's word: a memfd that is shorter, or that somebody could still shrink, would end this
// process with SIGBUS on a later read.
bool IsSafeToMap(int fd, int64_t size_bytes) {
  struct stat status {};
  const int seals = fcntl(fd, F_GET_SEALS);
  return fstat(fd, &status) == 0 && status.st_size >= size_bytes && seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

// Memory that a tensor may lie in, for as long as the object lives.
class Slab {
 public:
  virtual ~Slab() = default;
  virtual bool ok() const = 0;

  // Empty if the range does not lie in the slab.
  std::string_view Bytes(int64_t offset, int64_t size) const {
    if (offset < 0 || size <= 0 || size > size_ || offset > size_ - size) return {};
    return {static_cast<const char*>(data()) + offset, static_cast<size_t>(size)};
  }

 protected:
  explicit Slab(int64_t size_bytes) : size_(size_bytes) {}
  virtual const void* data() const = 0;

  const int64_t size_;
};

// Host memory, by a descriptor that a ticket was exchanged for.
class HostSlab : public Slab {
 public:
  HostSlab(int fd, int64_t size_bytes) : Slab(size_bytes) {
    if (IsSafeToMap(fd, size_bytes)) data_ = mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
  }
  ~HostSlab() override {
    if (ok()) munmap(data_, static_cast<size_t>(size_));
  }
  HostSlab(const HostSlab&) = delete;
  HostSlab& operator=(const HostSlab&) = delete;

  bool ok() const override { return data_ != MAP_FAILED; }

 private:
  const void* data() const override { return data_; }

  void* data_ = MAP_FAILED;
};

// A GPU's memory, by the handle in the message itself: no ticket, no descriptor.
class GpuSlab : public Slab {
 public:
  GpuSlab(const std::string& gpu_uuid, const v1::Slab& slab)
      : Slab(slab.size_bytes()), opened_(gpu_uuid, slab.cuda_ipc_handle(), &error_) {}

  bool ok() const override { return error_.empty(); }
  const std::string& error() const { return error_; }
  int device() const { return opened_.device(); }

 private:
  const void* data() const override { return opened_.data(); }

  std::string error_;
  example::IpcSlab opened_;
};

// One attachment: the stream is the lease, so it stays open for as long as the memory is used.
class Attachment {
 public:
  explicit Attachment(v1::WeightBrokerService::Stub& stub) : stub_(stub) {}
  ~Attachment() {
    slabs_.clear();
    if (stream_ == nullptr) return;
    context_.TryCancel();
    stream_->Finish();
  }

  grpc::Status Attach(const v1::ExportRequest& request, const std::string& socket_path) {
    stream_ = stub_.Export(&context_, request);
    v1::ExportResponse response;
    if (!stream_->Read(&response)) return std::exchange(stream_, nullptr)->Finish();
    header_ = response.header();
    const bool by_handle = header_.slabs_size() > 0 && header_.slabs(0).handle_kind() == v1::HANDLE_KIND_CUDA_IPC;
    if (grpc::Status status = by_handle ? OpenSlabs() : MapSlabs(socket_path); !status.ok()) return status;
    while (static_cast<int64_t>(tensors_.size()) < header_.tensor_count() && stream_->Read(&response)) {
      for (v1::Tensor& tensor : *response.mutable_manifest()->mutable_tensors()) tensors_.push_back(std::move(tensor));
    }
    return CheckManifest();
  }

  const v1::ExportHeader& header() const { return header_; }
  // The GPU that the tensors lie on, as this process counts; -1 for host memory.
  int gpu() const { return gpu_; }

  std::vector<example::View> Views() const {
    std::vector<example::View> views;
    for (const v1::Tensor& tensor : tensors_) {
      views.push_back({tensor.name(), BytesOf(tensor), !tensor.alias_of().empty()});
    }
    return views;
  }

 private:
  std::string_view BytesOf(const v1::Tensor& tensor) const {
    if (tensor.slab() < 0 || tensor.slab() >= static_cast<int>(slabs_.size())) return {};
    return slabs_[static_cast<size_t>(tensor.slab())]->Bytes(tensor.offset_bytes(), tensor.size_bytes());
  }

  grpc::Status CheckManifest() const {
    if (static_cast<int64_t>(tensors_.size()) != header_.tensor_count()) {
      return grpc::Status(grpc::StatusCode::DATA_LOSS, "the manifest ended early");
    }
    for (const v1::Tensor& tensor : tensors_) {
      if (tensor.size_bytes() != 0 && BytesOf(tensor).empty()) {
        return grpc::Status(grpc::StatusCode::DATA_LOSS, "tensor \"" + tensor.name() + "\" lies outside its slab");
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status OpenSlabs() {
    for (const v1::Slab& slab : header_.slabs()) {
      auto opened = std::make_unique<GpuSlab>(header_.device(), slab);
      if (!opened->ok()) return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, opened->error());
      gpu_ = opened->device();
      slabs_.push_back(std::move(opened));
    }
    return grpc::Status::OK;
  }

  grpc::Status MapSlabs(const std::string& socket_path) {
    std::vector<int> fds(static_cast<size_t>(header_.slabs_size()));
    size_t fd_count = 0;
    char error[weightbroker::kRedeemErrorBytes];
    const int code =
        weightbroker::RedeemTicket(socket_path.c_str(), header_.ticket().data(), header_.ticket().size(), fds.data(),
                                   fds.size(), &fd_count, /*timeout_ms=*/5000, error, sizeof(error));
    if (code != 0) return grpc::Status(grpc::StatusCode::UNAVAILABLE, error);
    bool all_mapped = fd_count == fds.size();
    for (size_t i = 0; i < fd_count; ++i) {
      slabs_.push_back(std::make_unique<HostSlab>(fds[i], header_.slabs(static_cast<int>(i)).size_bytes()));
      all_mapped = all_mapped && slabs_.back()->ok();
    }
    if (all_mapped) return grpc::Status::OK;
    return grpc::Status(grpc::StatusCode::DATA_LOSS, "the service's memory is not what its header says");
  }

  v1::WeightBrokerService::Stub& stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::ExportResponse>> stream_;
  v1::ExportHeader header_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  std::vector<v1::Tensor> tensors_;
  int gpu_ = -1;
};

grpc::Status Register(v1::WeightBrokerService::Stub& stub, const v1::ExportRequest& wanted) {
  v1::RegisterRequest request;
  *request.mutable_spec() = wanted.spec();
  *request.mutable_environment() = wanted.environment();
  *request.mutable_handle_kinds() = wanted.handle_kinds();
  request.set_wait(true);
  grpc::ClientContext context;
  const auto stream = stub.Register(&context, request);
  v1::RegisterResponse response;
  while (stream->Read(&response)) {
    if (response.has_progress()) fprintf(stderr, "%s", response.progress().ShortDebugString().append("\n").c_str());
  }
  return stream->Finish();
}

int PrintFailure(const grpc::Status& status, const example::Flags& flags) {
  const bool unavailable = status.error_code() == grpc::StatusCode::UNAVAILABLE;
  return example::PrintFailure(std::to_string(status.error_code()), status.error_message(), {}, unavailable,
                               flags.json);
}

struct StubFlags : example::Flags {
  bool cuda_ipc = false;
};

v1::ExportRequest ToRequest(const StubFlags& flags) {
  v1::ExportRequest request;
  request.mutable_spec()->set_model(flags.model);
  request.mutable_spec()->set_tensor_parallel_size(flags.tensor_parallel_size);
  request.mutable_spec()->set_layout(flags.layout);
  request.mutable_spec()->set_quantization(flags.quantization);
  request.set_rank(flags.rank);
  request.mutable_environment()->set_torch_version(flags.torch_version);
  request.add_handle_kinds(flags.cuda_ipc ? v1::HANDLE_KIND_CUDA_IPC : v1::HANDLE_KIND_HOST_MEMFD);
  request.set_hold(true);
  return request;
}

int ReadWeights(const StubFlags& flags, const std::vector<example::View>& views, example::Report* report) {
  if (flags.write_fault) return example::WriteToWeights(views);
  example::ReadAll(views, report);
  if (!flags.dump_dir.empty() && !example::DumpAll(views, flags.dump_dir)) return 1;
  example::Print(*report, flags.json);
  return flags.hold_seconds > 0 ? example::Hold(flags, views, *report) : 0;
}

int RunOnce(v1::WeightBrokerService::Stub& stub, const StubFlags& flags) {
  const v1::ExportRequest request = ToRequest(flags);
  if (flags.register_if_missing) {
    if (const grpc::Status status = Register(stub, request); !status.ok()) return PrintFailure(status, flags);
  }

  const double start = example::Now();
  Attachment attachment(stub);
  if (const grpc::Status status = attachment.Attach(request, flags.socket); !status.ok()) {
    return PrintFailure(status, flags);
  }
  const std::vector<example::View> views = attachment.Views();
  example::Report report;
  report.attach_seconds = example::Now() - start;
  report.program = "stub_engine";
  report.source = "attached";
  report.device = attachment.header().device();
  report.fingerprint = attachment.header().fingerprint();
  report.generation = attachment.header().generation();
  if (attachment.gpu() < 0) return ReadWeights(flags, views, &report);
  std::string error;
  const example::HostCopy copy(attachment.gpu(), views, &error);
  if (error.empty()) return ReadWeights(flags, copy.views(), &report);
  fprintf(stderr, "%s\n", error.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  StubFlags flags;
  CLI::App app("An example engine without the client library: maps a model's weights through the generated stub.");
  example::AddFlags(app, &flags);
  app.get_option("--socket")->required();
  app.add_flag("--cuda_ipc", flags.cuda_ipc,
               "Take weights in GPU memory, by the handles in the message; else in host memory");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const auto channel = grpc::CreateChannel("unix:" + flags.socket, grpc::InsecureChannelCredentials());
  const auto stub = v1::WeightBrokerService::NewStub(channel);
  for (int i = 0; i < flags.loop; ++i) {
    if (const int code = RunOnce(*stub, flags); code != 0) return code;
  }
  return 0;
}
