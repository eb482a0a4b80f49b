# The torch that the engine's side is compiled against: weightbroker/torch.h, client/examples/torch_engine, their tests.
#
#   cmake --preset release -DWEIGHTBROKER_TORCH=$(python3 -c 'import torch; print(torch.__path__[0])')
#   cmake --preset release -DWEIGHTBROKER_TORCH=$(tests/fetch_torch.sh)      # the part of PyPI's that runs without a GPU
#
# Without it nothing of torch is built. Not find_package(Torch): with a torch that was built for CUDA, as PyPI's is, it
# fails where there is no CUDA toolkit.
#   weightbroker_torch        headers, libtorch_cpu and libc10
#   weightbroker_torch_cuda   the same and torch's CUDA side; only with both that and a CUDA toolkit
set(WEIGHTBROKER_TORCH "" CACHE PATH "The folder of a torch package, with include/ and lib/; empty: build nothing of torch")
if(NOT WEIGHTBROKER_TORCH)
  return()
endif()

function(weightbroker_find_torch_library variable name)
  find_library(${variable} ${name} PATHS ${WEIGHTBROKER_TORCH}/lib NO_DEFAULT_PATH ${ARGN})
  mark_as_advanced(${variable})
endfunction()

weightbroker_find_torch_library(WEIGHTBROKER_TORCH_CPU torch_cpu REQUIRED)
weightbroker_find_torch_library(WEIGHTBROKER_TORCH_C10 c10 REQUIRED)
# By its file: a compiler that came without the shared one links its own statically, and then a stream that one of the two
# has made is destroyed by the other.
find_library(WEIGHTBROKER_TORCH_STDCXX NAMES libstdc++.so.6 REQUIRED)
mark_as_advanced(WEIGHTBROKER_TORCH_STDCXX)
weightbroker_find_torch_library(WEIGHTBROKER_TORCH_CUDA torch_cuda)
weightbroker_find_torch_library(WEIGHTBROKER_TORCH_C10_CUDA c10_cuda)

add_library(weightbroker_torch INTERFACE)
target_include_directories(weightbroker_torch SYSTEM INTERFACE
  ${WEIGHTBROKER_TORCH}/include ${WEIGHTBROKER_TORCH}/include/torch/csrc/api/include)
# What torch's libraries need themselves is found at run time, beside them.
target_link_options(weightbroker_torch INTERFACE -Wl,--allow-shlib-undefined)
target_link_libraries(weightbroker_torch INTERFACE
  ${WEIGHTBROKER_TORCH_CPU} ${WEIGHTBROKER_TORCH_C10} ${WEIGHTBROKER_TORCH_STDCXX})

find_package(CUDAToolkit QUIET)
if(WEIGHTBROKER_TORCH_CUDA AND WEIGHTBROKER_TORCH_C10_CUDA AND CUDAToolkit_FOUND)
  add_library(weightbroker_torch_cuda INTERFACE)
  target_include_directories(weightbroker_torch_cuda SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  # Nothing names a symbol of torch_cuda: its kernels make themselves known when it is loaded.
  target_link_libraries(weightbroker_torch_cuda INTERFACE
    -Wl,--no-as-needed ${WEIGHTBROKER_TORCH_CUDA} -Wl,--as-needed ${WEIGHTBROKER_TORCH_C10_CUDA} weightbroker_torch)
endif()
