// The input is the number of tensors that the service announces, then messages, each with its length before it.
#include <google/protobuf/stubs/logging.h>

#include <array>
#include <span>

#include "client/src/manifest_decoder.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::client {
namespace {

constexpr size_t kSlabBytes = 1 << 16;
alignas(4096) std::array<std::byte, kSlabBytes> g_slab;
alignas(4096) std::array<std::byte, 4096> g_small_slab;

bool LiesIn(const std::byte* data, int64_t size_bytes, std::span<const std::byte> slab) {
  return data >= slab.data() && data + size_bytes <= slab.data() + slab.size();
}

// From the first element to the last.
int64_t SizeOf(const Tensor& tensor) {
  const std::vector<int64_t> strides = tensor.Strides();
  FUZZ_CHECK(strides.size() == tensor.shape.size());
  __int128 elements = 1;
  for (size_t i = 0; i < strides.size(); ++i) {
    FUZZ_CHECK(tensor.shape[i] >= 0 && strides[i] >= 0);
    if (tensor.shape[i] == 0) return 0;
    elements += __int128{tensor.shape[i] - 1} * strides[i];
  }
  FUZZ_CHECK(elements * DataTypeBytes(tensor.dtype) <= INT64_MAX);
  return static_cast<int64_t>(elements) * DataTypeBytes(tensor.dtype);
}

void CheckTensor(const Manifest& manifest, const Tensor& tensor) {
  FUZZ_CHECK(!tensor.name.empty() && FindTensor(manifest.tensors, tensor.name) == &tensor);
  FUZZ_CHECK(DataTypeBytes(tensor.dtype) > 0);
  bool is_empty = false;
  for (const int64_t dimension : tensor.shape) is_empty = is_empty || dimension == 0;
  FUZZ_CHECK(is_empty == (tensor.size_bytes == 0));
  FUZZ_CHECK((tensor.size_bytes == 0) == (tensor.data == nullptr));
  if (tensor.data == nullptr) return;
  FUZZ_CHECK(SizeOf(tensor) == tensor.size_bytes);
  FUZZ_CHECK(LiesIn(tensor.data, tensor.size_bytes, g_slab) || LiesIn(tensor.data, tensor.size_bytes, g_small_slab));
  const int64_t alignment = tensor.alias_of.empty() ? 256 : DataTypeBytes(tensor.dtype);
  FUZZ_CHECK(reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(alignment) == 0);
  if (tensor.alias_of.empty()) return;
  const Tensor* const target = FindTensor(manifest.tensors, tensor.alias_of);
  FUZZ_CHECK(target != nullptr && target->alias_of.empty());
  FUZZ_CHECK(LiesIn(tensor.data, tensor.size_bytes, {target->data, static_cast<size_t>(target->size_bytes)}));
}

void CheckAccepted(const Manifest& manifest, int64_t announced) {
  FUZZ_CHECK(static_cast<int64_t>(manifest.tensors.size()) == announced);
  int64_t total_bytes = 0;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) {
    CheckTensor(manifest, manifest.tensors[i]);
    FUZZ_CHECK(i == 0 || manifest.tensors[i - 1].name < manifest.tensors[i].name);
    if (manifest.tensors[i].alias_of.empty()) total_bytes += manifest.tensors[i].size_bytes;
  }
  FUZZ_CHECK(total_bytes == manifest.total_bytes);
}

// What protobuf itself reads there is the same.
void CompareWithProtobuf(const Manifest& manifest) {
  [[maybe_unused]] static const auto silent = google::protobuf::SetLogHandler(nullptr);  // it logs what it refuses
  v1::ManifestChunk all;
  for (const RawMessage& message : manifest.messages) {
    v1::ExportResponse response;
    // It wants names to be UTF-8, which the decoder leaves to whoever uses them.
    if (!response.ParseFromArray(message.bytes().data(), static_cast<int>(message.bytes().size()))) return;
    all.MergeFrom(response.manifest());
  }
  FUZZ_CHECK(static_cast<size_t>(all.tensors_size()) == manifest.tensors.size());
  for (int i = 0; i < all.tensors_size(); ++i) {
    const v1::Tensor& wanted = all.tensors(i);
    const Tensor& found = manifest.tensors[static_cast<size_t>(i)];
    FUZZ_CHECK(found.name == wanted.name() && found.alias_of == wanted.alias_of());
    FUZZ_CHECK(static_cast<int>(found.dtype) == static_cast<int>(wanted.dtype()));
    FUZZ_CHECK(std::equal(found.shape.begin(), found.shape.end(), wanted.shape().begin(), wanted.shape().end()));
    FUZZ_CHECK(found.size_bytes == wanted.size_bytes());
  }
}

absl::StatusOr<Manifest> Decode(std::string_view input, int64_t announced) {
  const SlabView slabs[] = {{g_slab.data(), std::ssize(g_slab)}, {g_small_slab.data(), std::ssize(g_small_slab)}};
  ManifestDecoder decoder({slabs[0].size_bytes, slabs[1].size_bytes}, announced);
  while (!input.empty()) {
    const absl::Status status = decoder.Add(RawMessage(TakeBytes(input, TakeInteger<uint16_t>(input))));
    if (!status.ok()) return status;
  }
  return std::move(decoder).Finish(slabs);
}

}  // namespace
}  // namespace weightbroker::client

FUZZ_TARGET(manifest) {
  using namespace weightbroker;
  const int64_t announced = TakeInteger<int8_t>(input);
  const auto manifest = client::Decode(input, announced);
  if (!manifest.ok()) return CheckRefusal(manifest.status());
  client::CheckAccepted(*manifest, announced);
  client::CompareWithProtobuf(*manifest);
}
