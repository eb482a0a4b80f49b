// Holds a model in GPU memory as the simplest hand-over would: one allocation and one CUDA IPC handle for each tensor.
//
//   gpu_tensor_exporter --folder F --tensors N --shards N --bytes N --handles FILE
//
// Prints "ready" once FILE is there, and ends when its standard input does.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "bench/bench_checkpoint.h"
#include "bench/gpu/tensor_handles.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"

namespace weightbroker::bench {
namespace {

struct Flags {
  std::string folder;
  std::string handles;
  BenchCheckpoint checkpoint{.has_holes = true};
};

absl::Status Check(CudaDriver& driver, CudaResult result, const char* call) {
  return result == kCudaSuccess ? absl::OkStatus() : CudaError(driver, result, call, "exporting tensors");
}

// Its first page from the file, and zeros where the file has a hole.
absl::StatusOr<TensorHandle> MakeTensor(CudaDriver& driver, const BenchTensor& tensor) {
  std::vector<char> page(static_cast<size_t>(std::min(tensor.size_bytes, kHolePageBytes)));
  std::ifstream file(tensor.path, std::ios::binary);
  file.seekg(tensor.offset_bytes);
  file.read(page.data(), static_cast<std::streamsize>(page.size()));
  if (!file) return SystemError(tensor.path, EIO);

  TensorHandle made;
  made.size_bytes = tensor.size_bytes;
  CudaDevicePtr address = 0;
  const auto size = static_cast<size_t>(tensor.size_bytes);
  RETURN_IF_ERROR(Check(driver, driver.MemAlloc(size, &address), "cuMemAlloc"));
  RETURN_IF_ERROR(Check(driver, driver.MemsetD8Async(address, 0, size, nullptr), "cuMemsetD8Async"));
  RETURN_IF_ERROR(
      Check(driver, driver.MemcpyHtoDAsync(address, page.data(), page.size(), nullptr), "cuMemcpyHtoDAsync"));
  RETURN_IF_ERROR(Check(driver, driver.CtxSynchronize(), "cuCtxSynchronize"));
  RETURN_IF_ERROR(Check(driver, driver.IpcGetMemHandle(address, &made.handle), "cuIpcGetMemHandle"));
  return made;
}

absl::Status Run(const Flags& flags) {
  ASSIGN_OR_RETURN(CudaDriver* const driver, LoadCudaDriver());
  ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*driver, /*device=*/0));
  const CudaScope current(context);
  RETURN_IF_ERROR(current.status());
  std::vector<TensorHandle> handles;
  for (const BenchTensor& tensor : ListBenchTensors(flags.folder, flags.checkpoint)) {
    ASSIGN_OR_RETURN(const TensorHandle made, MakeTensor(*driver, tensor));
    handles.push_back(made);
  }
  RETURN_IF_ERROR(WriteTensorHandles(flags.handles, handles));
  printf("ready\n");
  fflush(stdout);
  for (char byte = 0; read(STDIN_FILENO, &byte, 1) > 0;) {
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Holds a model in GPU memory, one allocation and one CUDA IPC handle for each tensor.");
  app.add_option("--folder", flags.folder, "The model")->required();
  app.add_option("--handles", flags.handles, "Where to write the handles")->required();
  app.add_option("--bytes", flags.checkpoint.total_bytes, "Of all tensors together");
  app.add_option("--tensors", flags.checkpoint.tensor_count, "How many");
  app.add_option("--shards", flags.checkpoint.shard_count, "How many files");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = weightbroker::bench::Run(flags);
  if (!status.ok()) std::cerr << status.message() << "\n";
  return status.ok() ? 0 : 1;
}
