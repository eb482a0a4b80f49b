// Marks a function that a GPU's compiler compiles for both sides. Includes nothing.
#pragma once

#if defined(__CUDACC__)
#define WEIGHTBROKER_HOST_DEVICE __host__ __device__
#else
#define WEIGHTBROKER_HOST_DEVICE
#endif
