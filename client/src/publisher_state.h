// A publication, from the grant to the commit: the Register stream that it lives by, its slabs, and its tensors.
//
//   PublishStream stream(connection, request, deadline);
//   ASSIGN_OR_RETURN(const auto answer, stream.Next(on_progress));                 // PUBLISHER_GONE: offer again
//   if (answer.weight_set) ...                                                     // it is there: attach
//   ASSIGN_OR_RETURN(auto state, PublisherState::Create(connection, engine, *answer.grant, deadline));
//   RETURN_IF_ERROR(state->Add(tensor, data));
//   RETURN_IF_ERROR(state->Commit(deadline).status());
//
// Not thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "client/src/engine_device.h"
#include "client/src/writable_memory.h"
#include "weightbroker/client.h"
#include "weightbroker/publisher.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {

// The Register stream of an offer. Its end before the set is resident ends the publication, which is what a destructor
// does.
class PublishStream {
 public:
  PublishStream(const Connection& connection, const v1::RegisterRequest& request, Deadline deadline);
  ~PublishStream();
  PublishStream(const PublishStream&) = delete;
  PublishStream& operator=(const PublishStream&) = delete;

  // Reads until there is a grant, which makes the caller the publisher, or the set is resident: the other of the two is
  // then empty. Fails as the offer does.
  struct Answer {
    std::optional<v1::PublishGrant> grant;
    std::optional<v1::WeightSet> weight_set;
  };
  absl::StatusOr<Answer> Next(const std::function<void(const LoadProgress&)>& on_progress);

 private:
  const Connection& connection_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::RegisterResponse>> reader_;
  bool finished_ = false;
};

class PublisherState {
 public:
  // `connection` outlives the state. Maps the slabs of the grant where the engine computes. DEVICE_MISMATCH if they lie
  // elsewhere; fails as WritableMemory.
  static absl::StatusOr<std::unique_ptr<PublisherState>> Create(const Connection& connection,
                                                                const EngineDevice& engine,
                                                                const v1::PublishGrant& grant, Deadline deadline);

  Device device() const { return memory_->device(); }
  void UseStream(void* stream) { memory_->UseStream(stream); }
  absl::Status Synchronize() { return memory_->Synchronize(); }

  absl::StatusOr<std::byte*> Allocate(const TensorToPublish& tensor);
  absl::Status Add(const TensorToPublish& tensor, const void* data);
  absl::Status AddAlias(const TensorToPublish& tensor, int64_t offset_bytes);

  // Waits for what has been written, unmaps every slab and commits all tensors. Gives how long the service took to take
  // the digests, in seconds.
  absl::StatusOr<double> Commit(Deadline deadline);

  // Not ok once the service has said that the publication has ended: what a loader fails with is not its own then.
  const absl::Status& ended() const { return ended_; }

  void CountCopy(int64_t size_bytes) { copied_bytes_ += size_bytes; }
  int64_t copied_bytes() const { return copied_bytes_; }

 private:
  struct Place {
    int32_t slab = 0;
    int64_t offset_bytes = 0;
  };

  PublisherState(const Connection& connection, EngineDevice engine, std::string token,
                 std::unique_ptr<WritableMemory> memory)
      : connection_(connection), engine_(std::move(engine)), token_(std::move(token)), memory_(std::move(memory)) {}

  absl::Status MapSlabs(const v1::WritableSlabs& slabs, Deadline deadline);
  absl::Status AddSlabFor(int64_t size_bytes);
  absl::Status AddSlab(int64_t size_bytes);
  absl::StatusOr<Place> FindRoom(int64_t size_bytes);
  absl::Status CheckNew(const std::string& name) const;
  void AddRow(v1::Tensor row, const Place& place);

  const Connection& connection_;
  const EngineDevice engine_;
  const std::string token_;
  std::unique_ptr<WritableMemory> memory_;  // null once it has been committed
  int64_t last_slab_used_bytes_ = 0;        // tensors are packed into the last one
  int64_t added_bytes_ = 0;                 // of slabs that were asked for one by one
  std::vector<v1::Tensor> rows_;
  std::unordered_map<std::string, size_t> by_name_;  // into rows_
  int64_t copied_bytes_ = 0;
  absl::Status ended_;
};

// Everything of a row but where it lies; `size_bytes` is what type, shape and strides make. MANIFEST_INVALID.
absl::StatusOr<v1::Tensor> ToRow(const TensorToPublish& tensor);

// What a publisher of `tensors` would promise.
absl::StatusOr<v1::PublishPromise> MakePromise(const std::vector<TensorToPublish>& tensors);

}  // namespace weightbroker::client
