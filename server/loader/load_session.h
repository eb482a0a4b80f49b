// A loader's side of the conversation with the broker, from the request to the sealed slabs: see
// protos/weightbroker/internal/v1/loader.proto.
//
//   const absl::Status status = RunLoadSession(RealFileSystem(), request, control_fd);
//   if (!status.ok()) return status;                             // the broker has been told
//
// It blocks until the load has ended, with no thread left. It does not watch for the broker's end while it works:
// whoever runs it in a process of its own does, and ends the process (see main.cc).
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/load/load_engine.h"
#include "server/loader/load_memory.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// Opens and checks the checkpoint, sends `planned`, waits for `proceed`, loads, checks the files once more, seals, and
// sends `sealed`; `before_hand_over` is called just before that, when all that is left is to send. Any error is sent as
// `failed` and returned. SERVICE_UNAVAILABLE if the broker has gone. With CUDA_IPC it then holds the memory as its
// exporter until the other end of the control socket is closed. `open_cuda` is called if the request names GPUs.
absl::Status RunLoadSession(
    FileSystem& file_system, const internal::v1::LoadRequest& request, int control_fd, LoadOptions options = {},
    const std::function<void()>& before_hand_over = [] {}, const CudaOpener& open_cuda = LoadCudaDriver);

// Reads a LoadRequest from a sealed memfd. PROTOCOL_ERROR if it is not sealed or not a LoadRequest.
absl::StatusOr<internal::v1::LoadRequest> ReadLoadRequest(int request_fd);

}  // namespace weightbroker
