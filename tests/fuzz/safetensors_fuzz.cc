// The input is a whole file.
#include <algorithm>

#include "common/checkpoint/safetensors.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/target.h"
#include "tests/support/memory_files.h"

namespace weightbroker {
namespace {

// What the rest of the program relies on once a header is accepted.
void CheckAccepted(const SafetensorsHeader& header, size_t file_size_bytes) {
  FUZZ_CHECK(header.data_offset_bytes + header.data_size_bytes == static_cast<int64_t>(file_size_bytes));
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : header.tensors) {
    FUZZ_CHECK(tensor.begin_bytes == end);
    FUZZ_CHECK(tensor.end_bytes >= tensor.begin_bytes);
    FUZZ_CHECK(tensor.dtype != nullptr);
    FUZZ_CHECK(tensor.name.find('\0') == std::string::npos);
    __int128 bits = tensor.dtype->bits;
    for (const int64_t dimension : tensor.shape) {
      FUZZ_CHECK(dimension >= 0);
      bits = std::min<__int128>(bits * dimension, __int128{1} << 64);
    }
    FUZZ_CHECK(bits == __int128{8} * tensor.size_bytes());
    end = tensor.end_bytes;
  }
  FUZZ_CHECK(end == header.data_size_bytes);
}

}  // namespace
}  // namespace weightbroker

FUZZ_TARGET(safetensors) {
  using namespace weightbroker;
  MemoryFile file("fuzz.safetensors", input);
  const auto header = ReadSafetensorsHeader(file, "fuzz.safetensors");
  if (header.ok()) {
    CheckAccepted(*header, input.size());
  } else {
    CheckRefusal(header.status());
  }
}
