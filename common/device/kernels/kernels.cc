#include "common/device/kernels/kernels.h"

// An image becomes read-only data of this object file, under a name of its own.
#define WEIGHTBROKER_IMAGE(name, path) \
  asm(".section .rodata\n"             \
      ".balign 64\n"                   \
      ".local " name "\n" name         \
      ":\n"                            \
      ".incbin \"" path                \
      "\"\n"                           \
      ".previous\n")

#if defined(WEIGHTBROKER_DIGEST_FATBIN)
WEIGHTBROKER_IMAGE("weightbroker_copy_runs_fatbin", WEIGHTBROKER_COPY_RUNS_FATBIN);
WEIGHTBROKER_IMAGE("weightbroker_digest_fatbin", WEIGHTBROKER_DIGEST_FATBIN);
WEIGHTBROKER_IMAGE("weightbroker_fp8_block_fatbin", WEIGHTBROKER_FP8_BLOCK_FATBIN);
WEIGHTBROKER_IMAGE("weightbroker_scatter_fatbin", WEIGHTBROKER_SCATTER_FATBIN);
extern "C" __attribute__((visibility("hidden"))) const unsigned char weightbroker_copy_runs_fatbin[];
extern "C" __attribute__((visibility("hidden"))) const unsigned char weightbroker_digest_fatbin[];
extern "C" __attribute__((visibility("hidden"))) const unsigned char weightbroker_fp8_block_fatbin[];
extern "C" __attribute__((visibility("hidden"))) const unsigned char weightbroker_scatter_fatbin[];
#endif

namespace weightbroker {

#if defined(WEIGHTBROKER_DIGEST_FATBIN)
const void* CopyRunsKernelImage() { return weightbroker_copy_runs_fatbin; }
const void* DigestKernelImage() { return weightbroker_digest_fatbin; }
const void* Fp8BlockKernelImage() { return weightbroker_fp8_block_fatbin; }
const void* ScatterKernelImage() { return weightbroker_scatter_fatbin; }
#else
const void* CopyRunsKernelImage() { return nullptr; }
const void* DigestKernelImage() { return nullptr; }
const void* Fp8BlockKernelImage() { return nullptr; }
const void* ScatterKernelImage() { return nullptr; }
#endif

}  // namespace weightbroker
