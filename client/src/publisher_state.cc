#include "client/src/publisher_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/redeem_ticket.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/plan/plan.h"
#include "common/publish/published_tensors.h"

namespace weightbroker::client {
namespace {

constexpr int64_t kLeastSlabBytes = 64 << 20;
constexpr size_t kMaxCommitBytes = 512 << 10;  // of one message; the service takes 1 MiB
constexpr std::chrono::seconds kAllocateDeadline(60);

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

absl::Status Invalid(const std::string& name, const std::string& what) {
  return MakeError(Reason::kManifestInvalid, absl::StrCat("tensor ", Quote(name), " ", what),
                   {{"tensor", Printable(name)}});
}

absl::Status NotTrusted(const std::string& what) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the service answered a publisher with ", what),
                   {{"fault", what}});
}

// With its set, or with another rank's publisher, or by its time.
bool IsEndOfPublication(const absl::Status& status) {
  return HasReason(status, Reason::kPublisherGone) || HasReason(status, Reason::kPublicationUnknown) ||
         HasReason(status, Reason::kCancelled);
}

LoadProgress ToPublic(const v1::RegisterProgress& progress) {
  return {WithoutPrefix(v1::WeightSetState_Name(progress.phase()), "WEIGHT_SET_STATE_"), progress.done_bytes(),
          progress.total_bytes(), progress.rate_bytes_per_second(),
          progress.has_seconds_left() ? progress.seconds_left() : -1};
}

}  // namespace

// ---- The stream.

PublishStream::PublishStream(const Connection& connection, const v1::RegisterRequest& request, Deadline deadline)
    : connection_(connection) {
  context_.set_deadline(deadline);
  reader_ = connection.service().Register(&context_, request);
}

PublishStream::~PublishStream() {
  if (finished_) return;
  context_.TryCancel();
  (void)reader_->Finish();
}

absl::StatusOr<PublishStream::Answer> PublishStream::Next(const std::function<void(const LoadProgress&)>& on_progress) {
  v1::RegisterResponse response;
  Answer answer;
  while (reader_->Read(&response)) {
    if (response.has_publish_grant()) {
      answer.grant = std::move(*response.mutable_publish_grant());
      return answer;
    }
    if (response.has_weight_set()) answer.weight_set = std::move(*response.mutable_weight_set());
    if (response.has_progress() && on_progress) on_progress(ToPublic(response.progress()));
  }
  finished_ = true;
  RETURN_IF_ERROR(connection_.ToStatus(reader_->Finish()));
  if (!answer.weight_set.has_value()) return NotTrusted("a stream that ended without a weight set");
  return answer;
}

// ---- Slabs.

absl::StatusOr<std::unique_ptr<PublisherState>> PublisherState::Create(const Connection& connection,
                                                                       const EngineDevice& engine,
                                                                       const v1::PublishGrant& grant,
                                                                       Deadline deadline) {
  ASSIGN_OR_RETURN(std::unique_ptr<WritableMemory> memory, WritableMemory::Open(engine));
  std::unique_ptr<PublisherState> state(
      new PublisherState(connection, engine, grant.publication_token(), std::move(memory)));
  RETURN_IF_ERROR(state->MapSlabs(grant.slabs(), deadline));
  return state;
}

absl::Status PublisherState::MapSlabs(const v1::WritableSlabs& slabs, Deadline deadline) {
  const size_t before = memory_->slabs().size();
  if (slabs.first_slab() != static_cast<int32_t>(before)) {
    return NotTrusted(absl::StrCat("slab ", slabs.first_slab(), " where there are ", before));
  }
  if (slabs.slabs().empty()) return absl::OkStatus();
  for (const v1::Slab& slab : slabs.slabs()) {
    RETURN_IF_ERROR(CheckLiesOn(engine_, slab.device_uuid().empty() ? "host" : slab.device_uuid()));
  }
  std::vector<UniqueFd> fds;
  if (slabs.slabs(0).handle_kind() != v1::HANDLE_KIND_CUDA_IPC) {
    const auto count = static_cast<size_t>(slabs.slabs_size());
    ASSIGN_OR_RETURN(fds, RedeemTicket(connection_.socket_path(), slabs.ticket(), count, deadline));
    if (fds.size() != count) return NotTrusted(absl::StrCat(fds.size(), " descriptors for ", count, " slabs"));
  }
  const std::vector<v1::Slab> added(slabs.slabs().begin(), slabs.slabs().end());
  RETURN_IF_ERROR(memory_->Add(added, fds));
  last_slab_used_bytes_ = 0;
  return absl::OkStatus();
}

// A set has at most 128 slabs: the more have been added, the larger the next, and an eighth of them may stay empty.
absl::Status PublisherState::AddSlabFor(int64_t size_bytes) {
  const int64_t wished_bytes = std::max({size_bytes, kLeastSlabBytes, added_bytes_ / 8});
  absl::Status added = AddSlab(wished_bytes);
  if (HasReason(added, Reason::kMemoryExhausted) && wished_bytes > size_bytes) added = AddSlab(size_bytes);
  if (added.ok()) added_bytes_ += memory_->slabs().back().size_bytes;
  return added;
}

absl::Status PublisherState::AddSlab(int64_t size_bytes) {
  v1::AllocateSlabsRequest request;
  request.set_publication_token(token_);
  request.add_slab_bytes(size_bytes);
  v1::AllocateSlabsResponse response;
  const Deadline deadline = DeadlineIn(kAllocateDeadline);
  const absl::Status answer = connection_.CallOnce(deadline, [&](grpc::ClientContext& context) {
    return connection_.service().AllocateSlabs(&context, request, &response);
  });
  if (IsEndOfPublication(answer)) ended_ = answer;
  RETURN_IF_ERROR(answer);
  if (response.slabs().slabs_size() != 1 || response.slabs().slabs(0).size_bytes() < size_bytes) {
    return NotTrusted("other slabs than were asked for");
  }
  return MapSlabs(response.slabs(), deadline);
}

absl::StatusOr<PublisherState::Place> PublisherState::FindRoom(int64_t size_bytes) {
  const std::vector<WritableView>& slabs = memory_->slabs();
  if (slabs.empty() || size_bytes > slabs.back().size_bytes - last_slab_used_bytes_) {
    RETURN_IF_ERROR(AddSlabFor(std::max<int64_t>(size_bytes, 1)));
  }
  const Place place{static_cast<int32_t>(slabs.size()) - 1, last_slab_used_bytes_};
  // The rest of a slab may be shorter than the alignment: nothing fits there then.
  last_slab_used_bytes_ =
      std::min(RoundUp(place.offset_bytes + size_bytes, kTensorAlignmentBytes), slabs.back().size_bytes);
  return place;
}

// ---- Tensors.

absl::StatusOr<v1::Tensor> ToRow(const TensorToPublish& tensor) {
  v1::Tensor row;
  row.set_name(tensor.name);
  row.set_dtype(static_cast<v1::DataType>(tensor.dtype));
  row.mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  row.mutable_strides()->Add(tensor.strides.begin(), tensor.strides.end());
  row.set_kind(static_cast<v1::TensorKind>(tensor.kind));
  row.mutable_metadata()->insert(tensor.metadata.begin(), tensor.metadata.end());
  row.set_alias_of(tensor.alias_of);
  ASSIGN_OR_RETURN(const int64_t size_bytes,
                   PublishedSizeBytes(tensor.name, row.dtype(), tensor.shape, tensor.strides));
  row.set_size_bytes(size_bytes);
  return row;
}

absl::Status PublisherState::CheckNew(const std::string& name) const {
  if (name.empty()) return Invalid(name, "has no name");
  return by_name_.count(name) == 0 ? absl::OkStatus() : Invalid(name, "is there twice");
}

absl::StatusOr<std::byte*> PublisherState::Allocate(const TensorToPublish& tensor) {
  RETURN_IF_ERROR(CheckNew(tensor.name));
  if (!tensor.alias_of.empty()) return Invalid(tensor.name, "is an alias, which needs no memory of its own");
  ASSIGN_OR_RETURN(v1::Tensor row, ToRow(tensor));
  ASSIGN_OR_RETURN(const Place place, FindRoom(row.size_bytes()));
  std::byte* const data =
      row.size_bytes() == 0 ? nullptr : memory_->slabs()[static_cast<size_t>(place.slab)].data + place.offset_bytes;
  AddRow(std::move(row), place);
  return data;
}

absl::Status PublisherState::Add(const TensorToPublish& tensor, const void* data) {
  ASSIGN_OR_RETURN(std::byte* const room, Allocate(tensor));
  if (room == nullptr) return absl::OkStatus();
  const int64_t size_bytes = rows_.back().size_bytes();
  RETURN_IF_ERROR(memory_->Copy(room, data, size_bytes));
  CountCopy(size_bytes);
  return absl::OkStatus();
}

absl::Status PublisherState::AddAlias(const TensorToPublish& tensor, int64_t offset_bytes) {
  RETURN_IF_ERROR(CheckNew(tensor.name));
  const auto target = by_name_.find(tensor.alias_of);
  if (target == by_name_.end()) {
    return Invalid(tensor.name, absl::StrCat("is an alias of ", Quote(tensor.alias_of), ", which is not there"));
  }
  const v1::Tensor& whole = rows_[target->second];
  ASSIGN_OR_RETURN(v1::Tensor row, ToRow(tensor));
  if (offset_bytes < 0 || offset_bytes > whole.size_bytes() - row.size_bytes()) {
    return Invalid(tensor.name, absl::StrCat("takes ", row.size_bytes(), " bytes from offset ", offset_bytes, " of ",
                                             Quote(tensor.alias_of), ", which has ", whole.size_bytes()));
  }
  AddRow(std::move(row), {whole.slab(), whole.offset_bytes() + offset_bytes});
  return absl::OkStatus();
}

void PublisherState::AddRow(v1::Tensor row, const Place& place) {
  row.set_slab(place.slab);
  row.set_offset_bytes(place.offset_bytes);
  by_name_[row.name()] = rows_.size();
  rows_.push_back(std::move(row));
}

absl::StatusOr<v1::PublishPromise> MakePromise(const std::vector<TensorToPublish>& tensors) {
  std::vector<v1::Tensor> rows;
  for (const TensorToPublish& tensor : tensors) {
    ASSIGN_OR_RETURN(rows.emplace_back(), ToRow(tensor));
  }
  NormalizePublishedTensors(rows);
  v1::PublishPromise promise;
  promise.set_tensor_count(static_cast<int64_t>(rows.size()));
  promise.set_size_bytes(PublishedTotalBytes(rows));
  promise.set_layout_sha256(PublishedLayoutSha256(rows));
  return promise;
}

// ---- Commit.

absl::StatusOr<double> PublisherState::Commit(Deadline deadline) {
  // A tensor must lie in a slab even if it has no bytes.
  if (memory_->slabs().empty()) RETURN_IF_ERROR(AddSlab(kTensorAlignmentBytes));
  RETURN_IF_ERROR(memory_->Synchronize());
  memory_.reset();  // while anybody has host memory mapped writable it cannot be sealed
  v1::CommitResponse response;
  RETURN_IF_ERROR(connection_.CallOnce(deadline, [&](grpc::ClientContext& context) {
    const auto writer = connection_.service().Commit(&context, &response);
    v1::CommitRequest request;
    request.set_publication_token(token_);
    size_t request_bytes = 0;
    for (const v1::Tensor& row : rows_) {
      const size_t row_bytes = row.ByteSizeLong();
      if (request_bytes > 0 && request_bytes + row_bytes > kMaxCommitBytes) {
        if (!writer->Write(request)) return writer->Finish();
        request.Clear();
        request_bytes = 0;
      }
      *request.add_tensors() = row;
      request_bytes += row_bytes;
    }
    writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  }));
  return response.digest_seconds();
}

}  // namespace weightbroker::client
