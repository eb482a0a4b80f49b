#include "tests/unit/broker/fake_loader.h"

#include <sys/socket.h>

#include <cstdio>
#include <span>
#include <thread>
#include <utility>

#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/dtype.h"
#include "common/identity/sha256.h"
#include "common/memory/host_slab.h"
#include "common/plan/manifest.h"
#include "common/plan/plan.h"

namespace weightbroker::testing {
namespace {

constexpr int64_t kTensorBytes = 256;

ShardPlan MakePlan(int tensor_count) {
  ShardPlan plan;
  plan.slab_bytes = {tensor_count * kTensorBytes};
  plan.read_bytes = tensor_count * kTensorBytes;
  for (int i = 0; i < tensor_count; ++i) {
    char name[16];
    snprintf(name, sizeof(name), "t%07d", i);
    TensorPlacement tensor;
    tensor.name = name;
    tensor.dtype = FindDtype("U8");
    tensor.shape = {kTensorBytes};
    tensor.slab_offset_bytes = i * kTensorBytes;
    tensor.size_bytes = kTensorBytes;
    plan.tensors.push_back(std::move(tensor));
  }
  return plan;
}

// The thread of one fake loader, as the broker sees it.
class FakeProcess : public LoaderProcess {
 public:
  FakeProcess(std::shared_ptr<FakeLoader> loader, std::function<void()> run) : loader_(std::move(loader)) {
    thread_ = std::thread([this, run = std::move(run)] {
      run();
      loader_->Shutdown();
      MutexLock lock(mutex_);
      ended_ = true;
      changed_.NotifyAll();
    });
  }

  ~FakeProcess() override {
    loader_->Shutdown();
    thread_.join();
  }

  void Kill(const std::string&) override { loader_->Shutdown(); }

  absl::Status Detach() override { return absl::OkStatus(); }

  std::string WaitForEnd(std::chrono::milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    MutexLock lock(mutex_);
    while (!ended_ && changed_.WaitUntil(mutex_, deadline)) {
    }
    return ended_ ? loader_->death() : "";
  }

 private:
  const std::shared_ptr<FakeLoader> loader_;
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

UniqueFd MakeManifest(const std::string& bytes, internal::v1::LoadSealed* sealed) {
  sealed->set_manifest_bytes(static_cast<int64_t>(bytes.size()));
  sealed->set_manifest_sha256(Sha256Bytes(bytes));
  return CreateSealedMemfd("fake-manifest", std::as_bytes(std::span(bytes))).value();
}

FakeShard MakeFakeShard(int tensor_count) {
  const ShardPlan plan = MakePlan(tensor_count);
  FakeShard shard;
  HostSlab slab = HostSlab::Create(plan.slab_bytes[0]).value();
  SealedSlab sealed = std::move(slab).Seal().value();
  v1::Slab& described = *shard.sealed.add_slabs();
  described.set_size_bytes(sealed.size_bytes);
  described.set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
  described.set_page_kind(sealed.page_kind);
  shard.fds.push_back(std::move(sealed.fd));
  shard.sealed.set_tensor_count(tensor_count);
  shard.sealed.set_read_bytes(plan.read_bytes);
  const std::vector<Digest> digests(plan.tensors.size());
  shard.fds.push_back(MakeManifest(SerializeManifest(plan, digests).value(), &shard.sealed));
  return shard;
}

FakeShard MakeFakeGpuShard(v1::HandleKind kind, const std::string& device, int tensor_count) {
  FakeShard shard = MakeFakeShard(tensor_count);
  v1::Slab& slab = *shard.sealed.mutable_slabs(0);
  slab.set_handle_kind(kind);
  slab.set_page_kind(v1::PAGE_KIND_UNSPECIFIED);
  slab.set_device_uuid(device);
  if (kind == v1::HANDLE_KIND_CUDA_IPC) {
    slab.set_cuda_ipc_handle(std::string(64, 'h'));
    shard.fds.erase(shard.fds.begin());
  }
  return shard;
}

bool FakeLoader::Plan(int64_t slab_bytes, int64_t tensor_count) {
  internal::v1::LoadEvent event;
  event.mutable_planned()->set_slab_bytes(slab_bytes);
  event.mutable_planned()->set_read_bytes(tensor_count * kTensorBytes);
  event.mutable_planned()->set_tensor_count(tensor_count);
  // Shared out evenly; all that is left goes to the last one.
  const int64_t rank_count = request_.ranks_size();
  for (int i = 0; i < request_.ranks_size(); ++i) {
    internal::v1::PlannedShard& shard = *event.mutable_planned()->add_shards();
    const bool is_last = i + 1 == request_.ranks_size();
    shard.set_rank(request_.ranks(i).rank());
    shard.set_slab_bytes(slab_bytes / rank_count + (is_last ? slab_bytes % rank_count : 0));
    shard.set_tensor_count(tensor_count / rank_count + (is_last ? tensor_count % rank_count : 0));
  }
  Send(event);
  const auto answer = ReceiveMessage(control_.get());
  internal::v1::LoadCommand command;
  return answer.ok() && !answer->closed && command.ParseFromString(answer->bytes) && command.proceed();
}

bool FakeLoader::PlanFor(const FakeShard& shard) {
  return Plan(shard.sealed.slabs(0).size_bytes(), shard.sealed.tensor_count());
}

void FakeLoader::Progress(v1::WeightSetState phase, int64_t done_bytes) {
  internal::v1::LoadEvent event;
  event.mutable_progress()->set_phase(phase);
  event.mutable_progress()->set_done_bytes(done_bytes);
  Send(event);
}

void FakeLoader::HandOver(const FakeShard& shard, int32_t rank) {
  internal::v1::LoadEvent event;
  *event.mutable_sealed() = shard.sealed;
  event.mutable_sealed()->set_rank(rank);
  std::vector<int> fds;
  for (const UniqueFd& fd : shard.fds) fds.push_back(fd.get());
  Send(event, fds);
}

void FakeLoader::Fail(const absl::Status& status) {
  internal::v1::LoadEvent event;
  event.mutable_failed()->ParseFromString(SerializeRpcStatus(status));
  Send(event);
}

std::optional<internal::v1::LoadCommand> FakeLoader::NextCommand() {
  const auto message = ReceiveMessage(control_.get());
  internal::v1::LoadCommand command;
  if (!message.ok() || message->closed || !command.ParseFromString(message->bytes)) return std::nullopt;
  return command;
}

void FakeLoader::Refuse(const absl::Status& status) {
  internal::v1::LoadEvent event;
  event.mutable_refused()->ParseFromString(SerializeRpcStatus(status));
  Send(event);
}

void FakeLoader::SendRaw(const std::string& bytes, const std::vector<int>& fds) {
  (void)SendMessage(control_.get(), bytes, fds);  // the broker may have gone
}

void FakeLoader::Send(const internal::v1::LoadEvent& event, const std::vector<int>& fds) {
  SendRaw(event.SerializeAsString(), fds);
}

void FakeLoader::WaitForTheEnd() {
  auto message = ReceiveMessage(control_.get());
  while (message.ok() && !message->closed) message = ReceiveMessage(control_.get());
}

void FakeLoader::Shutdown() { shutdown(control_.get(), SHUT_RDWR); }

absl::StatusOr<SpawnedLoader> FakeLoaderSpawner::Spawn(const internal::v1::LoadRequest& request) {
  ++spawned_;
  ASSIGN_OR_RETURN(SocketPair pair, CreateSeqpacketPair());
  const auto loader = std::make_shared<FakeLoader>(request, std::move(pair.second));
  auto process = std::make_unique<FakeProcess>(loader, [loader, script = script_, running = running_] {
    ++*running;
    script(*loader);
    --*running;
  });
  return SpawnedLoader{std::move(pair.first), std::move(process)};
}

FakeLoaderSpawner::Script LoadsWell(int tensor_count) {
  return [tensor_count](FakeLoader& loader) {
    const FakeShard shard = MakeFakeShard(tensor_count);
    const int rank_count = loader.request().ranks_size();
    if (!loader.Plan(rank_count * shard.sealed.slabs(0).size_bytes(), rank_count * tensor_count)) return;
    const int64_t read_bytes = rank_count * tensor_count * kTensorBytes;
    loader.Progress(v1::WEIGHT_SET_STATE_LOADING, read_bytes / 2);
    loader.Progress(v1::WEIGHT_SET_STATE_VERIFYING, read_bytes);
    const v1::HandleKind kind = loader.request().handle_kind();
    for (const internal::v1::RankPlacement& placed : loader.request().ranks()) {
      if (kind == v1::HANDLE_KIND_CUDA_VMM_FD || kind == v1::HANDLE_KIND_CUDA_IPC) {
        loader.HandOver(MakeFakeGpuShard(kind, placed.device(), tensor_count), placed.rank());
      } else {
        loader.HandOver(shard, placed.rank());
      }
    }
    if (kind == v1::HANDLE_KIND_CUDA_IPC) loader.WaitForTheEnd();
  };
}

}  // namespace weightbroker::testing
