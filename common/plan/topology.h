// Which part of everything a rank holds. Ranks are numbered with the tensor parallel ones innermost:
//   rank = (stage * data_parallel_size + replica) * tensor_parallel_size + tensor rank
// Thread-safe: pure functions.
#pragma once

#include <cstdint>

#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// One of `size` ranks among which something is split.
struct Place {
  int64_t index = 0;
  int64_t size = 1;
};

struct RankPlaces {
  Place stage;         // of the pipeline
  Place tensor;        // of everything but experts
  Place expert_group;  // each has a contiguous range of the experts
  Place expert_part;   // within its group, of each expert
};

// Of a completed spec; `rank` is one of its ranks.
RankPlaces PlacesOf(const v1::WeightSpec& spec, int32_t rank);

struct LayerRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The layers of a stage: as even as can be. What is left over goes to the stages before the last one, since the first
// and the last have an embedding and a head besides. There are no fewer layers than stages.
LayerRange LayersOf(int64_t layer_count, const Place& stage);

}  // namespace weightbroker
