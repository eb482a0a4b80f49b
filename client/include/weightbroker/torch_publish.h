// Publishing what an engine has in torch: a module, or tensors by name; and having torch's tensors lie in the service's
// memory from the start. The engine compiles this header against its own torch (2.7 or later).
//
//   auto weights = client->AttachOrPublish(spec, [&](weightbroker::Publisher& publisher) -> weightbroker::Status {
//     Llama model(config);
//     model.LoadMyOwnWay();
//     return weightbroker::PublishModule(publisher, model);             // copies; sees aliases, keeps strides
//   }, options);
//   if (!weights.ok()) return Fail(weights.status());
//   auto status = weightbroker::BindModule(*model_on_meta, *weights);   // the same at every later start
//
// Without a copy:
//     auto model = std::make_shared<Llama>(config, at::kMeta);
//     if (auto status = weightbroker::AllocateModule(publisher, *model); !status.ok()) return status;
//     return model->LoadMyOwnWay();                                     // writes into the service's memory
//
// Memory that a publisher has given goes when the loader returns: tensors that lie in it must not be used after that.
// C++17. Copies are queued in torch's current stream. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weightbroker/publisher.h"
#include "weightbroker/torch_types.h"

namespace weightbroker {

// A tensor of torch under the name that it is published as.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
  TensorKind kind = TensorKind::kParameter;
  std::map<std::string, std::string> metadata;  // see TensorToPublish
};

struct PublishModuleOptions {
  // Put before each of the module's names.
  std::string prefix;
  // What else is to be known of a tensor, by its name without the prefix. Empty: nothing.
  std::function<std::map<std::string, std::string>(const std::string& name)> metadata;
  // Buffers that the module's state does not list, by their names: torch's C++ modules do not say so themselves. Empty:
  // none.
  std::function<bool(const std::string& name)> is_non_persistent;
  // Tensors of which only the elements are to be published, in row-major order, and not what lies between them: for
  // slices of something large. Empty: none; every tensor keeps its strides.
  std::function<bool(const std::string& name)> make_contiguous;
};

// Publishes tensors, on the host or on any GPU, contiguous or not: each keeps its type, shape and strides, and what
// lies between its elements is published with it. One that lies inside another's memory becomes its alias, whichever of
// them comes first; of tensors that only overlap each becomes a copy of its own. DTYPE_UNSUPPORTED for a type that
// cannot be served, MANIFEST_INVALID for what has no memory (the meta device, sparse tensors) and as Publisher::Add,
// TORCH_ERROR with what torch threw.
inline Status PublishTensors(Publisher& publisher, const std::vector<NamedTensor>& tensors);

// The same for every parameter and buffer of a module, and of its submodules, by their names.
inline Status PublishModule(Publisher& publisher, const torch::nn::Module& module,
                            const PublishModuleOptions& options = {});

// A tensor of zeros in the service's memory, published under that name with whatever is written to it until the loader
// returns. Contiguous, or with the strides that `tensor` states. Fails as Publisher::Allocate, and DTYPE_UNSUPPORTED.
inline Result<at::Tensor> AllocateTensor(Publisher& publisher, const TensorToPublish& tensor);

// Makes every parameter and buffer of `module`, which may be on the meta device, be such a tensor, contiguous; tied
// ones stay tied. Their own storage, if they had any, is let go with what was in it; they no longer require gradients.
// After the loader has returned nothing but BindModule makes the module usable again.
inline Status AllocateModule(Publisher& publisher, torch::nn::Module& module, const PublishModuleOptions& options = {});

// ---------------------------------------------------------------------------------------------------------------------

namespace torch_internal {

inline Status CannotPublish(const std::string& name, const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "MANIFEST_INVALID", "tensor \"" + name + "\" " + what,
                {{"tensor", name}});
}

// How a tensor is published, but for its memory. `strides` may be empty, for a contiguous one.
inline Result<TensorToPublish> Describe(const NamedTensor& named, at::IntArrayRef strides) {
  TensorToPublish described;
  described.name = named.name;
  described.dtype = FromScalarType(named.tensor.scalar_type());
  if (described.dtype == DataType::kUnspecified) {
    const std::string type = c10::toString(named.tensor.scalar_type());
    return Status(StatusCode::kFailedPrecondition, "DTYPE_UNSUPPORTED",
                  "tensor \"" + named.name + "\" has torch's type " + type + ", which cannot be published",
                  {{"tensor", named.name}, {"dtype", type}});
  }
  described.shape = named.tensor.sizes().vec();
  described.strides = strides.vec();
  described.kind = named.kind;
  described.metadata = named.metadata;
  return described;
}

// Where a tensor's elements lie, from the first to the last and with what is between them.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;

  int64_t size_bytes() const { return end - begin; }
  bool Contains(const Extent& other) const { return begin <= other.begin && other.end <= end; }
};

inline Extent ExtentOf(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last_element = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last_element += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last_element + 1) * static_cast<int64_t>(tensor.element_size())};
}

// Everything from a tensor's first element to its last, as one row. `tensor` has elements.
inline at::Tensor Flat(const at::Tensor& tensor) {
  const int64_t count = ExtentOf(tensor).size_bytes() / static_cast<int64_t>(tensor.element_size());
  return tensor.as_strided({count}, {1}, tensor.storage_offset());
}

// A tensor at an address, which is not looked after. Empty `strides`: contiguous.
inline at::Tensor Wrap(void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       at::Device device) {
  return at::for_blob(data, sizes)
      .strides(strides.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(strides))
      .target_device(device)
      .options(at::TensorOptions().dtype(dtype).device(device))
      .make_tensor();
}

// Puts tensors into a publisher's memory, owners before the aliases that lie in them.
class TensorPublisher {
 public:
  explicit TensorPublisher(Publisher& publisher) : publisher_(publisher), device_(DeviceOf(publisher.device())) {}

  // `compact` says which of the tensors are to lose what is between their elements.
  Status Publish(const std::vector<NamedTensor>& tensors, const std::vector<bool>& compact) {
    const c10::InferenceMode inference;
    std::vector<size_t> order;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (Status status = CheckHasMemory(tensors[i]); !status.ok()) return status;
      order.push_back(i);
    }
    // The longest first: whatever lies inside another comes after it.
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return ExtentOf(tensors[a].tensor).size_bytes() > ExtentOf(tensors[b].tensor).size_bytes();
    });
    for (const size_t i : order) {
      Status status = compact[i] ? Copy(Contiguous(tensors[i])) : PublishOne(tensors[i]);
      if (!status.ok()) return status;
    }
    return Status();
  }

 private:
  struct Owner {
    std::string name;
    Extent extent;
  };

  static Status CheckHasMemory(const NamedTensor& named) {
    if (!named.tensor.defined()) return CannotPublish(named.name, "is undefined");
    if (named.tensor.is_meta()) return CannotPublish(named.name, "is on the meta device: it has no values");
    if (named.tensor.layout() != at::kStrided) return CannotPublish(named.name, "is sparse");
    return Status();
  }

  static NamedTensor Contiguous(NamedTensor named) {
    named.tensor = named.tensor.contiguous();
    return named;
  }

  Status PublishOne(NamedTensor named) {
    // A view that is negated only when it is read would be published without its sign.
    if (named.tensor.is_neg())
      return Copy(Contiguous({named.name, named.tensor.resolve_neg(), named.kind, named.metadata}));
    const Extent extent = ExtentOf(named.tensor);
    if (const Owner* const owner = FindOwner(named.tensor, extent)) return AddAlias(named, *owner, extent);
    if (Status status = Copy(named); !status.ok()) return status;
    if (extent.size_bytes() > 0) owners_[StorageOf(named.tensor)].push_back({named.name, extent});
    return Status();
  }

  static const void* StorageOf(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

  const Owner* FindOwner(const at::Tensor& tensor, const Extent& extent) const {
    const auto found = owners_.find(StorageOf(tensor));
    if (found == owners_.end() || extent.size_bytes() == 0) return nullptr;
    for (const Owner& owner : found->second) {
      const bool is_aligned = (extent.begin - owner.extent.begin) % static_cast<int64_t>(tensor.element_size()) == 0;
      if (is_aligned && owner.extent.Contains(extent)) return &owner;
    }
    return nullptr;
  }

  Status AddAlias(const NamedTensor& named, const Owner& owner, const Extent& extent) {
    auto described = Describe(named, named.tensor.strides());
    if (!described.ok()) return described.status();
    described->alias_of = owner.name;
    return publisher_.AddAlias(*described, extent.begin - owner.extent.begin);
  }

  Status Copy(const NamedTensor& named) {
    auto described = Describe(named, named.tensor.strides());
    if (!described.ok()) return described.status();
    auto room = publisher_.Allocate(*described);
    if (!room.ok()) return room.status();
    if (*room == nullptr) return Status();
    const at::Tensor from = Flat(named.tensor);
    at::Tensor to = Wrap(*room, from.sizes(), {}, from.scalar_type(), device_);
    to.copy_(from);
    publisher_.CountCopy(static_cast<int64_t>(from.nbytes()));
    return Status();
  }

  Publisher& publisher_;
  const at::Device device_;
  std::unordered_map<const void*, std::vector<Owner>> owners_;  // by storage
};

inline bool Says(const std::function<bool(const std::string&)>& rule, const std::string& name) {
  return rule != nullptr && rule(name);
}

inline NamedTensor ToNamed(const Slot& slot, const PublishModuleOptions& options) {
  NamedTensor named;
  named.name = options.prefix + slot.name;
  named.tensor = slot.tensor;
  named.kind = slot.kind;
  if (slot.kind == TensorKind::kBuffer && Says(options.is_non_persistent, slot.name)) {
    named.kind = TensorKind::kNonPersistentBuffer;
  }
  if (options.metadata != nullptr) named.metadata = options.metadata(slot.name);
  return named;
}

}  // namespace torch_internal

inline Status PublishTensors(Publisher& publisher, const std::vector<NamedTensor>& tensors) {
  return torch_internal::CatchingErrors([&]() -> Status {
    return torch_internal::TensorPublisher(publisher).Publish(tensors, std::vector<bool>(tensors.size(), false));
  });
}

inline Status PublishModule(Publisher& publisher, const torch::nn::Module& module,
                            const PublishModuleOptions& options) {
  return torch_internal::CatchingErrors([&]() -> Status {
    std::vector<NamedTensor> tensors;
    std::vector<bool> compact;
    for (const torch_internal::Slot& slot : torch_internal::SlotsOf(module)) {
      tensors.push_back(torch_internal::ToNamed(slot, options));
      compact.push_back(torch_internal::Says(options.make_contiguous, slot.name));
    }
    return torch_internal::TensorPublisher(publisher).Publish(tensors, compact);
  });
}

inline Result<at::Tensor> AllocateTensor(Publisher& publisher, const TensorToPublish& tensor) {
  return torch_internal::CatchingErrors([&]() -> Result<at::Tensor> {
    const at::ScalarType dtype = ToScalarType(tensor.dtype);
    if (dtype == at::ScalarType::Undefined) {
      return Status(
          StatusCode::kFailedPrecondition, "DTYPE_UNSUPPORTED",
          "tensor \"" + tensor.name + "\" has the type " + DataTypeName(tensor.dtype) + ", which torch does not have",
          {{"tensor", tensor.name}, {"dtype", DataTypeName(tensor.dtype)}});
    }
    auto room = publisher.Allocate(tensor);
    if (!room.ok()) return room.status();
    const at::Device device = torch_internal::DeviceOf(publisher.device());
    return torch_internal::Wrap(*room, tensor.shape, tensor.strides, dtype, device);
  });
}

inline Status AllocateModule(Publisher& publisher, torch::nn::Module& module, const PublishModuleOptions& options) {
  return torch_internal::CatchingErrors([&]() -> Status {
    // Under inference mode the new tensors would be inference tensors, and the module's with them.
    const c10::InferenceMode normal(false);
    std::unordered_map<at::TensorImpl*, std::string> names;  // of tensors that have their place
    for (const torch_internal::Slot& slot : torch_internal::SlotsOf(module)) {
      const NamedTensor named = torch_internal::ToNamed(slot, options);
      auto described = torch_internal::Describe(named, {});
      if (!described.ok()) return described.status();
      const auto [known, is_new] = names.emplace(slot.tensor.unsafeGetTensorImpl(), named.name);
      if (!is_new) {
        described->alias_of = known->second;
        if (Status status = publisher.AddAlias(*described); !status.ok()) return status;
        continue;
      }
      auto placed = AllocateTensor(publisher, *described);
      if (!placed.ok()) return placed.status();
      torch_internal::Replace(slot.tensor, *placed);
    }
    return Status();
  });
}

}  // namespace weightbroker
