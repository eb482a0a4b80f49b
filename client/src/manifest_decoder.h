// Turns the manifest's messages into tensors with addresses, trusting nothing in them: what passes lies inside the
// slabs. Only the slabs' sizes are needed until the end, so that memory can be mapped while messages arrive.
//
//   ManifestDecoder decoder(slab_bytes, header.tensor_count());
//   RETURN_IF_ERROR(decoder.Add(std::move(message)));          // one serialized v1.ExportResponse with `manifest` set
//   ASSIGN_OR_RETURN(Manifest manifest, std::move(decoder).Finish(memory->slabs()));
//
// Names stay where they arrived, so a tensor costs no allocation. Not thread-safe; a Manifest is immutable.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/export_stream.h"
#include "client/src/shard_memory.h"
#include "weightbroker/tensor.h"

namespace weightbroker::client {

// Hands out room for dimensions that never moves.
class DimensionPool {
 public:
  Dimensions Copy(const std::vector<int64_t>& dimensions);

 private:
  static constexpr size_t kBlockSize = 4096;

  std::vector<std::unique_ptr<int64_t[]>> blocks_;
  int64_t* next_ = nullptr;
  size_t left_ = 0;
};

struct Manifest {
  std::vector<RawMessage> messages;  // where names live
  DimensionPool dimensions;          // where shapes live
  std::vector<Tensor> tensors;       // sorted by name
  int64_t total_bytes = 0;           // aliases not counted
};

// The tensor of that name, or nullptr.
const Tensor* FindTensor(const std::vector<Tensor>& tensors, std::string_view name);

class ManifestDecoder {
 public:
  ManifestDecoder(std::vector<int64_t> slab_bytes, int64_t tensor_count);

  // PROTOCOL_ERROR naming the tensor and what is wrong with it.
  absl::Status Add(RawMessage message);

  // Whether all tensors that were announced have been added.
  bool complete() const { return static_cast<int64_t>(manifest_.tensors.size()) == tensor_count_; }

  // Gives every tensor its address in `slabs`, which are those whose sizes were given. PROTOCOL_ERROR if tensors are
  // missing, or an alias does not share its tensor's memory.
  absl::StatusOr<Manifest> Finish(std::span<const SlabView> slabs) &&;

 private:
  struct Row;
  struct Place {
    size_t slab = 0;
    int64_t offset_bytes = 0;
  };

  absl::Status AddChunk(std::string_view chunk);
  absl::Status AddRow(std::string_view bytes);
  absl::Status ParseRow(std::string_view bytes, Row* row);
  absl::Status CheckRow(const Row& row) const;
  absl::Status CheckAliases() const;

  const std::vector<int64_t> slab_bytes_;
  const int64_t tensor_count_;
  std::vector<int64_t> shape_;    // of the row in hand; kept for its memory
  std::vector<int64_t> strides_;  // likewise
  std::vector<Place> places_;     // of each tensor so far
  Manifest manifest_;
};

}  // namespace weightbroker::client
