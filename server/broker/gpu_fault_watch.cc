#include "server/broker/gpu_fault_watch.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/thread.h"

namespace weightbroker {
namespace {

constexpr std::chrono::milliseconds kPatience(50);  // how long a broker that ends waits for the watch

}  // namespace

GpuFaultWatch::GpuFaultWatch(Open open, std::function<void(const GpuEvent&)> on_fault)
    : open_(std::move(open)), on_fault_(std::move(on_fault)) {
  if (open_) thread_ = StartThreadOrExit("faults of GPUs", [this] { Run(); });
}

GpuFaultWatch::~GpuFaultWatch() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void GpuFaultWatch::Run() {
  auto events = open_();
  if (!events.ok()) return GiveUp(events.status());
  if (*events == nullptr) return;
  if (const std::string unwatched = (*events)->unwatched(); !unwatched.empty()) {
    GiveUp(MakeError(Reason::kGpuUnavailable, absl::StrCat("these GPUs report none: ", unwatched)));
  }
  while (!stopping_) {
    const auto event = (*events)->Wait(kPatience);
    if (!event.ok()) return GiveUp(event.status());
    if (event->has_value()) OnEvent(**event);
  }
}

void GpuFaultWatch::GiveUp(const absl::Status& why) {
  unwatched_ = true;
  Log(LogLevel::kWarning, "gpu.faults_unwatched",
      {{"reason", GetErrorDetails(why).reason}, {"message", std::string(why.message())}});
}

void GpuFaultWatch::OnEvent(const GpuEvent& event) {
  const bool damage = MeansDamage(event);
  Log(damage ? LogLevel::kError : LogLevel::kWarning, damage ? "gpu.fault" : "gpu.event",
      {{"gpu_uuid", event.uuid},
       {"kind", GpuEventKindName(event.kind)},
       {"xid", absl::StrCat(event.xid)},
       {"damage", damage ? "true" : "false"}});
  if (damage) on_fault_(event);
}

}  // namespace weightbroker
