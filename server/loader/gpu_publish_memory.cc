// GPU memory that a publisher writes to: see publish_memory.h.

#include <memory>
#include <string>
#include <utility>

#include "common/base/status_macros.h"
#include "common/device/gpu_digest.h"
#include "server/loader/gpu_shard.h"
#include "server/loader/publish_memory.h"

namespace weightbroker {
namespace {

class GpuPublishMemory : public PublishMemory {
 public:
  GpuPublishMemory(std::unique_ptr<GpuShard> shard, GpuDigester digester, std::string uuid)
      : uuid_(std::move(uuid)), digester_(std::move(digester)), shard_(std::move(shard)) {}

  absl::StatusOr<std::vector<FinishedSlab>> Add(std::span<const int64_t> slab_bytes) override {
    if (slab_bytes.empty()) return std::vector<FinishedSlab>();
    const size_t before = shard_->slabs().size();
    if (const absl::Status added = shard_->Add(slab_bytes); !added.ok()) return WithHolders(added, uuid_);
    auto shared = ShareFrom(before);
    if (!shared.ok()) shard_->UndoAdd();
    return shared;
  }

  std::vector<int64_t> slab_bytes() const override {
    std::vector<int64_t> bytes;
    for (const GpuShard::Slab& slab : shard_->slabs()) bytes.push_back(slab.size_bytes);
    return bytes;
  }

  absl::Status Seal() override { return shard_->Protect(); }

  absl::StatusOr<std::vector<Digest>> DigestsOf(std::span<const v1::Tensor> rows) const override {
    std::vector<GpuRange> ranges;
    for (const v1::Tensor& row : rows) {
      const GpuShard::Slab& slab = shard_->slabs()[static_cast<size_t>(row.slab())];
      ranges.push_back({slab.address + static_cast<CudaDevicePtr>(row.offset_bytes()), row.size_bytes()});
    }
    return digester_.Compute(ranges);
  }

  absl::StatusOr<std::vector<FinishedSlab>> Finish() override { return shard_->Finish(); }

  bool needs_exporter() const override { return shard_->needs_exporter(); }

 private:
  absl::StatusOr<std::vector<FinishedSlab>> ShareFrom(size_t first) const {
    std::vector<FinishedSlab> shared;
    for (size_t i = first; i < shard_->slabs().size(); ++i) {
      ASSIGN_OR_RETURN(shared.emplace_back(), shard_->Share(i));
    }
    return shared;
  }

  const std::string uuid_;
  const GpuDigester digester_;
  std::unique_ptr<GpuShard> shard_;
};

absl::StatusOr<std::unique_ptr<PublishMemory>> Start(const std::string& uuid, v1::HandleKind kind, CudaDriver& cuda) {
  ASSIGN_OR_RETURN(const CudaContext context, ContextOfGpu(cuda, uuid));
  ASSIGN_OR_RETURN(GpuDigester digester, GpuDigester::Create(context));
  ASSIGN_OR_RETURN(std::unique_ptr<GpuShard> shard, GpuShard::Create(context, uuid, kind));
  return std::make_unique<GpuPublishMemory>(std::move(shard), std::move(digester), uuid);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PublishMemory>> PublishOnGpu(const internal::v1::LoadRequest& request,
                                                            CudaDriver& cuda) {
  const std::string& uuid = request.ranks(0).device();
  auto memory = Start(uuid, request.handle_kind(), cuda);
  if (!memory.ok()) return WithHolders(memory.status(), uuid);
  return memory;
}

}  // namespace weightbroker
