// A loader that loads nothing: it makes the memory that a publisher writes to, and seals it when the publisher is done.
// See protos/weightbroker/internal/v1/loader.proto.
//
//   const absl::Status status = RunPublishSession(RealFileSystem(), request, control_fd);    // has told the broker
//
// It blocks until the publication has ended, with no thread left; of memory of kind CUDA_IPC until nobody holds the
// other end of the control socket any more. Whoever runs it in a process of its own watches for
// the broker's end: see main.cc.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "common/base/file.h"
#include "server/loader/load_memory.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// Serves commands until the shard has been handed over; `before_hand_over` is called just before that. A command that
// is refused (MEMORY_EXHAUSTED, STILL_WRITABLE, MANIFEST_INVALID, PROMISE_BROKEN) leaves everything as it was, and
// another may follow. Any other error is sent as `failed` and returned: CHECKPOINT_CHANGED, or as CheckQuantization
// where the spec's quantization is the checkpoint's own, or PublishMemory::Create, which `open_cuda` is for.
// SERVICE_UNAVAILABLE if the broker has gone.
absl::Status RunPublishSession(
    FileSystem& file_system, const internal::v1::LoadRequest& request, int control_fd,
    const std::function<void()>& before_hand_over = [] {}, const CudaOpener& open_cuda = LoadCudaDriver);

}  // namespace weightbroker
