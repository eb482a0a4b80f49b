// Reads safetensors files from stdin, each with its length before it in 8 bytes, little-endian, and writes for each one
// line of JSON to stdout: what is in it, or why it is refused.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "common/base/error.h"
#include "common/checkpoint/safetensors.h"
#include "tests/support/memory_files.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

Json Describe(const SafetensorsHeader& header) {
  Json tensors = Json::object();
  for (const SafetensorsTensor& tensor : header.tensors) {
    tensors[tensor.name] = {{"dtype", std::string(tensor.dtype->name)},
                            {"shape", tensor.shape},
                            {"begin", header.data_offset_bytes + tensor.begin_bytes},
                            {"end", header.data_offset_bytes + tensor.end_bytes}};
  }
  return {{"ok", true}, {"tensors", tensors}, {"count", header.tensors.size()}, {"metadata", header.metadata}};
}

Json Judge(const std::string& bytes) {
  MemoryFile file("file", bytes);
  const auto header = ReadSafetensorsHeader(file, "file");
  if (header.ok()) return Describe(*header);
  return {{"ok", false},
          {"reason", GetErrorDetails(header.status()).reason},
          {"message", std::string(header.status().message())}};
}

bool ReadFrame(std::string* bytes) {
  uint64_t length = 0;
  if (std::fread(&length, sizeof(length), 1, stdin) != 1) return false;
  bytes->resize(length);
  return length == 0 || std::fread(bytes->data(), length, 1, stdin) == 1;
}

}  // namespace
}  // namespace weightbroker

int main() {
  for (std::string bytes; weightbroker::ReadFrame(&bytes);) {
    std::printf("%s\n", weightbroker::Judge(bytes).dump().c_str());
    std::fflush(stdout);
  }
  return 0;
}
