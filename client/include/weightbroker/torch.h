// Mapped weights as torch tensors, and as the parameters of a module that was built without storage for them. Nothing
// is copied. The engine compiles this header against its own torch (2.7 or later); the library knows no torch.
//
//   auto weights = client->Attach(spec, attach);
//   if (!weights.ok()) return Fail(weights.status());
//   auto model = std::make_shared<Llama>(config, at::kMeta);          // every parameter and buffer on the meta device
//   if (auto status = weightbroker::BindModule(*model, *weights); !status.ok()) return Fail(status);
//   model->eval(); ...                                                // `weights` may go: the tensors hold the mapping
//
// or one by one:
//   auto embedding = weightbroker::ToTorch(*weights, "model.embed_tokens.weight");    // TENSOR_UNKNOWN
//
// An engine whose weights are its own publishes them: see weightbroker/torch_publish.h, which this header includes.
//
// Tensors share the mapping, so each keeps all of it and its lease until the last of them has gone. They are
// read-only in fact, which torch does not know: writing to one in place ends the process (host), or puts its CUDA
// context into an error that nothing but the end of the process cures (GPU).
//
// Include it in no translation unit that includes protobuf's or gRPC's headers: torch brings another protobuf along.
// C++17. Thread-safe as far as torch is: different modules may be bound by different threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "weightbroker/mapped_weights.h"
#include "weightbroker/status.h"
#include "weightbroker/tensor.h"
#include "weightbroker/torch_publish.h"
#include "weightbroker/torch_types.h"

namespace weightbroker {

// Where the weights lie, in torch's words.
inline at::Device ToTorchDevice(const MappedWeights& weights);

// `tensor`, which is one of `weights`, as a torch tensor of the same address and strides.
// DTYPE_UNSUPPORTED for a type that torch does not have; TORCH_ERROR with what torch threw.
inline Result<at::Tensor> ToTorch(const MappedWeights& weights, const Tensor& tensor);

// The tensor of that name. TENSOR_UNKNOWN if there is none.
inline Result<at::Tensor> ToTorch(const MappedWeights& weights, std::string_view name);

// All tensors, in the order of weights.tensors(). An alias shares its tensor's storage, unless its type is another.
inline Result<std::vector<at::Tensor>> ToTorch(const MappedWeights& weights);

struct BindOptions {
  // What the tensors' names have before the module's: "bert." finds "bert.pooler.weight" for "pooler.weight". Tensors
  // without it are not the module's, and left alone.
  std::string prefix;
  // Names of the module that the weights need not have, because the engine fills them itself. They must have storage
  // by then. Empty: none.
  std::function<bool(const std::string& name)> may_be_missing;
  // Names, without the prefix, of tensors that the module need not have. Empty: none.
  std::function<bool(const std::string& name)> may_be_unexpected;
};

// Makes every parameter and buffer of `module` and of its submodules be the tensor of its name in `weights`, wherever
// the module's code keeps a handle of it. Their own storage, if they had any, is let go; they no longer require
// gradients. Types and shapes must be those that the module was built with; the device need not.
//
// MODULE_MISMATCH lists, and counts in its metadata,
//   missing      names of the module that the weights lack,
//   unexpected   tensors that the module lacks,
//   mismatched   those of another type or shape, and parameters that the module ties but the weights do not,
//   unbound      names that may be missing, and still have no storage (they are on the meta device),
// and leaves the module as it was. TORCH_ERROR with what torch threw.
inline Status BindModule(torch::nn::Module& module, const MappedWeights& weights, const BindOptions& options = {});

// ---------------------------------------------------------------------------------------------------------------------

namespace torch_internal {

inline Status UnsupportedType(const Tensor& tensor) {
  return Status(StatusCode::kFailedPrecondition, "DTYPE_UNSUPPORTED",
                "tensor \"" + std::string(tensor.name) + "\" has the type " + DataTypeName(tensor.dtype) +
                    ", which torch does not have",
                {{"tensor", std::string(tensor.name)}, {"dtype", DataTypeName(tensor.dtype)}});
}

inline at::IntArrayRef SizesOf(const Tensor& tensor) { return {tensor.shape.data(), tensor.shape.size()}; }

// Makes tensors of one mapping.
class Wrapper {
 public:
  explicit Wrapper(const MappedWeights& weights) : keep_alive_(weights.KeepAlive()), device_(ToTorchDevice(weights)) {}

  // The type has been checked. The device is given, or torch would ask the driver about each address.
  at::Tensor Wrap(const Tensor& tensor) const {
    const at::IntArrayRef strides(tensor.stated_strides.data(), tensor.stated_strides.size());
    return at::for_blob(const_cast<std::byte*>(tensor.data), SizesOf(tensor))
        .strides(tensor.stated_strides.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(strides))
        .deleter([keep_alive = keep_alive_](void*) mutable { keep_alive.reset(); })
        .target_device(device_)
        .options(at::TensorOptions().dtype(ToScalarType(tensor.dtype)).device(device_))
        .make_tensor();
  }

 private:
  std::shared_ptr<const void> keep_alive_;
  at::Device device_;
};

// `alias` as a view of the tensor whose memory, or a part of it, it shares.
inline at::Tensor ViewOf(const at::Tensor& target, const Tensor& target_row, const Tensor& alias) {
  const int64_t offset_bytes = alias.data - target_row.data;
  return target.as_strided(SizesOf(alias), alias.Strides(), offset_bytes / DataTypeBytes(alias.dtype));
}

// What does not fit, by kind, for one message that names as much as is useful.
class Misfits {
 public:
  void Add(const char* kind, const std::string& what) { lists_[kind].push_back(what); }

  Status ToStatus() const {
    if (lists_.empty()) return Status();
    std::string message = "the module cannot be bound to the weights";
    Status::Metadata metadata;
    for (const auto& [kind, list] : lists_) {
      const std::string text = Join(list);
      message += "; " + kind + ": " + text;
      metadata[kind] = text;
      metadata[kind + "_count"] = std::to_string(list.size());
    }
    return Status(StatusCode::kFailedPrecondition, "MODULE_MISMATCH", message, std::move(metadata));
  }

 private:
  static std::string Join(const std::vector<std::string>& list) {
    constexpr size_t kMostNamed = 10;
    std::string text;
    for (size_t i = 0; i < list.size() && i < kMostNamed; ++i) text += (i == 0 ? "" : ", ") + list[i];
    if (list.size() > kMostNamed) text += " and " + std::to_string(list.size() - kMostNamed) + " more";
    return text;
  }

  std::map<std::string, std::vector<std::string>> lists_;
};

// How a tensor of another type or shape than the module's is described; empty if it has the same.
inline std::string DifferenceFrom(const at::Tensor& wanted, const Tensor& found) {
  const at::ScalarType dtype = ToScalarType(found.dtype);
  if (wanted.scalar_type() == dtype && wanted.sizes() == SizesOf(found)) return {};
  const auto describe = [](at::ScalarType type, at::IntArrayRef sizes) {
    std::string text = std::string(c10::toString(type)) + "[";
    for (size_t i = 0; i < sizes.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(sizes[i]);
    return text + "]";
  };
  return "is " + describe(wanted.scalar_type(), wanted.sizes()) + " in the module and " +
         describe(dtype, SizesOf(found)) + " in the weights";
}

// Which tensor goes into which of a module's parameters and buffers.
class Binding {
 public:
  Binding(const MappedWeights& weights, const BindOptions& options) : weights_(weights), options_(options) {}

  Status Plan(const torch::nn::Module& module) {
    slots_ = SlotsOf(module);
    for (const Slot& slot : slots_) Match(slot);
    for (const Slot& slot : slots_) CheckIsBound(slot);
    CheckNothingIsLeft();
    return misfits_.ToStatus();
  }

  void Carry() const {
    // Under inference mode the new tensors would be inference tensors, and the module's with them.
    const c10::InferenceMode normal(false);
    const Wrapper wrapper(weights_);
    for (const auto& [impl, choice] : chosen_) Replace(choice.slot, wrapper.Wrap(*choice.tensor));
  }

 private:
  struct Choice {
    at::Tensor slot;
    const Tensor* tensor;
  };

  static bool Allows(const std::function<bool(const std::string&)>& rule, const std::string& name) {
    return rule != nullptr && rule(name);
  }

  void Match(const Slot& slot) {
    const Tensor* found = weights_.Find(options_.prefix + slot.name);
    if (found == nullptr) return;
    used_.insert(found);
    if (const std::string difference = DifferenceFrom(slot.tensor, *found); !difference.empty()) {
      misfits_.Add("mismatched", slot.name + " " + difference);
    }
    const auto [place, is_new] = chosen_.emplace(slot.tensor.unsafeGetTensorImpl(), Choice{slot.tensor, found});
    const Tensor& chosen = *place->second.tensor;
    if (!is_new && chosen.data != found->data) {
      misfits_.Add("mismatched", slot.name + " is tied to another parameter in the module, but \"" +
                                     std::string(chosen.name) + "\" and \"" + std::string(found->name) +
                                     "\" are two tensors");
    }
  }

  // A tied parameter is bound under whichever of its names the weights have.
  void CheckIsBound(const Slot& slot) {
    if (chosen_.count(slot.tensor.unsafeGetTensorImpl()) != 0) return;
    if (!Allows(options_.may_be_missing, slot.name)) {
      misfits_.Add("missing", slot.name);
    } else if (slot.tensor.is_meta()) {
      misfits_.Add("unbound", slot.name);
    }
  }

  void CheckNothingIsLeft() {
    for (const Tensor& tensor : weights_) {
      if (tensor.name.compare(0, options_.prefix.size(), options_.prefix) != 0 || used_.count(&tensor) != 0) continue;
      const std::string name(tensor.name.substr(options_.prefix.size()));
      if (!Allows(options_.may_be_unexpected, name)) misfits_.Add("unexpected", name);
    }
  }

  const MappedWeights& weights_;
  const BindOptions& options_;
  std::vector<Slot> slots_;
  std::unordered_map<at::TensorImpl*, Choice> chosen_;
  std::unordered_set<const Tensor*> used_;
  Misfits misfits_;
};

}  // namespace torch_internal

inline at::Device ToTorchDevice(const MappedWeights& weights) { return torch_internal::DeviceOf(weights.device()); }

inline Result<at::Tensor> ToTorch(const MappedWeights& weights, const Tensor& tensor) {
  if (ToScalarType(tensor.dtype) == at::ScalarType::Undefined) return torch_internal::UnsupportedType(tensor);
  return torch_internal::CatchingErrors(
      [&]() -> Result<at::Tensor> { return torch_internal::Wrapper(weights).Wrap(tensor); });
}

inline Result<at::Tensor> ToTorch(const MappedWeights& weights, std::string_view name) {
  if (const Tensor* tensor = weights.Find(name)) return ToTorch(weights, *tensor);
  return Status(StatusCode::kNotFound, "TENSOR_UNKNOWN", "the weights have no tensor \"" + std::string(name) + "\"",
                {{"tensor", std::string(name)}});
}

inline Result<std::vector<at::Tensor>> ToTorch(const MappedWeights& weights) {
  return torch_internal::CatchingErrors([&]() -> Result<std::vector<at::Tensor>> {
    const torch_internal::Wrapper wrapper(weights);
    const Tensor* const first = weights.tensors().data();
    std::vector<at::Tensor> tensors;
    tensors.reserve(weights.tensors().size());
    for (const Tensor& tensor : weights) {
      if (ToScalarType(tensor.dtype) == at::ScalarType::Undefined) return torch_internal::UnsupportedType(tensor);
      tensors.push_back(tensor.alias_of.empty() ? wrapper.Wrap(tensor) : at::Tensor());
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& alias = first[i];
      if (alias.alias_of.empty()) continue;
      const Tensor* const target = weights.Find(alias.alias_of);
      const bool is_view = target->dtype == alias.dtype && alias.size_bytes > 0;
      tensors[i] = is_view ? torch_internal::ViewOf(tensors[static_cast<size_t>(target - first)], *target, alias)
                           : wrapper.Wrap(alias);
    }
    return Result<std::vector<at::Tensor>>(std::move(tensors));
  });
}

inline Status BindModule(torch::nn::Module& module, const MappedWeights& weights, const BindOptions& options) {
  return torch_internal::CatchingErrors([&]() -> Status {
    torch_internal::Binding binding(weights, options);
    if (Status status = binding.Plan(module); !status.ok()) return status;
    binding.Carry();
    return Status();
  });
}

}  // namespace weightbroker
