// A publication, from the grant to the commit: the Register stream that it lives by, its slabs, and its tensors.
//
//   PublishStream stream(connection, request, deadline);
//   ASSIGN_OR_RETURN(const auto answer, stream.Next(on_progress));                 // PUBLISHER_GONE: offer again
//   if (answer.weight_set) ...                                                     // it is there: attach
//   ASSIGN_OR_RETURN(auto state, PublisherState::Create(connection, *answer.grant, deadline));
//   RETURN_IF_ERROR(state->Add(tensor, data));
//   RETURN_IF_ERROR(state->Commit(deadline));
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
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection.h"
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

// A slab mapped for writing.
class WritableMapping {
 public:
  // PROTOCOL_ERROR unless `fd` is a memfd of that length that nobody can shrink; SYSTEM_ERROR.
  static absl::StatusOr<WritableMapping> Map(int fd, const v1::Slab& slab);

  WritableMapping(WritableMapping&& other) noexcept;
  WritableMapping& operator=(WritableMapping&&) = delete;
  ~WritableMapping();

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  WritableMapping(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

class PublisherState {
 public:
  // `connection` outlives the state. Maps the slabs of the grant.
  static absl::StatusOr<std::unique_ptr<PublisherState>> Create(const Connection& connection,
                                                                const v1::PublishGrant& grant, Deadline deadline);

  absl::StatusOr<std::byte*> Allocate(const TensorToPublish& tensor);
  absl::Status Add(const TensorToPublish& tensor, const void* data);
  absl::Status AddAlias(const TensorToPublish& tensor, int64_t offset_bytes);

  // Unmaps every slab and commits all tensors.
  absl::Status Commit(Deadline deadline);

  int64_t copied_bytes() const { return copied_bytes_; }

 private:
  struct Place {
    int32_t slab = 0;
    int64_t offset_bytes = 0;
  };

  PublisherState(const Connection& connection, std::string token) : connection_(connection), token_(std::move(token)) {}

  absl::Status MapSlabs(const v1::WritableSlabs& slabs, Deadline deadline);
  absl::Status AddSlab(int64_t size_bytes);
  absl::StatusOr<Place> FindRoom(int64_t size_bytes);
  absl::Status CheckNew(const std::string& name) const;
  void AddRow(v1::Tensor row, const Place& place);

  const Connection& connection_;
  const std::string token_;
  std::vector<WritableMapping> slabs_;
  int64_t last_slab_used_bytes_ = 0;  // tensors are packed into the last one
  std::vector<v1::Tensor> rows_;
  std::unordered_map<std::string, size_t> by_name_;  // into rows_
  int64_t copied_bytes_ = 0;
};

// Everything of a row but where it lies; `size_bytes` is what type, shape and strides make. MANIFEST_INVALID.
absl::StatusOr<v1::Tensor> ToRow(const TensorToPublish& tensor);

// What a publisher of `tensors` would promise.
absl::StatusOr<v1::PublishPromise> MakePromise(const std::vector<TensorToPublish>& tensors);

}  // namespace weightbroker::client
