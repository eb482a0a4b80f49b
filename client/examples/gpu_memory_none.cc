#include "client/examples/gpu_memory.h"

namespace example {
namespace {

constexpr char kNoRuntime[] = "this program was built without CUDA's runtime: it cannot read the memory of a GPU";

}  // namespace

HostCopy::HostCopy(int /*device*/, const std::vector<View>& /*views*/, std::string* error) { *error = kNoRuntime; }

std::string CopyToGpu(int /*device*/, void* /*to*/, const void* /*from*/, size_t /*size*/) { return kNoRuntime; }

IpcSlab::IpcSlab(const std::string& /*gpu_uuid*/, std::string_view /*handle*/, std::string* error) {
  *error = kNoRuntime;
}

IpcSlab::~IpcSlab() = default;

}  // namespace example
