#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/gpu_events.h"
#include "common/device/nvml_library.h"

namespace weightbroker {
namespace {

// NVML's types under our names, of the same layout.
using NvmlEventSet = void*;
constexpr NvmlResult kNvmlTimeout = 10;
constexpr unsigned long long kDoubleBitEcc = 0x2;
constexpr unsigned long long kXidCritical = 0x8;

struct NvmlEventData {
  NvmlDevice device;
  unsigned long long type;
  unsigned long long data;
  unsigned gpu_instance, compute_instance;
};

// X(member, symbol, parameters). What points to one of the structures above is a void*: their types are not the
// library's.
#define WEIGHTBROKER_NVML_EVENT_CALLS(X)                                                         \
  X(init, "nvmlInit_v2", ())                                                                     \
  X(shutdown, "nvmlShutdown", ())                                                                \
  X(device_count, "nvmlDeviceGetCount_v2", (unsigned*))                                          \
  X(handle_by_index, "nvmlDeviceGetHandleByIndex_v2", (unsigned, NvmlDevice*))                   \
  X(uuid, "nvmlDeviceGetUUID", (NvmlDevice, char*, unsigned))                                    \
  X(supported, "nvmlDeviceGetSupportedEventTypes", (NvmlDevice, unsigned long long*))            \
  X(create_set, "nvmlEventSetCreate", (NvmlEventSet*))                                           \
  X(free_set, "nvmlEventSetFree", (NvmlEventSet))                                                \
  X(register_events, "nvmlDeviceRegisterEvents", (NvmlDevice, unsigned long long, NvmlEventSet)) \
  X(wait, "nvmlEventSetWait_v2", (NvmlEventSet, void*, unsigned))

struct Calls {
#define WEIGHTBROKER_NVML_MEMBER(member, symbol, parameters) NvmlResult(*member) parameters = nullptr;
  WEIGHTBROKER_NVML_EVENT_CALLS(WEIGHTBROKER_NVML_MEMBER)
#undef WEIGHTBROKER_NVML_MEMBER
  const char* (*error_string)(NvmlResult) = nullptr;
};

absl::Status Unavailable(const std::string& what) {
  return MakeError(Reason::kGpuUnavailable, absl::StrCat("faults of GPUs cannot be watched: ", what));
}

class NvmlEvents : public GpuEventSource {
 public:
  explicit NvmlEvents(const Calls& calls) : calls_(calls) {}
  ~NvmlEvents() override {
    if (set_ != nullptr) calls_.free_set(set_);
    if (initialized_) calls_.shutdown();
  }

  absl::Status Start() {
    RETURN_IF_ERROR(Check(calls_.init(), "nvmlInit"));
    initialized_ = true;
    RETURN_IF_ERROR(Check(calls_.create_set(&set_), "nvmlEventSetCreate"));
    unsigned count = 0;
    RETURN_IF_ERROR(Check(calls_.device_count(&count), "nvmlDeviceGetCount"));
    for (unsigned index = 0; index < count; ++index) RETURN_IF_ERROR(Add(index));
    if (watched_ > 0) return absl::OkStatus();
    return Unavailable(count == 0 ? "there is no GPU" : absl::StrCat("no GPU reports them, of ", unwatched_));
  }

  absl::StatusOr<std::optional<GpuEvent>> Wait(std::chrono::milliseconds timeout) override {
    NvmlEventData data = {};
    const NvmlResult result = calls_.wait(set_, &data, static_cast<unsigned>(timeout.count()));
    if (result == kNvmlTimeout) return std::nullopt;
    RETURN_IF_ERROR(Check(result, "nvmlEventSetWait"));
    GpuEvent event;
    event.kind = (data.type & kDoubleBitEcc) != 0 ? GpuEvent::Kind::kDoubleBitEcc : GpuEvent::Kind::kXid;
    event.xid = event.kind == GpuEvent::Kind::kXid ? data.data : 0;
    const auto known = uuids_.find(data.device);
    if (known != uuids_.end()) event.uuid = known->second;
    return event;
  }

  std::string unwatched() const override { return unwatched_; }

 private:
  absl::Status Check(NvmlResult result, const char* call) const {
    if (result == kNvmlSuccess) return absl::OkStatus();
    return MakeError(Reason::kCudaError, absl::StrCat(call, ": ", calls_.error_string(result)),
                     {{"call", call}, {"result", absl::StrCat(result)}});
  }

  absl::Status Add(unsigned index) {
    NvmlDevice device = nullptr;
    RETURN_IF_ERROR(Check(calls_.handle_by_index(index, &device), "nvmlDeviceGetHandleByIndex"));
    char uuid[128] = "";
    RETURN_IF_ERROR(Check(calls_.uuid(device, uuid, sizeof(uuid)), "nvmlDeviceGetUUID"));
    uuids_[device] = uuid;
    unsigned long long supported = 0;
    if (calls_.supported(device, &supported) != kNvmlSuccess) supported = 0;
    const unsigned long long wanted = supported & (kDoubleBitEcc | kXidCritical);
    if (wanted != 0 && calls_.register_events(device, wanted, set_) == kNvmlSuccess) {
      ++watched_;
    } else {
      absl::StrAppend(&unwatched_, unwatched_.empty() ? "" : ",", uuid);
    }
    return absl::OkStatus();
  }

  const Calls calls_;
  bool initialized_ = false;
  NvmlEventSet set_ = nullptr;
  std::map<NvmlDevice, std::string> uuids_;
  int watched_ = 0;
  std::string unwatched_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuEventSource>> OpenNvmlEvents() {
  NvmlLibrary library;
  Calls calls;
  library.Find("nvmlErrorString", &calls.error_string);
#define WEIGHTBROKER_NVML_FIND(member, symbol, parameters) library.Find(symbol, &calls.member);
  WEIGHTBROKER_NVML_EVENT_CALLS(WEIGHTBROKER_NVML_FIND)
#undef WEIGHTBROKER_NVML_FIND
  if (!library.fault().empty()) return Unavailable(library.fault());
  auto events = std::make_unique<NvmlEvents>(calls);
  RETURN_IF_ERROR(events->Start());
  return events;
}

}  // namespace weightbroker
