#include "bench/gpu/torch_step.h"

namespace weightbroker::bench {

void StartTorch() {}

Status BindToTorch(const MappedWeights& /*weights*/) { return Status(); }

}  // namespace weightbroker::bench
