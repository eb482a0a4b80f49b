#include "bench/load/pinned_copy.h"

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_join.h"
#include "bench/bench_support.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"

namespace weightbroker::bench {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int kMaxStreams = 4;
constexpr int64_t kMaxChunkBytes = 64 * kMiB;
constexpr int kBuffersPerStream = 2;
constexpr int64_t kTargetBytes = 1024 * kMiB;  // on the GPU; written again and again

struct Method {
  int streams;
  int64_t chunk_bytes;
};

// One GPU with its streams, its target, and pinned memory that has been touched.
class Copier {
 public:
  static absl::StatusOr<std::unique_ptr<Copier>> Create(CudaDriver& cuda, const std::string& uuid) {
    ASSIGN_OR_RETURN(const CudaDevice device, FindCudaDevice(cuda, uuid));
    ASSIGN_OR_RETURN(CudaContext context, CudaContext::Retain(cuda, device));
    auto copier = std::make_unique<Copier>(std::move(context));
    RETURN_IF_ERROR(copier->Prepare());
    return copier;
  }

  explicit Copier(CudaContext context) : context_(std::move(context)), cuda_(context_.driver()) {}

  // Every buffer is used again when the copy from it has ended, which the stream's order sees to.
  absl::Status Copy(const Method& method, int64_t bytes) {
    const CudaScope current(context_);
    RETURN_IF_ERROR(current.status());
    int64_t target = 0;
    for (int64_t done = 0, i = 0; done < bytes; done += method.chunk_bytes, ++i) {
      const auto stream = static_cast<size_t>(i % method.streams);
      const int64_t buffer = i % (method.streams * kBuffersPerStream);
      RETURN_IF_ERROR(Check(
          cuda_.MemcpyHtoDAsync(target_ + static_cast<CudaDevicePtr>(target), pinned_ + buffer * method.chunk_bytes,
                                static_cast<size_t>(method.chunk_bytes), streams_[stream]),
          "cuMemcpyHtoDAsync"));
      target = (target + method.chunk_bytes) % kTargetBytes;
    }
    for (CudaStream stream : streams_) RETURN_IF_ERROR(Check(cuda_.StreamSynchronize(stream), "cuStreamSynchronize"));
    return absl::OkStatus();
  }

 private:
  absl::Status Prepare() {
    const CudaScope current(context_);
    RETURN_IF_ERROR(current.status());
    constexpr size_t kPinnedBytes = kMaxStreams * kBuffersPerStream * kMaxChunkBytes;
    void* data = nullptr;
    RETURN_IF_ERROR(Check(cuda_.MemHostAlloc(kPinnedBytes, kCudaHostAllocPortable, &data), "cuMemHostAlloc"));
    std::memset(data, 0x5A, kPinnedBytes);
    pinned_ = static_cast<std::byte*>(data);  // goes with the process, as all of this
    RETURN_IF_ERROR(Check(cuda_.MemAlloc(kTargetBytes, &target_), "cuMemAlloc"));
    for (CudaStream& stream : streams_) {
      RETURN_IF_ERROR(Check(cuda_.StreamCreate(kCudaStreamNonBlocking, &stream), "cuStreamCreate"));
    }
    return Copy({kMaxStreams, kMaxChunkBytes}, kTargetBytes);
  }

  absl::Status Check(CudaResult result, const char* call) {
    return result == kCudaSuccess ? absl::OkStatus() : CudaError(cuda_, result, call, "measuring copies");
  }

  const CudaContext context_;
  CudaDriver& cuda_;
  CudaDevicePtr target_ = 0;
  std::byte* pinned_ = nullptr;
  std::vector<CudaStream> streams_ = std::vector<CudaStream>(kMaxStreams);
};

// A thread for each GPU; they start at the same moment.
absl::StatusOr<double> TimeCopies(const std::vector<std::unique_ptr<Copier>>& copiers, const Method& method,
                                  int64_t bytes) {
  std::barrier ready(static_cast<std::ptrdiff_t>(copiers.size()) + 1);
  std::vector<absl::Status> results(copiers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < copiers.size(); ++i) {
    threads.emplace_back([&, i] {
      ready.arrive_and_wait();
      results[i] = copiers[i]->Copy(method, bytes);
    });
  }
  ready.arrive_and_wait();
  const double start = NowSeconds();
  for (std::thread& thread : threads) thread.join();
  const double seconds = NowSeconds() - start;
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  return seconds;
}

std::vector<Method> MethodsOf(const Task& task) {
  if (task.chunk_bytes > 0) return {{task.threads, task.chunk_bytes}};
  std::vector<Method> methods;
  for (const int streams : {1, 2, kMaxStreams}) {
    for (const int64_t chunk : {kMiB, 4 * kMiB, 16 * kMiB, kMaxChunkBytes}) methods.push_back({streams, chunk});
  }
  return methods;
}

}  // namespace

absl::StatusOr<nlohmann::ordered_json> CopyToGpus(const Task& task) {
  setenv("CUDA_VISIBLE_DEVICES", absl::StrJoin(task.devices, ",").c_str(), 1);
  ASSIGN_OR_RETURN(CudaDriver* const cuda, LoadCudaDriver());
  std::vector<std::unique_ptr<Copier>> copiers;
  for (const std::string& uuid : task.devices) {
    ASSIGN_OR_RETURN(copiers.emplace_back(), Copier::Create(*cuda, uuid));
  }
  Method best{};
  double best_seconds = 0;
  for (const Method& method : MethodsOf(task)) {
    ASSIGN_OR_RETURN(const double seconds, TimeCopies(copiers, method, task.bytes));
    if (best_seconds == 0 || seconds < best_seconds) {
      best = method;
      best_seconds = seconds;
    }
  }
  return nlohmann::ordered_json{{"seconds", best_seconds},
                                {"bytes", task.bytes * static_cast<int64_t>(copiers.size())},
                                {"threads", best.streams},
                                {"chunk_bytes", best.chunk_bytes}};
}

}  // namespace weightbroker::bench
