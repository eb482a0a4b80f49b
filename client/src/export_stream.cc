#include "client/src/export_stream.h"

#include <grpcpp/impl/codegen/proto_utils.h>

#include <cstring>
#include <utility>
#include <vector>

#include "common/base/error.h"

namespace weightbroker::client {
namespace {

constexpr char kExportMethod[] = "/weightbroker.v1.WeightBrokerService/Export";

grpc::ByteBuffer Serialize(const v1::ExportRequest& request) {
  const std::string bytes = request.SerializeAsString();
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

RawMessage::RawMessage(const grpc::ByteBuffer& buffer) : data_(new char[buffer.Length()]), size_(buffer.Length()) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) size_ = 0;
  size_t position = 0;
  for (const grpc::Slice& slice : slices) {
    memcpy(data_.get() + position, slice.begin(), slice.size());
    position += slice.size();
  }
}

RawMessage::RawMessage(std::string_view bytes) : data_(new char[bytes.size()]), size_(bytes.size()) {
  memcpy(data_.get(), bytes.data(), bytes.size());
}

ExportStream::ExportStream(std::shared_ptr<grpc::Channel> channel, const v1::ExportRequest& request, Start start)
    : channel_(std::move(channel)) {
  context_.set_wait_for_ready(start == Start::kOnceReachable);
  // Corked: metadata, request and half-close leave in one batch. No deadline in the context: the stream is the lease.
  context_.set_initial_metadata_corked(true);
  call_ = grpc::GenericStub(channel_).PrepareCall(&context_, kExportMethod, &queue_);
  call_->StartCall(nullptr);
  call_->Write(Serialize(request), grpc::WriteOptions().set_last_message(), Tag(Operation::kWrite));
}

ExportStream::~ExportStream() {
  if (!ended_) {
    Cancel();
    WaitForEnd();
  }
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

absl::StatusOr<std::optional<RawMessage>> ExportStream::Read(Deadline deadline) {
  if (ended_) return std::nullopt;
  call_->Read(&buffer_, Tag(Operation::kRead));
  while (true) {
    void* tag = nullptr;
    bool ok = false;
    if (queue_.AsyncNext(&tag, &ok, deadline) == grpc::CompletionQueue::TIMEOUT) {
      Cancel();
      WaitForEnd();
      return MakeError(Reason::kDeadlineExceeded, "the service did not answer Export before the deadline");
    }
    if (tag != Tag(Operation::kRead)) continue;
    if (!ok) {
      WaitForEnd();
      return std::nullopt;
    }
    RawMessage message(buffer_);
    buffer_.Clear();
    return message;
  }
}

// After a read has failed, or a cancel: the status is there at once.
void ExportStream::WaitForEnd() {
  call_->Finish(&end_status_, Tag(Operation::kFinish));
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok) && tag != Tag(Operation::kFinish)) {
  }
  ended_ = true;
}

}  // namespace weightbroker::client
