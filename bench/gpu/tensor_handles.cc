#include "bench/gpu/tensor_handles.h"

#include <cerrno>
#include <fstream>
#include <sstream>

#include "common/base/error.h"

namespace weightbroker::bench {

absl::Status WriteTensorHandles(const std::string& path, const std::vector<TensorHandle>& handles) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(handles.data()),
             static_cast<std::streamsize>(handles.size() * sizeof(TensorHandle)));
  file.close();
  return file ? absl::OkStatus() : SystemError(path, EIO);
}

absl::StatusOr<std::vector<TensorHandle>> ReadTensorHandles(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<TensorHandle> handles(file ? static_cast<size_t>(file.tellg()) / sizeof(TensorHandle) : 0);
  file.seekg(0);
  file.read(reinterpret_cast<char*>(handles.data()),
            static_cast<std::streamsize>(handles.size() * sizeof(TensorHandle)));
  if (!file || handles.empty()) return SystemError(path, EIO);
  return handles;
}

}  // namespace weightbroker::bench
