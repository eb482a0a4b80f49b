#include "bench/load/gpu_verify.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/read_fd.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"
#include "common/device/gpu_digest.h"
#include "common/memory/cuda_slab.h"
#include "common/memory/digest.h"
#include "common/plan/manifest.h"

namespace weightbroker::bench {
namespace {

constexpr int kManifestFd = 3;  // the slabs' follow

absl::StatusOr<std::vector<CudaReservation>> MapSlabs(const CudaContext& context, std::span<const int64_t> slab_bytes) {
  std::vector<CudaReservation> mapped;
  int fd = kManifestFd + 1;
  for (const int64_t size_bytes : slab_bytes) {
    ASSIGN_OR_RETURN(const CudaVmmMemory memory, CudaVmmMemory::Import(context, fd++, size_bytes));
    ASSIGN_OR_RETURN(CudaReservation range, CudaReservation::Reserve(context, size_bytes));
    RETURN_IF_ERROR(range.Map(0, memory, CudaAccess::kRead));
    mapped.push_back(std::move(range));
  }
  return mapped;
}

std::string BytesOf(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

}  // namespace

absl::Status VerifyInFreshProcess(const GpuShardView& shard) {
  std::vector<FdMapping> fds = {{shard.manifest_fd, kManifestFd}};
  for (const UniqueFd& slab : shard.slabs) fds.push_back({slab.get(), kManifestFd + static_cast<int>(fds.size())});
  const Task task{
      .kind = "verify_gpu", .bytes = shard.manifest_bytes, .devices = {shard.device}, .slab_bytes = shard.slab_bytes};
  return RunTaskInFreshProcess(task, std::move(fds)).status();
}

absl::StatusOr<nlohmann::ordered_json> VerifyGpuMemory(const Task& task) {
  const std::string& uuid = task.devices.front();
  setenv("CUDA_VISIBLE_DEVICES", uuid.c_str(), 1);
  ASSIGN_OR_RETURN(const std::string manifest,
                   ReadFd(kManifestFd, static_cast<size_t>(task.bytes), "reading the manifest"));
  ASSIGN_OR_RETURN(const std::vector<v1::Tensor> rows, ParseManifest(manifest));
  ASSIGN_OR_RETURN(CudaDriver* const cuda, LoadCudaDriver());
  ASSIGN_OR_RETURN(const CudaDevice device, FindCudaDevice(*cuda, uuid));
  ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*cuda, device));
  ASSIGN_OR_RETURN(const std::vector<CudaReservation> slabs, MapSlabs(context, task.slab_bytes));
  std::vector<GpuRange> ranges;
  for (const v1::Tensor& row : rows) {
    const CudaDevicePtr slab = slabs[static_cast<size_t>(row.slab())].address();
    ranges.push_back({slab + static_cast<CudaDevicePtr>(row.offset_bytes()), row.size_bytes()});
  }
  ASSIGN_OR_RETURN(const GpuDigester digester, GpuDigester::Create(context));
  ASSIGN_OR_RETURN(const std::vector<Digest> digests, digester.Compute(ranges));
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].digest() == BytesOf(digests[i])) continue;
    return MakeError(Reason::kDigestMismatch,
                     absl::StrCat(rows[i].name(), " in GPU memory is not what its manifest says"));
  }
  return nlohmann::ordered_json{{"tensors", rows.size()}};
}

}  // namespace weightbroker::bench
