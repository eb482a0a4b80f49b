// NVML's library, opened at run time: a machine may have none, or an old one.
//
//   NvmlLibrary library;
//   Calls calls;
//   library.Find("nvmlInit_v2", &calls.init);
//   if (!library.fault().empty()) return Unavailable(library.fault());
//
// It stays open for the life of the process. Not thread-safe.
#pragma once

#include <dlfcn.h>

#include <string>

namespace weightbroker {

// NVML's types under our names, of the same layout.
using NvmlDevice = void*;
using NvmlResult = int;
inline constexpr NvmlResult kNvmlSuccess = 0;

class NvmlLibrary {
 public:
  NvmlLibrary();

  // Sets `*function` to what the library has under that name, or to null.
  template <typename Function>
  void Find(const char* symbol, Function* function) {
    if (handle_ == nullptr) return;
    *reinterpret_cast<void**>(function) = dlsym(handle_, symbol);
    if (*function == nullptr) NoteMissing(symbol);
  }

  // Why there is no library, or the first name that it lacks; empty if all that was looked for is there.
  const std::string& fault() const { return fault_; }

 private:
  void NoteMissing(const char* symbol);

  void* const handle_;
  std::string fault_;
};

}  // namespace weightbroker
