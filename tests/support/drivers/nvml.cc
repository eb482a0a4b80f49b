// A libnvidia-ml.so.1 for machines without a GPU: two GPUs, of which the second is partitioned, and seventy processes
// on the first. It has its own idea of NVML's types, from NVML's documentation.
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kInsufficientSize = 7;
constexpr unsigned kProcesses = 70;

// Handles are pointers that nobody looks behind.
char g_gpus[2];
int IndexOf(void* device) { return device == &g_gpus[1] ? 1 : 0; }

struct Memory {
  unsigned long long total, free, used;
};

struct ProcessInfo {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};

}  // namespace

extern "C" {

int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }
const char* nvmlErrorString(int) { return "an error"; }

int nvmlSystemGetDriverVersion(char* text, unsigned size) {
  std::snprintf(text, size, "580.00.1");
  return kSuccess;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = 2;
  return kSuccess;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = &g_gpus[index];
  return kSuccess;
}

int nvmlDeviceGetUUID(void* device, char* text, unsigned size) {
  std::snprintf(text, size, "GPU-0000000%d-0000-0000-0000-000000000000", IndexOf(device) + 1);
  return kSuccess;
}

int nvmlDeviceGetName(void*, char* text, unsigned size) {
  std::snprintf(text, size, "NVIDIA Pretended");
  return kSuccess;
}

int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return kSuccess;
}

int nvmlDeviceGetMemoryInfo(void*, void* memory) {
  *static_cast<Memory*>(memory) = {8ULL << 30, 6ULL << 30, 2ULL << 30};
  return kSuccess;
}

int nvmlDeviceGetMigMode(void* device, unsigned* current, unsigned* pending) {
  if (IndexOf(device) == 0) return kNotSupported;
  *current = *pending = 1;
  return kSuccess;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* list) {
  auto* const processes = static_cast<ProcessInfo*>(list);
  const unsigned there = IndexOf(device) == 0 ? kProcesses : 0;
  const unsigned room = *count;
  *count = there;
  if (room < there) return kInsufficientSize;
  for (unsigned i = 0; i < there; ++i) processes[i] = {1000 + i, i == 0 ? ~0ULL : i << 20, ~0U, ~0U};
  return kSuccess;
}

}  // extern "C"

// The events of the first GPU are those that $WEIGHTBROKER_TEST_XIDS lists, each once; the second has none.
namespace {

struct EventData {
  void* device;
  unsigned long long type;
  unsigned long long data;
  unsigned gpu_instance, compute_instance;
};

constexpr int kTimeout = 10;
constexpr unsigned long long kDoubleBitEcc = 2;
constexpr unsigned long long kXid = 8;
const char* g_next_xid = nullptr;

}  // namespace

extern "C" {

int nvmlEventSetCreate(void** set) {
  g_next_xid = std::getenv("WEIGHTBROKER_TEST_XIDS");
  *set = &g_next_xid;
  return kSuccess;
}

int nvmlEventSetFree(void*) { return kSuccess; }

int nvmlDeviceGetSupportedEventTypes(void* device, unsigned long long* types) {
  if (IndexOf(device) != 0) return kNotSupported;
  *types = kXid | kDoubleBitEcc;
  return kSuccess;
}

int nvmlDeviceRegisterEvents(void* device, unsigned long long, void*) {
  return IndexOf(device) == 0 ? kSuccess : kNotSupported;
}

int nvmlEventSetWait_v2(void*, void* data, unsigned) {
  if (g_next_xid == nullptr || *g_next_xid == '\0') return kTimeout;
  char* end = nullptr;
  const unsigned long long xid = std::strtoull(g_next_xid, &end, 10);
  g_next_xid = *end == ',' ? end + 1 : end;
  *static_cast<EventData*>(data) = {&g_gpus[0], xid == 0 ? kDoubleBitEcc : kXid, xid, ~0U, ~0U};
  return kSuccess;
}

}  // extern "C"
