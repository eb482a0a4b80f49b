#include "client/src/publisher_state.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/redeem_ticket.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"
#include "common/memory/writable_slab.h"
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

LoadProgress ToPublic(const v1::RegisterProgress& progress) {
  return {WithoutPrefix(v1::WeightSetState_Name(progress.phase()), "WEIGHT_SET_STATE_"), progress.done_bytes(),
          progress.total_bytes(), progress.rate_bytes_per_second()};
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

absl::StatusOr<WritableMapping> WritableMapping::Map(int fd, const v1::Slab& slab) {
  RETURN_IF_ERROR(CheckWritableMemfd(fd, slab.size_bytes()));
  const auto size = static_cast<size_t>(slab.size_bytes());
  void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return SystemError("mmap of a slab", errno);
  // A child that is forked meanwhile must not keep the memory writable.
  if (madvise(data, size, MADV_DONTFORK) != 0) {
    const int error_number = errno;
    munmap(data, size);
    return SystemError("madvise(MADV_DONTFORK)", error_number);
  }
  // A wish: what is written through this mapping is what the pages are allocated for.
  if (slab.page_kind() == v1::PAGE_KIND_TRANSPARENT_HUGE) madvise(data, size, MADV_HUGEPAGE);
  return WritableMapping(static_cast<std::byte*>(data), slab.size_bytes());
}

WritableMapping::WritableMapping(WritableMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(other.size_bytes_) {}

WritableMapping::~WritableMapping() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
}

absl::StatusOr<std::unique_ptr<PublisherState>> PublisherState::Create(const Connection& connection,
                                                                       const v1::PublishGrant& grant,
                                                                       Deadline deadline) {
  std::unique_ptr<PublisherState> state(new PublisherState(connection, grant.publication_token()));
  RETURN_IF_ERROR(state->MapSlabs(grant.slabs(), deadline));
  return state;
}

absl::Status PublisherState::MapSlabs(const v1::WritableSlabs& slabs, Deadline deadline) {
  if (slabs.first_slab() != static_cast<int32_t>(slabs_.size())) {
    return NotTrusted(absl::StrCat("slab ", slabs.first_slab(), " where there are ", slabs_.size()));
  }
  if (slabs.slabs().empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<UniqueFd> fds, RedeemTicket(connection_.socket_path(), slabs.ticket(),
                                                                 static_cast<size_t>(slabs.slabs_size()), deadline));
  if (static_cast<int>(fds.size()) != slabs.slabs_size()) {
    return NotTrusted(absl::StrCat(fds.size(), " descriptors for ", slabs.slabs_size(), " slabs"));
  }
  for (int i = 0; i < slabs.slabs_size(); ++i) {
    ASSIGN_OR_RETURN(WritableMapping mapping, WritableMapping::Map(fds[static_cast<size_t>(i)].get(), slabs.slabs(i)));
    slabs_.push_back(std::move(mapping));
    last_slab_used_bytes_ = 0;
  }
  return absl::OkStatus();
}

absl::Status PublisherState::AddSlab(int64_t size_bytes) {
  v1::AllocateSlabsRequest request;
  request.set_publication_token(token_);
  request.add_slab_bytes(size_bytes);
  v1::AllocateSlabsResponse response;
  const Deadline deadline = DeadlineIn(kAllocateDeadline);
  RETURN_IF_ERROR(connection_.CallOnce(deadline, [&](grpc::ClientContext& context) {
    return connection_.service().AllocateSlabs(&context, request, &response);
  }));
  if (response.slabs().slabs_size() != 1 || response.slabs().slabs(0).size_bytes() < size_bytes) {
    return NotTrusted("other slabs than were asked for");
  }
  return MapSlabs(response.slabs(), deadline);
}

absl::StatusOr<PublisherState::Place> PublisherState::FindRoom(int64_t size_bytes) {
  if (slabs_.empty() || size_bytes > slabs_.back().size_bytes() - last_slab_used_bytes_) {
    RETURN_IF_ERROR(AddSlab(std::max(size_bytes, kLeastSlabBytes)));
  }
  const Place place{static_cast<int32_t>(slabs_.size()) - 1, last_slab_used_bytes_};
  // The rest of a slab may be shorter than the alignment: nothing fits there then.
  last_slab_used_bytes_ =
      std::min(RoundUp(place.offset_bytes + size_bytes, kTensorAlignmentBytes), slabs_.back().size_bytes());
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
      row.size_bytes() == 0 ? nullptr : slabs_[static_cast<size_t>(place.slab)].data() + place.offset_bytes;
  AddRow(std::move(row), place);
  return data;
}

absl::Status PublisherState::Add(const TensorToPublish& tensor, const void* data) {
  ASSIGN_OR_RETURN(std::byte* const room, Allocate(tensor));
  if (room == nullptr) return absl::OkStatus();
  const auto size = static_cast<size_t>(rows_.back().size_bytes());
  memcpy(room, data, size);
  copied_bytes_ += static_cast<int64_t>(size);
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

absl::Status PublisherState::Commit(Deadline deadline) {
  // A tensor must lie in a slab even if it has no bytes.
  if (slabs_.empty()) RETURN_IF_ERROR(AddSlab(kTensorAlignmentBytes));
  slabs_.clear();  // while anybody has one mapped writable it cannot be sealed
  return connection_.CallOnce(deadline, [&](grpc::ClientContext& context) {
    v1::CommitResponse response;
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
  });
}

}  // namespace weightbroker::client
