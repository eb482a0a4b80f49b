// A GPU's primary context, the one that CUDA's runtime and torch use as well, without disturbing whose it is.
//
//   ASSIGN_OR_RETURN(const CudaDevice device, FindCudaDevice(cuda, "GPU-..."));   // whatever CUDA_VISIBLE_DEVICES says
//   ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(cuda, device));
//   {
//     const CudaScope current(context);                            // this thread's, until the end of the block
//     RETURN_IF_ERROR(current.status());
//     ... calls on that device ...
//   }                                                              // whatever was current before is so again
//
// CudaContext is thread-safe; a CudaScope belongs to one thread.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/device/cuda_driver.h"

namespace weightbroker {

// The device with this UUID among those that this process sees, under any CUDA_VISIBLE_DEVICES. DEVICE_UNKNOWN listing
// the UUIDs that it does see; DEVICE_UNSUPPORTED if the UUID is of a MIG device.
absl::StatusOr<CudaDevice> FindCudaDevice(CudaDriver& driver, const std::string& uuid);

// The UUID of a device that this process sees.
absl::StatusOr<std::string> UuidOfCudaDevice(CudaDriver& driver, CudaDevice device);

// Holds a device's primary context: creates it if nobody in this process has (110 to 150 ms), else shares it. Copies
// hold the same one; it is given back with the last of them. One that was moved from holds none: nothing else may be
// asked of it.
class CudaContext {
 public:
  CudaContext() = default;  // none
  static absl::StatusOr<CudaContext> Retain(CudaDriver& driver, CudaDevice device);

  bool has_value() const { return state_ != nullptr; }
  CudaDriver& driver() const { return state_->driver; }
  CudaDevice device() const { return state_->device; }
  CudaContextHandle handle() const { return state_->handle; }

 private:
  struct State {
    State(CudaDriver& cuda, CudaDevice on_device, CudaContextHandle context)
        : driver(cuda), device(on_device), handle(context) {}
    ~State();
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    CudaDriver& driver;
    const CudaDevice device;
    const CudaContextHandle handle;
  };

  explicit CudaContext(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  std::shared_ptr<const State> state_;
};

// Makes a context current in this thread while it lives, and the one before it again after.
class CudaScope {
 public:
  explicit CudaScope(const CudaContext& context);
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

  // Not ok if the context could not be made current; then nothing is undone at the end either.
  const absl::Status& status() const { return status_; }

 private:
  const CudaContext context_;
  absl::Status status_;
};

}  // namespace weightbroker
