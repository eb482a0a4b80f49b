#include "tests/support/transform_case.h"

#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "common/checkpoint/dtype.h"

namespace weightbroker::testing {
namespace {

constexpr int64_t kRows = TransformCase::kRows;
constexpr int64_t kColumns = TransformCase::kColumns;
constexpr int64_t kRowBytes = kColumns * 4;
constexpr int64_t kSpacingBytes = 1 << 20;

// Appends a tensor, at a place of its own, and gives its index.
int32_t Add(ShardPlan& plan, const std::string& name, const char* dtype, std::vector<int64_t> shape,
            Transform transform = Transform::kCopy) {
  TensorPlacement tensor;
  tensor.name = name;
  tensor.dtype = FindDtype(dtype);
  tensor.transform = transform;
  tensor.size_bytes = tensor.dtype->bits / 8;
  for (const int64_t n : shape) tensor.size_bytes *= n;
  tensor.shape = std::move(shape);
  tensor.slab_offset_bytes = static_cast<int64_t>(plan.tensors.size()) * kSpacingBytes;
  plan.tensors.push_back(std::move(tensor));
  return static_cast<int32_t>(plan.tensors.size() - 1);
}

// What of a tensor the transfer fills, as the plan would say it.
Piece PieceOf(const Transfer& transfer) {
  const int64_t source_bytes = transfer.source_dtype->bits / 8;
  return {.run_elements = transfer.run_elements,
          .run_count = transfer.run_count,
          .source_offset = transfer.source_offset_bytes / source_bytes,
          .source_stride = transfer.source_stride_bytes / source_bytes,
          .offset = transfer.offset,
          .stride = transfer.stride,
          .element_stride = transfer.element_stride,
          .scale_offset = transfer.scale_offset,
          .scale_stride = transfer.scale_stride};
}

Transfer Rows(int32_t tensor, Transform transform, const char* source_dtype, int64_t columns) {
  return {.tensor = tensor,
          .transform = transform,
          .source_dtype = FindDtype(source_dtype),
          .run_elements = columns,
          .run_count = kRows,
          .source_stride_bytes = kRowBytes,
          .stride = columns};
}

Transfer Transposed(int32_t tensor, const char* dtype, int64_t columns) {
  Transfer transfer = Rows(tensor, Transform::kTranspose, dtype, columns);
  transfer.stride = 1;
  transfer.element_stride = kRows;
  return transfer;
}

}  // namespace

TransformCase TransformCase::Make() {
  TransformCase made;
  ShardPlan& plan = made.plan;
  std::vector<Transfer>& transfers = made.transfers;
  transfers.push_back(
      Rows(Add(plan, "a.columns", "BF16", {kRows, kColumns / 2}), Transform::kCopy, "BF16", kColumns / 2));
  transfers.back().source_offset_bytes = 4;
  transfers.push_back(Rows(Add(plan, "b.converted", "BF16", {kRows, kColumns}, Transform::kConvert),
                           Transform::kConvert, "F32", kColumns));
  const std::pair<const char*, int64_t> transposed[] = {{"U8", 299}, {"BF16", 149}, {"F32", 300}, {"F64", 150}};
  for (const auto& [dtype, columns] : transposed) {
    transfers.push_back(
        Transposed(Add(plan, std::string("c.transposed.") + dtype, dtype, {columns, kRows}, Transform::kTranspose),
                   dtype, columns));
  }
  made.quantized = transfers.size();
  transfers.push_back(Rows(Add(plan, "d.quantized", "F8_E4M3", {kRows, kColumns}, Transform::kQuantizeFp8Block),
                           Transform::kQuantizeFp8Block, "F32", kColumns));
  transfers.back().scale_stride = (kColumns + 127) / 128;
  const int32_t scales = Add(plan, "d.scales", "F32", {(kRows + 127) / 128, (kColumns + 127) / 128});
  plan.tensors[static_cast<size_t>(scales)].is_scale = true;
  plan.tensors[static_cast<size_t>(transfers.back().tensor)].scale_tensor = scales;
  const int32_t whole = Add(plan, "e.whole", "U8", {5, 1001});
  transfers.push_back({.tensor = whole,
                       .transform = Transform::kCopy,
                       .source_dtype = FindDtype("U8"),
                       .run_elements = 5 * 1001,
                       .source_offset_bytes = 13});
  const int32_t alias = Add(plan, "f.alias", "U8", {5, 1001});
  plan.tensors[static_cast<size_t>(alias)].alias_of = "e.whole";
  plan.tensors[static_cast<size_t>(alias)].slab_offset_bytes =
      plan.tensors[static_cast<size_t>(whole)].slab_offset_bytes;
  Add(plan, "g.empty", "F32", {0});
  Add(plan, "h.padding", "F32", {64, 64});
  for (const Transfer& transfer : transfers) {
    plan.tensors[static_cast<size_t>(transfer.tensor)].pieces = {PieceOf(transfer)};
  }
  plan.slab_bytes = {static_cast<int64_t>(plan.tensors.size()) * kSpacingBytes};

  std::mt19937 random(7);
  std::normal_distribution<float> value(0, 1);
  made.chunk.resize(kRows * kRowBytes);
  for (size_t i = 0; i < made.chunk.size(); i += sizeof(float)) {
    const float x = value(random);
    std::memcpy(made.chunk.data() + i, &x, sizeof(x));
  }
  return made;
}

}  // namespace weightbroker::testing
