// A server stream whose messages come from any thread and wait their turn: the part of a streaming call that is the
// same for all. gRPC allows one write at a time and wants every call finished exactly once, cancelled or not; this
// keeps both.
//
//   auto call = std::make_shared<RegisterCall>(context, ...);
//   call->Start();
//   return call->Attach();                                     // gRPC holds it until the call is over
//
// Thread-safe. A subclass is kept alive by gRPC until OnDone and by whoever else holds a shared_ptr; after its end Send
// and End do nothing. Callbacks that may outlive the call hold it weakly.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "common/base/mutex.h"
#include "server/broker/call_record.h"
#include "server/broker/stream_watch.h"

namespace weightbroker {

template <typename Message>
class StreamCall : public grpc::ServerWriteReactor<Message>,
                   public WatchedStream,
                   public std::enable_shared_from_this<StreamCall<Message>> {
 public:
  explicit StreamCall(CallRecord record) : record_(std::move(record)) {}

  // Gives the call to gRPC, which keeps it until it is over. It is cut off if its caller does not read.
  grpc::ServerWriteReactor<Message>* Attach(grpc::CallbackServerContext* grpc_context) {
    self_ = this->shared_from_this();
    {
      MutexLock lock(mutex_);
      grpc_context_ = grpc_context;
    }
    record_.Watch(self_);
    return this;
  }

  bool CutIfStuck(std::chrono::steady_clock::time_point now, std::chrono::milliseconds limit) override {
    MutexLock lock(mutex_);
    if (!writing_ || cut_ || grpc_context_ == nullptr || now - write_start_ < limit) return false;
    cut_ = true;
    grpc_context_->TryCancel();
    return true;
  }

 protected:
  // Sends `message` after those before it.
  void Send(Message message) {
    MutexLock lock(mutex_);
    if (end_.has_value()) return;
    waiting_.push_back({std::move(message)});
    Advance();
  }

  // Sends `message` in place of those of its kind that have not gone out yet: for a caller that reads slowly only the
  // latest counts.
  void SendLatest(Message message) {
    MutexLock lock(mutex_);
    if (end_.has_value()) return;
    std::erase_if(waiting_, [](const Waiting& waiting) { return waiting.only_if_latest; });
    waiting_.push_back({std::move(message), /*only_if_latest=*/true});
    Advance();
  }

  // Ends the call once everything has been sent. The first end counts.
  void End(const absl::Status& status) {
    MutexLock lock(mutex_);
    if (end_.has_value()) return;
    end_ = status;
    Advance();
  }

  // Both in one: nobody's message comes between.
  void SendAndEnd(Message message, const absl::Status& status) {
    MutexLock lock(mutex_);
    if (end_.has_value()) return;
    waiting_.push_back({std::move(message)});
    end_ = status;
    Advance();
  }

  // Counts the call's duration until everything has been sent for the first time, not until its end. Call it before the
  // last message of that time is sent.
  void ObserveDurationWhenIdle() {
    MutexLock lock(mutex_);
    observes_first_idle_ = true;
  }

  // The caller has left, or is taken to have. Called at most once, without the lock.
  virtual void OnLeft() {}

  const CallRecord& record() const { return record_; }

  // What the call is about, for the audit line of its end.
  void NameObject(const std::string& object) {
    MutexLock lock(mutex_);
    record_.SetObject(object);
  }

 private:
  struct Waiting {
    Message message;
    bool only_if_latest = false;
  };

  void OnWriteDone(bool ok) final {
    MutexLock lock(mutex_);
    writing_ = false;
    if (!ok) Abandon();
    Advance();
  }

  void OnCancel() final {
    {
      MutexLock lock(mutex_);
      Abandon();
      Advance();
    }
    OnLeft();
  }

  void OnDone() final {
    {
      MutexLock lock(mutex_);
      grpc_context_ = nullptr;
    }
    const auto self = std::move(self_);  // destroys the call on return, unless somebody else still holds it
  }

  void Abandon() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    waiting_.clear();
    if (!end_.has_value()) end_ = absl::CancelledError("the caller has left");
  }

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (!waiting_.empty()) {
      current_ = std::move(waiting_.front().message);
      waiting_.pop_front();
      writing_ = true;
      write_start_ = std::chrono::steady_clock::now();
      this->StartWrite(&current_);
    } else if (end_.has_value()) {
      finished_ = true;
      this->Finish(record_.End(*end_));
    } else if (observes_first_idle_) {
      record_.ObserveDuration();
    }
  }

  std::shared_ptr<StreamCall> self_;  // gRPC's hold

  mutable Mutex mutex_;
  CallRecord record_;  // ended and observed under mutex_; the caller in it is constant
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  Message current_;  // being written while writing_
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::chrono::steady_clock::time_point write_start_ ABSL_GUARDED_BY(mutex_);
  grpc::CallbackServerContext* grpc_context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // until the call is over
  bool cut_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool observes_first_idle_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weightbroker
