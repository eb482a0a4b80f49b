#include "common/device/kernels/kernels.h"

namespace weightbroker {

#if defined(WEIGHTBROKER_DIGEST_FATBIN)

asm(".section .rodata\n"
    ".balign 64\n"
    ".local weightbroker_digest_fatbin\n"
    "weightbroker_digest_fatbin:\n"
    ".incbin \"" WEIGHTBROKER_DIGEST_FATBIN
    "\"\n"
    ".previous\n");

extern "C" __attribute__((visibility("hidden"))) const unsigned char weightbroker_digest_fatbin[];

const void* DigestKernelImage() { return weightbroker_digest_fatbin; }

#else

const void* DigestKernelImage() { return nullptr; }

#endif

}  // namespace weightbroker
