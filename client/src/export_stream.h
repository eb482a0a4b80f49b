// One Export stream, read as raw bytes: manifests are decoded straight into our own rows, without a protobuf message
// for each tensor in between. The thread that reads also drives the connection: there is no hop to another thread.
//
//   ExportStream stream(connection.channel(), request);
//   ASSIGN_OR_RETURN(std::optional<RawMessage> message, stream.Read(deadline));    // nullopt: ended; see end_status()
//
// Not thread-safe, but for Cancel. A stream that is destroyed is cancelled, and its end is waited for.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {

// The bytes of one message; they do not move when the object does.
class RawMessage {
 public:
  explicit RawMessage(const grpc::ByteBuffer& buffer);
  explicit RawMessage(std::string_view bytes);

  std::string_view bytes() const { return {data_.get(), size_}; }

 private:
  std::unique_ptr<char[]> data_;
  size_t size_ = 0;
};

class ExportStream {
 public:
  enum class Start {
    kConnected,      // fails where no service is connected
    kOnceReachable,  // waits for one, however long that takes
  };

  ExportStream(std::shared_ptr<grpc::Channel> channel, const v1::ExportRequest& request,
               Start start = Start::kConnected);
  ~ExportStream();
  ExportStream(const ExportStream&) = delete;
  ExportStream& operator=(const ExportStream&) = delete;

  // Waits for the next message. nullopt once the stream has ended, and from then on. DEADLINE_EXCEEDED ends the stream.
  absl::StatusOr<std::optional<RawMessage>> Read(Deadline deadline);

  // What the stream ended with. Only after Read has returned nullopt.
  const grpc::Status& end_status() const { return end_status_; }

  // Ends the stream: a Read that waits returns nullopt soon. Thread-safe.
  void Cancel() { context_.TryCancel(); }

 private:
  enum class Operation : intptr_t { kWrite = 1, kRead, kFinish };

  void* Tag(Operation operation) { return reinterpret_cast<void*>(operation); }
  void WaitForEnd();

  const std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  grpc::ByteBuffer buffer_;  // where the read in progress lands
  grpc::Status end_status_;
  bool ended_ = false;
};

}  // namespace weightbroker::client
