#include "common/identity/sha256.h"

#include <openssl/evp.h>

#include <cstdio>
#include <cstdlib>

namespace weightbroker {
namespace {

void OrDie(bool ok) {
  if (ok) return;
  std::fprintf(stderr, "the cryptographic library refuses SHA-256\n");
  std::abort();
}

std::string Hex(std::string_view bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    text.push_back(kDigits[static_cast<unsigned char>(c) >> 4]);
    text.push_back(kDigits[static_cast<unsigned char>(c) & 15]);
  }
  return text;
}

}  // namespace

struct Sha256::Context {
  EVP_MD_CTX* const evp = EVP_MD_CTX_new();
  Context() = default;
  ~Context() { EVP_MD_CTX_free(evp); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  OrDie(context_->evp != nullptr && EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::Update(std::span<const std::byte> bytes) {
  OrDie(EVP_DigestUpdate(context_->evp, bytes.data(), bytes.size()) == 1);
}

std::string Sha256::FinishBytes() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  OrDie(EVP_DigestFinal_ex(context_->evp, digest, &size) == 1);
  return std::string(reinterpret_cast<const char*>(digest), size);
}

std::string Sha256::FinishHex() { return Hex(FinishBytes()); }

std::string Sha256Bytes(std::string_view text) {
  Sha256 hash;
  hash.Update(std::as_bytes(std::span(text)));
  return hash.FinishBytes();
}

std::string Sha256Hex(std::string_view text) { return Hex(Sha256Bytes(text)); }

}  // namespace weightbroker
