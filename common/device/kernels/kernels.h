// The GPU code that this build has: images that CudaDriver::ModuleLoadData takes. A null pointer in a build without
// CUDA's compiler.
#pragma once

namespace weightbroker {

const void* CopyRunsKernelImage();
const void* DigestKernelImage();
const void* Fp8BlockKernelImage();
const void* ScatterKernelImage();

}  // namespace weightbroker
