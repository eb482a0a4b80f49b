// A loader that loads nothing: it reads a resident shard and compares every tensor with the digest in its manifest. See
// protos/weightbroker/internal/v1/loader.proto.
//
//   const absl::Status status = RunScrubSession(request, control_fd);    // has told the broker
//
// It blocks until the shard has been read, at the pace that the request allows, with no thread left.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "server/loader/load_memory.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker {

// Ok if every tensor was read, whatever its digest: `before_result` is called just before the result is sent. Any error
// says nothing of the bytes; it is sent as `failed` and returned: PROTOCOL_ERROR if slabs and manifest are not what the
// request says, SYSTEM_ERROR, or for a GPU what mapping its memory fails with, HANDLE_STALE among it.
absl::Status RunScrubSession(
    const internal::v1::LoadRequest& request, int control_fd, const std::function<void()>& before_result = [] {},
    const CudaOpener& open_cuda = LoadCudaDriver);

}  // namespace weightbroker
