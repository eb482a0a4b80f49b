// SHA-256, in one call or in pieces.
//
//   Sha256 hash;
//   hash.Update(bytes); hash.Update(more);
//   const std::string hex = hash.FinishHex();
//
// Not thread-safe. Ends the process if the cryptographic library cannot do SHA-256 at all.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace weightbroker {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(std::span<const std::byte> bytes);

  // 32 bytes, or 64 lower-case hexadecimal digits. The object is of no use after either.
  std::string FinishBytes();
  std::string FinishHex();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

std::string Sha256Bytes(std::string_view text);
std::string Sha256Hex(std::string_view text);

}  // namespace weightbroker
