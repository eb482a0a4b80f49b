// Reads protobuf's wire format from memory. Bounds are checked; a reader that has failed stays failed.
//
//   WireReader reader(bytes);
//   while (reader.NextField()) {
//     if (reader.field() == 1) name = reader.Bytes(); else reader.Skip();
//   }
//   if (reader.failed()) ...
#pragma once

#include <cstdint>
#include <string_view>

namespace weightbroker::client {

class WireReader {
 public:
  enum WireType { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

  explicit WireReader(std::string_view bytes)
      : position_(reinterpret_cast<const uint8_t*>(bytes.data())), end_(position_ + bytes.size()) {}

  // Goes to the next field; false at the end, or if the bytes are not what a field begins with.
  bool NextField() {
    if (failed_ || position_ == end_) return false;
    const uint64_t tag = Varint();
    field_ = static_cast<uint32_t>(tag >> 3);
    wire_type_ = static_cast<int>(tag & 7);
    if (field_ == 0 || tag > UINT32_MAX) failed_ = true;
    return !failed_;
  }

  uint32_t field() const { return field_; }
  int wire_type() const { return wire_type_; }
  bool failed() const { return failed_; }
  bool AtEnd() const { return position_ == end_; }
  void Fail() { failed_ = true; }

  // The value of a varint field; 0 and failed for a field of another type.
  uint64_t VarintField() { return Require(kVarint) ? Varint() : 0; }
  // The bytes of a length-delimited field; empty and failed for a field of another type.
  std::string_view Bytes() { return Require(kLengthDelimited) ? Delimited() : std::string_view(); }

  void Skip() {
    switch (wire_type_) {
      case kVarint:
        Varint();
        break;
      case kFixed64:
        Advance(8);
        break;
      case kLengthDelimited:
        Delimited();
        break;
      case kFixed32:
        Advance(4);
        break;
      default:  // groups, which proto3 does not have
        failed_ = true;
    }
  }

  uint64_t Varint() {
    uint64_t value = 0;
    for (int shift = 0; shift <= 63; shift += 7) {
      if (failed_ || position_ == end_) break;
      const uint8_t byte = *position_++;
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    failed_ = true;
    return 0;
  }

 private:
  bool Require(int wire_type) {
    if (wire_type_ != wire_type) failed_ = true;
    return !failed_;
  }

  std::string_view Delimited() {
    const uint64_t length = Varint();
    const auto* start = reinterpret_cast<const char*>(position_);
    return Advance(length) ? std::string_view(start, length) : std::string_view();
  }

  bool Advance(uint64_t count) {
    if (failed_ || count > static_cast<uint64_t>(end_ - position_)) {
      failed_ = true;
      return false;
    }
    position_ += count;
    return true;
  }

  const uint8_t* position_;
  const uint8_t* end_;
  uint32_t field_ = 0;
  int wire_type_ = 0;
  bool failed_ = false;
};

}  // namespace weightbroker::client
