// A loader that a test scripts: a thread of this process at the other end of the control socket, which can do all that
// a real one can, and all that it must not.
//
//   FakeLoaderSpawner spawner([](FakeLoader& loader) {
//     loader.Plan(4096, 2);
//     loader.Die("killed by SIGKILL");
//   });
//
// Thread-safe.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/unique_fd.h"
#include "server/broker/loader_spawner.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker::testing {

// What a loader would hand over for `tensor_count` tensors of 256 bytes each, named "t0000000".. in order.
struct FakeShard {
  internal::v1::LoadSealed sealed;
  std::vector<UniqueFd> fds;  // the slab's, then the manifest's
};
FakeShard MakeFakeShard(int tensor_count);
// The same as GPU memory of `kind` on the GPU `device`; its descriptor, if it has one, is a memfd for AnyGpuFd to take.
FakeShard MakeFakeGpuShard(v1::HandleKind kind, const std::string& device, int tensor_count);
inline absl::Status AnyGpuFd(int) { return absl::OkStatus(); }

// A manifest's memfd, with `sealed` describing it.
UniqueFd MakeManifest(const std::string& bytes, internal::v1::LoadSealed* sealed);

class FakeLoader {
 public:
  FakeLoader(internal::v1::LoadRequest request, UniqueFd control)
      : request_(std::move(request)), control_(std::move(control)) {}

  const internal::v1::LoadRequest& request() const { return request_; }
  int control_fd() const { return control_.get(); }

  // Announces so much memory and so many tensors for all ranks of the request together, and waits for the answer; false
  // if the broker says no more.
  bool Plan(int64_t slab_bytes, int64_t tensor_count);
  bool PlanFor(const FakeShard& shard);
  void Progress(v1::WeightSetState phase, int64_t done_bytes);
  void HandOver(const FakeShard& shard, int32_t rank = 0);
  void Fail(const absl::Status& status);
  // As a publisher's loader: the next command, or nothing once the broker has gone; and an answer to one.
  std::optional<internal::v1::LoadCommand> NextCommand();
  void Refuse(const absl::Status& status);
  // Whatever a broken loader might send.
  void SendRaw(const std::string& bytes, const std::vector<int>& fds = {});
  // Waits until the broker closes its end or kills this loader.
  void WaitForTheEnd();
  // What WaitForEnd will say of this one.
  void Die(const std::string& how) { death_ = how; }

  void Shutdown();  // as a kill would: the socket is dead on both sides
  std::string death() const { return death_; }

 private:
  void Send(const internal::v1::LoadEvent& event, const std::vector<int>& fds = {});

  const internal::v1::LoadRequest request_;
  const UniqueFd control_;
  std::string death_ = "exit code 0";
};

class FakeLoaderSpawner : public LoaderSpawner {
 public:
  using Script = std::function<void(FakeLoader&)>;

  explicit FakeLoaderSpawner(Script script) : script_(std::move(script)) {}

  absl::StatusOr<SpawnedLoader> Spawn(const internal::v1::LoadRequest& request) override;

  // Of loaders that have been started, and of those that run now.
  int spawn_count() const { return spawned_; }
  int running_count() const { return *running_; }

 private:
  const Script script_;
  std::atomic<int> spawned_{0};
  const std::shared_ptr<std::atomic<int>> running_ = std::make_shared<std::atomic<int>>(0);
};

// Loads `tensor_count` tensors for each rank without a fault, on the devices and in the kind of the request; of
// CUDA_IPC it stays as the exporter.
FakeLoaderSpawner::Script LoadsWell(int tensor_count = 2);

}  // namespace weightbroker::testing
