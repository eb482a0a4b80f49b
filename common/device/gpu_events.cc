#include "common/device/gpu_events.h"

#include <algorithm>
#include <iterator>

namespace weightbroker {
namespace {

// What a program of its own did wrong, as NVIDIA's device plugin for Kubernetes has it: the GPU is sound.
constexpr uint64_t kXidsOfPrograms[] = {13, 31, 43, 45, 68, 109};

}  // namespace

std::string GpuEventKindName(GpuEvent::Kind kind) { return kind == GpuEvent::Kind::kXid ? "xid" : "double_bit_ecc"; }

bool MeansDamage(const GpuEvent& event) {
  return event.kind == GpuEvent::Kind::kDoubleBitEcc ||
         std::find(std::begin(kXidsOfPrograms), std::end(kXidsOfPrograms), event.xid) == std::end(kXidsOfPrograms);
}

}  // namespace weightbroker
