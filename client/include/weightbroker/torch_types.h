// What weightbroker/torch.h and weightbroker/torch_publish.h share: types, devices and modules in torch's words.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <exception>
#include <string>
#include <vector>

#include "weightbroker/device.h"
#include "weightbroker/status.h"
#include "weightbroker/tensor.h"

namespace weightbroker {

// What torch calls an element type; at::ScalarType::Undefined for a number that is none.
inline at::ScalarType ToScalarType(DataType dtype);

// The other way round; DataType::kUnspecified for a type that cannot be served.
inline DataType FromScalarType(at::ScalarType dtype);

// ---------------------------------------------------------------------------------------------------------------------

namespace torch_internal {

// Runs `function`, which gives a Result or a Status: nothing that torch throws passes our API.
template <typename Function>
auto CatchingErrors(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, "TORCH_ERROR", std::string("torch refused: ") + error.what());
  }
}

inline at::Device DeviceOf(const Device& device) {
  if (device.kind == DeviceKind::kHost) return at::Device(at::kCPU);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device.ordinal));
}

// A parameter or buffer of a module.
struct Slot {
  std::string name;
  at::Tensor tensor;
  TensorKind kind = TensorKind::kUnspecified;
};

inline std::vector<Slot> SlotsOf(const torch::nn::Module& module) {
  std::vector<Slot> slots;
  for (const auto& item : module.named_parameters())
    slots.push_back({item.key(), item.value(), TensorKind::kParameter});
  for (const auto& item : module.named_buffers()) slots.push_back({item.key(), item.value(), TensorKind::kBuffer});
  return slots;
}

// Makes whatever the module's code keeps a handle of be `tensor`: its own members are other handles of the same
// implementation, so what is replaced is what all handles lead to. set_data would do that, but refuses to take a tensor
// from the meta device to another. Not under inference mode, whose tensors are of another kind.
inline void Replace(at::Tensor slot, const at::Tensor& tensor) {
  slot.set_requires_grad(false);
  slot.unsafeGetTensorImpl()->shallow_copy_from(tensor.getIntrusivePtr());
}

}  // namespace torch_internal

inline at::ScalarType ToScalarType(DataType dtype) {
  switch (dtype) {
    case DataType::kBool:
      return at::ScalarType::Bool;
    case DataType::kU8:
      return at::ScalarType::Byte;
    case DataType::kI8:
      return at::ScalarType::Char;
    case DataType::kU16:
      return at::ScalarType::UInt16;
    case DataType::kI16:
      return at::ScalarType::Short;
    case DataType::kU32:
      return at::ScalarType::UInt32;
    case DataType::kI32:
      return at::ScalarType::Int;
    case DataType::kU64:
      return at::ScalarType::UInt64;
    case DataType::kI64:
      return at::ScalarType::Long;
    case DataType::kF8E4M3:
      return at::ScalarType::Float8_e4m3fn;
    case DataType::kF16:
      return at::ScalarType::Half;
    case DataType::kBF16:
      return at::ScalarType::BFloat16;
    case DataType::kF32:
      return at::ScalarType::Float;
    case DataType::kF64:
      return at::ScalarType::Double;
    case DataType::kUnspecified:
      break;
  }
  return at::ScalarType::Undefined;
}

inline DataType FromScalarType(at::ScalarType dtype) {
  for (int number = static_cast<int>(DataType::kBool); number <= static_cast<int>(DataType::kF64); ++number) {
    if (ToScalarType(static_cast<DataType>(number)) == dtype) return static_cast<DataType>(number);
  }
  return DataType::kUnspecified;
}

}  // namespace weightbroker
