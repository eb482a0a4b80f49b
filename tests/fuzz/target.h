// A fuzz program's entry: under libFuzzer the program's own, elsewhere one of those that replay.cc feeds with the
// corpora, so that every build and every sanitizer runs them.
//
//   FUZZ_TARGET(safetensors) { ... }      // `input` is a std::string_view; names the corpus, too
//
// Inputs are read with the functions below, which give zeros and empty strings once there is nothing left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace weightbroker {

using FuzzFunction = void (*)(std::string_view input);

#ifdef WEIGHTBROKER_LIBFUZZER
#define FUZZ_TARGET(name)                                                      \
  static void FuzzOneInput(std::string_view input);                            \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {    \
    FuzzOneInput(std::string_view(reinterpret_cast<const char*>(data), size)); \
    return 0;                                                                  \
  }                                                                            \
  static void FuzzOneInput(std::string_view input)
#else
bool AddFuzzTarget(const char* name, FuzzFunction function);  // in replay.cc

#define FUZZ_TARGET(name)                                                                           \
  static void FuzzOneInput(std::string_view input);                                                 \
  [[maybe_unused]] static const bool g_is_added = weightbroker::AddFuzzTarget(#name, FuzzOneInput); \
  static void FuzzOneInput(std::string_view input)
#endif

// Everything up to the next NUL byte, which is taken, too.
inline std::string_view TakeText(std::string_view& input) {
  const size_t nul = std::min(input.find('\0'), input.size());
  const std::string_view text = input.substr(0, nul);
  input.remove_prefix(std::min(nul + 1, input.size()));
  return text;
}

inline std::string_view TakeBytes(std::string_view& input, size_t size) {
  const std::string_view bytes = input.substr(0, size);
  input.remove_prefix(bytes.size());
  return bytes;
}

// Little-endian.
template <typename T>
T TakeInteger(std::string_view& input) {
  uint64_t value = 0;
  const std::string_view bytes = TakeBytes(input, sizeof(T));
  for (size_t i = 0; i < bytes.size(); ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
  return static_cast<T>(value);
}

}  // namespace weightbroker
