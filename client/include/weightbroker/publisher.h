// Puts an engine's own tensors into memory of the service, from where every later start maps them.
//
//   auto weights = client->AttachOrPublish(spec, [&](weightbroker::Publisher& publisher) -> weightbroker::Status {
//     weightbroker::TensorToPublish tensor;
//     tensor.name = "model.norm.weight";
//     tensor.dtype = weightbroker::DataType::kBF16;
//     tensor.shape = {4096};
//     return publisher.Add(tensor, my_norm.data());            // copies; Allocate gives room to write to instead
//   });
//
// With AttachOptions::cuda_device the memory is the GPU's: what Allocate gives are addresses of that GPU, for kernels
// and copies to write to, and Add takes addresses of GPUs as well as of the host. weightbroker/torch.h publishes
// modules and tensors of torch.
//
// Not thread-safe, but different threads may write to what Allocate has given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weightbroker/device.h"
#include "weightbroker/export.h"
#include "weightbroker/status.h"
#include "weightbroker/tensor.h"

namespace weightbroker {

namespace client {
class PublisherState;
}

struct TensorToPublish {
  std::string name;
  DataType dtype = DataType::kUnspecified;
  std::vector<int64_t> shape;
  // In elements, none negative. Empty: contiguous in row-major order. What lies between the elements is published, too.
  std::vector<int64_t> strides;
  TensorKind kind = TensorKind::kParameter;
  // Whatever else is to be known of it, as it is, for instance {"scale_format", "ue8m0"}.
  std::map<std::string, std::string> metadata;
  // The tensor whose memory this one shares, all or a part of it; for AddAlias and for promises.
  std::string alias_of;
};

class WEIGHTBROKER_EXPORT Publisher {
 public:
  explicit Publisher(std::shared_ptr<client::PublisherState> state);  // made by Client::AttachOrPublish only
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;
  ~Publisher();

  // Room for a tensor: zeros, aligned to 256 bytes, to be written to until the loader returns. Null for a tensor
  // without elements. Fails with MANIFEST_INVALID for what cannot be published or is there already, MEMORY_EXHAUSTED,
  // PUBLICATION_UNKNOWN once the service has given the publication up.
  Result<std::byte*> Allocate(const TensorToPublish& tensor);

  // The same, and copies what is there: from the first element to the last. Host memory has been read when it returns.
  // The copy of GPU memory is only queued: see UseStream and Synchronize. Memory of another GPU than this publisher's
  // is copied once that GPU has done all that this process has asked of it, which Add waits for.
  Status Add(const TensorToPublish& tensor, const void* data);

  // On a GPU: has Add queue its copies in `stream` (a CUstream or cudaStream_t of that GPU, null for the default
  // stream) from then on, so that they come after what is queued there already. Without it they have a stream of their
  // own, which waits for what is queued in the default stream, as torch's is, and for nothing else.
  void UseStream(void* stream);

  // On a GPU: waits for every copy, and whatever else this process has queued there. What has been added may be changed
  // or freed only after this, or once the loader has returned; it is waited for before the service takes digests.
  // CUDA_ERROR if anything that was queued failed.
  Status Synchronize();

  // Where the memory lies that Allocate gives.
  Device device() const;

  // A tensor that is a part of the memory of `tensor.alias_of`, which has been added, from `offset_bytes` on.
  Status AddAlias(const TensorToPublish& tensor, int64_t offset_bytes = 0);

  // Counts bytes that the caller has itself copied to what Allocate has given, for copied_bytes.
  void CountCopy(int64_t size_bytes);

  // How many bytes have been copied: 0 for a publisher that only allocates, and computes in place.
  int64_t copied_bytes() const;

 private:
  std::shared_ptr<client::PublisherState> state_;
};

}  // namespace weightbroker
