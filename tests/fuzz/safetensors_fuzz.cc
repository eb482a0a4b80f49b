// The input is a whole file.
#include <algorithm>
#include <cstring>

#include "common/checkpoint/safetensors.h"
#include "tests/fuzz/check.h"

namespace weightbroker {
namespace {

class MemoryFile : public File {
 public:
  explicit MemoryFile(std::span<const std::byte> bytes) : bytes_(bytes) {}

  absl::StatusOr<int64_t> ReadAt(int64_t offset_bytes, std::span<std::byte> buffer) override {
    const auto offset = static_cast<size_t>(offset_bytes);
    if (offset >= bytes_.size()) return 0;
    const auto part = bytes_.subspan(offset, std::min(buffer.size(), bytes_.size() - offset));
    std::copy(part.begin(), part.end(), buffer.begin());
    return static_cast<int64_t>(part.size());
  }
  absl::StatusOr<FileStat> Stat() override {
    FileStat stat;
    stat.size_bytes = static_cast<int64_t>(bytes_.size());
    stat.is_regular_file = true;
    return stat;
  }
  const std::string& path() const override { return path_; }

 private:
  const std::span<const std::byte> bytes_;
  const std::string path_ = "fuzz.safetensors";
};

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

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace weightbroker;
  MemoryFile file(std::as_bytes(std::span(data, size)));
  const auto header = ReadSafetensorsHeader(file, "fuzz.safetensors");
  if (header.ok()) {
    CheckAccepted(*header, size);
  } else {
    CheckRefusal(header.status());
  }
  return 0;
}
