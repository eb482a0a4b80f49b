// A shard's weights, mapped into this process for as long as the object lives.
//
//   for (const weightbroker::Tensor& tensor : *weights) Bind(tensor.name, tensor.data, tensor.dtype, tensor.shape);
//   if (auto status = weights->Verify(); !status.ok()) ...   // DIGEST_MISMATCH names the tensor
//   if (weights->lease_lost()) ...                           // the memory stays valid; the service no longer counts us
//
// Move-only. Reading is thread-safe; moving and destroying are not. Destruction unmaps, so no view may outlive it, then
// ends the lease; unless somebody else keeps both: see KeepAlive.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weightbroker/device.h"
#include "weightbroker/export.h"
#include "weightbroker/status.h"
#include "weightbroker/tensor.h"

namespace weightbroker {

namespace client {
struct WeightsState;
}

// Where the weights came from.
enum class SourceKind {
  kAttached,  // the service's memory, shared with every engine that is attached to the same set
  kDisk,      // loaded by this process, for itself alone
};

struct Source {
  SourceKind kind = SourceKind::kDisk;
  // Why not attached: the error that made Attach fall back, or reason MODE_OFF; ok if attached.
  Status why_not_attached;
};

// How long the parts of an Attach took, each from when the service was asked; all 0 from disk. The manifest arrives
// while GPU memory is being mapped.
struct AttachTimes {
  double header_seconds = 0;    // to the lease, and what the memory consists of
  double manifest_seconds = 0;  // to the last tensor's name and place
  double mapped_seconds = 0;    // to the last slab's address
};

class WEIGHTBROKER_EXPORT MappedWeights {
 public:
  explicit MappedWeights(std::unique_ptr<client::WeightsState> state);  // made by Client::Attach only
  MappedWeights(MappedWeights&&) noexcept;
  MappedWeights& operator=(MappedWeights&&) noexcept;
  ~MappedWeights();

  // The tensor of that name, or nullptr. Costs a binary search.
  const Tensor* Find(std::string_view name) const;

  // All tensors, sorted by name byte by byte, aliases among them.
  const std::vector<Tensor>& tensors() const;
  std::vector<Tensor>::const_iterator begin() const { return tensors().begin(); }
  std::vector<Tensor>::const_iterator end() const { return tensors().end(); }

  // The length of all tensors together, aliases not counted.
  int64_t total_bytes() const;

  // Where the tensors' addresses lead: into this process's memory, or into that of a GPU.
  const Device& device() const;

  const Source& source() const;

  // Keeps the memory mapped, and the lease on it, for as long as the result or a copy of it lives, whatever becomes of
  // this object. For views that outlive it: weightbroker/torch.h makes such.
  std::shared_ptr<const void> KeepAlive() const;

  const AttachTimes& attach_times() const;

  // What the weights are: 64 hexadecimal digits, the same for the same files, spec and environment wherever they came
  // from.
  const std::string& fingerprint() const;

  // How often the service has made this fingerprint resident, this time included; 0 from disk.
  int64_t generation() const;

  // Whether the service no longer counts this mapping and will not again: the set was unregistered by force, or no
  // service has renewed the lease in time (AttachOptions::lease_renewal_deadline). What is mapped stays valid. Always
  // false from disk. Never blocks.
  bool lease_lost() const;

  // Ok while the lease is held, else why it is not: it is lost, or was interrupted and is being renewed. Reason
  // DRAINING already from the moment the service says that it takes the set, or itself, down. Never blocks.
  Status lease_status() const;

  // Reads every byte with `threads` threads (0: one for each processor, at most 16) and compares each tensor's digest
  // with the manifest's. DIGEST_MISMATCH names the first tensor, by name, that differs, with both digests.
  Status Verify(int threads = 0) const;

 private:
  std::shared_ptr<client::WeightsState> state_;
};

}  // namespace weightbroker
