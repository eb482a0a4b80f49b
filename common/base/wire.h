// The little of the protobuf wire format that errors need, so that a program can make and read them without linking
// protobuf: the keeper is to stay small. Everything else uses generated messages.
//
//   WireWriter writer;
//   writer.AddBytes(1, "REASON");
//   for (WireReader reader(writer.bytes()); reader.Next();) { ... reader.field(), reader.bytes() ... }
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace weightbroker {

class WireWriter {
 public:
  // Adds a field of type int32, int64 or enum.
  void AddVarint(int field, uint64_t value);
  // Adds a field of type string, bytes or message.
  void AddBytes(int field, std::string_view value);

  const std::string& bytes() const { return bytes_; }

 private:
  void AppendVarint(uint64_t value);

  std::string bytes_;
};

// Goes through the fields of one message in their order. Fields of fixed width are passed over with value 0; groups are
// malformed. The views point into the message given.
class WireReader {
 public:
  enum class Type { kVarint, kLength, kFixed };

  explicit WireReader(std::string_view message) : rest_(message) {}

  // Moves to the next field. False at the end of the message, and where it is malformed: see ok().
  bool Next();
  bool ok() const { return ok_; }

  int field() const { return field_; }
  Type type() const { return type_; }
  uint64_t varint() const { return varint_; }        // 0 unless the field is a varint
  std::string_view bytes() const { return bytes_; }  // empty unless the field has a length

 private:
  bool ReadVarint(uint64_t* value);
  bool Take(uint64_t size, std::string_view* bytes);

  std::string_view rest_;
  bool ok_ = true;
  int field_ = 0;
  Type type_ = Type::kFixed;
  uint64_t varint_ = 0;
  std::string_view bytes_;
};

}  // namespace weightbroker
