// What can be said of a GPU memory's descriptor without CUDA, for processes that hold such descriptors and must not
// have a context: that it is the NVIDIA driver's and nothing else. That it is memory, of which size and on which GPU,
// only a process with CUDA can tell, when it imports it. Thread-safe.
#pragma once

#include "absl/status/status.h"

namespace weightbroker {

// Ok if `fd` is of the NVIDIA driver's: a character device of its major number, 195, or named /dev/nvidia..., or a
// dma-buf. PROTOCOL_ERROR naming what it is otherwise: a memfd, a file, a socket.
absl::Status CheckGpuMemoryFd(int fd);

}  // namespace weightbroker
