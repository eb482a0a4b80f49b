// Weights without a service: the same reader, checks, plan, loader and manifest, in this process and for it alone, in
// host memory or on its GPU.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/src/engine_device.h"
#include "client/src/gpu_room.h"
#include "client/src/weights_state.h"
#include "weightbroker/client.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker::client {

struct DiskRequest {
  v1::WeightSpec spec;
  v1::Environment environment;
  std::map<std::string, std::string> model_roots;  // name -> folder, for models "name:relative/path"
  EngineDevice engine;
  RoomOptions room;  // for a GPU
  int32_t rank = 0;
  int threads = 0;                                       // 0 chooses
  std::function<void(const LoadProgress&)> on_progress;  // may be empty
};

// Loads and seals the weights. Fails as a load by the service does, with the same reasons, and with MODEL_ROOT_UNKNOWN
// for a root that `model_roots` lacks. Thread-safe. `source` is the caller's to set.
absl::StatusOr<std::unique_ptr<WeightsState>> LoadFromDisk(const DiskRequest& request);

}  // namespace weightbroker::client
