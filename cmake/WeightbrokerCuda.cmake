# GPU kernels, compiled by nvcc into images that the driver loads at run time: no program links a library of CUDA, and one
# build runs with and without a driver. Without nvcc there are no images, and the service offers host memory only.

set(WEIGHTBROKER_CUDA AUTO CACHE STRING "Build GPU kernels: ON, OFF, or AUTO, which does if nvcc is found and works")
set_property(CACHE WEIGHTBROKER_CUDA PROPERTY STRINGS AUTO ON OFF)
# The first can be run as they are; GPUs to come translate the last one's PTX.
set(WEIGHTBROKER_CUDA_ARCHITECTURES 80 90 CACHE STRING "Compute capabilities that kernels are compiled for")

# Sets `out` to nvcc with the flags that it needs, or to nothing and `why` to what is wrong with it.
function(weightbroker_find_nvcc out why)
  find_program(WEIGHTBROKER_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(WEIGHTBROKER_NVCC)
  set(${out} "" PARENT_SCOPE)
  if(NOT WEIGHTBROKER_NVCC)
    set(${why} "nvcc was not found" PARENT_SCOPE)
    return()
  endif()
  # Its host compiler only preprocesses: any that it takes will do.
  set(probe ${PROJECT_BINARY_DIR}/nvcc_probe)
  file(WRITE ${probe}.cu "extern \"C\" __global__ void weightbroker_probe(int* out) { *out = 1; }\n")
  foreach(host_compiler "" "-ccbin;${CMAKE_CXX_COMPILER}")
    execute_process(
      COMMAND ${WEIGHTBROKER_NVCC} -fatbin -std=c++17 ${WEIGHTBROKER_CUDA_CODE} ${host_compiler} -o ${probe}.fatbin ${probe}.cu
      RESULT_VARIABLE result OUTPUT_VARIABLE said ERROR_VARIABLE said)
    if(result EQUAL 0)
      set(${out} ${WEIGHTBROKER_NVCC} ${host_compiler} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${why} "${WEIGHTBROKER_NVCC} does not compile a kernel: ${said}" PARENT_SCOPE)
endfunction()

foreach(architecture ${WEIGHTBROKER_CUDA_ARCHITECTURES})
  list(APPEND WEIGHTBROKER_CUDA_CODE -gencode arch=compute_${architecture},code=sm_${architecture})
endforeach()
list(GET WEIGHTBROKER_CUDA_ARCHITECTURES -1 newest)
list(APPEND WEIGHTBROKER_CUDA_CODE -gencode arch=compute_${newest},code=compute_${newest})

set(WEIGHTBROKER_KERNEL_COMPILER "")
set(WEIGHTBROKER_HAS_KERNELS 0)
if(WEIGHTBROKER_CUDA)
  weightbroker_find_nvcc(WEIGHTBROKER_KERNEL_COMPILER why)
  if(WEIGHTBROKER_KERNEL_COMPILER)
    set(WEIGHTBROKER_HAS_KERNELS 1)
    message(STATUS "GPU kernels: with ${WEIGHTBROKER_KERNEL_COMPILER}")
  elseif(WEIGHTBROKER_CUDA STREQUAL "AUTO")
    message(STATUS "GPU kernels: none, host memory only (${why})")
  else()
    message(FATAL_ERROR "WEIGHTBROKER_CUDA is ${WEIGHTBROKER_CUDA}, but ${why}")
  endif()
endif()

# weightbroker_kernel(<target> <name> <file.cu>)  ->  in kernels.cc of the target, WEIGHTBROKER_<NAME>_FATBIN is the path of
# the compiled image. Does nothing without a compiler for it.
function(weightbroker_kernel target name source)
  if(NOT WEIGHTBROKER_KERNEL_COMPILER)
    return()
  endif()
  set(image ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/${source})
  add_custom_command(OUTPUT ${image}
    COMMAND ${WEIGHTBROKER_KERNEL_COMPILER} -fatbin -std=c++17 -O3 --fmad=false --expt-relaxed-constexpr
            ${WEIGHTBROKER_CUDA_CODE} -I ${PROJECT_SOURCE_DIR}
            -MD -MF ${image}.d -o ${image} ${source}
    DEPENDS ${source} DEPFILE ${image}.d
    COMMENT "Compiling GPU kernel ${name}" VERBATIM)
  string(TOUPPER ${name} upper)
  set_property(SOURCE kernels.cc APPEND PROPERTY COMPILE_DEFINITIONS WEIGHTBROKER_${upper}_FATBIN="${image}")
  set_property(SOURCE kernels.cc APPEND PROPERTY OBJECT_DEPENDS ${image})
endfunction()
