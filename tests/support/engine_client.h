// What the tests' engines are made of.
#pragma once

#include <map>
#include <string>

#include "tests/support/checkpoint_builder.h"
#include "weightbroker/client.h"

namespace weightbroker::testing {

// A client of the service at `socket`, for any torch, that starts no service.
inline Client EngineClient(const std::string& socket) {
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = socket;
  return *Client::Create(options);
}

// What CheckpointBuilder's tensors hold, made once for each name: an engine compares again and again. Not thread-safe.
class RightBytes {
 public:
  const std::string& Of(const std::string& name, size_t size_bytes) {
    std::string& bytes = bytes_[name];
    if (bytes.empty()) bytes = TensorBytes(name, size_bytes);
    return bytes;
  }

 private:
  std::map<std::string, std::string> bytes_;
};

}  // namespace weightbroker::testing
