#include "common/device/nvml_library.h"

#include "absl/strings/str_cat.h"

namespace weightbroker {
namespace {

constexpr char kLibrary[] = "libnvidia-ml.so.1";

}  // namespace

NvmlLibrary::NvmlLibrary() : handle_(dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ != nullptr) return;
  const char* const said = dlerror();
  fault_ = said != nullptr ? said : kLibrary;
}

void NvmlLibrary::NoteMissing(const char* symbol) {
  if (fault_.empty()) fault_ = absl::StrCat(kLibrary, " has no ", symbol, ": the driver is too old");
}

}  // namespace weightbroker
