#include "common/base/wire.h"

namespace weightbroker {
namespace {

enum WireType { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

}  // namespace

void WireWriter::AppendVarint(uint64_t value) {
  while (value >= 0x80) {
    bytes_.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  bytes_.push_back(static_cast<char>(value));
}

void WireWriter::AddVarint(int field, uint64_t value) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | kVarint);
  AppendVarint(value);
}

void WireWriter::AddBytes(int field, std::string_view value) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | kLength);
  AppendVarint(value.size());
  bytes_.append(value);
}

bool WireReader::ReadVarint(uint64_t* value) {
  *value = 0;
  for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(rest_.front());
    rest_.remove_prefix(1);
    *value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

bool WireReader::Take(uint64_t size, std::string_view* bytes) {
  if (size > rest_.size()) return false;
  *bytes = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return true;
}

bool WireReader::Next() {
  varint_ = 0;
  bytes_ = {};
  if (!ok_ || rest_.empty()) return false;
  uint64_t tag = 0;
  uint64_t size = 0;
  std::string_view skipped;
  ok_ = ReadVarint(&tag) && tag >> 3 > 0 && tag >> 3 <= 0x1FFFFFFF;
  if (!ok_) return false;
  field_ = static_cast<int>(tag >> 3);
  type_ = Type::kFixed;
  switch (tag & 7) {
    case kVarint:
      type_ = Type::kVarint;
      ok_ = ReadVarint(&varint_);
      break;
    case kFixed64:
      ok_ = Take(8, &skipped);
      break;
    case kLength:
      type_ = Type::kLength;
      ok_ = ReadVarint(&size) && Take(size, &bytes_);
      break;
    case kFixed32:
      ok_ = Take(4, &skipped);
      break;
    default:
      ok_ = false;
  }
  return ok_;
}

}  // namespace weightbroker
