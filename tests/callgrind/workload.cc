// What callgrind_check.py counts the instructions of.
//
//   callgrind_workload manifest            decodes a manifest of 6,000 tensors, in DecodeManifest
//   callgrind_workload health SOCKET N     calls Health N times, once the service answers; what counts is the service
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/connection.h"
#include "client/src/manifest_decoder.h"
#include "common/plan/manifest.h"

namespace weightbroker {

constexpr int64_t kTensorBytes = 512;
constexpr int kLayers = 40;
constexpr int kExperts = 50;  // of three weights each: 6,000 in all

// Names and shapes as those of a mixture of experts.
std::vector<v1::Tensor> ManifestRows() {
  std::vector<v1::Tensor> rows;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int expert = 0; expert < kExperts; ++expert) {
      for (const char* const name : {"down_proj", "gate_proj", "up_proj"}) {
        v1::Tensor& row = rows.emplace_back();
        row.set_name(absl::StrCat("model.layers.", 100 + layer, ".mlp.experts.", 100 + expert, ".", name, ".weight"));
        row.set_dtype(v1::DATA_TYPE_BF16);
        row.add_shape(16);
        row.add_shape(16);
        row.set_offset_bytes(static_cast<int64_t>(rows.size() - 1) * kTensorBytes);
        row.set_size_bytes(kTensorBytes);
        row.set_digest(std::string(16, 'd'));
      }
    }
  }
  return rows;
}

// Its name is what the instructions are counted under.
[[gnu::noinline]] absl::StatusOr<client::Manifest> DecodeManifest(std::vector<client::RawMessage> messages,
                                                                  client::SlabView slab, int64_t tensor_count) {
  client::ManifestDecoder decoder({slab.size_bytes}, tensor_count);
  for (client::RawMessage& message : messages) {
    if (absl::Status status = decoder.Add(std::move(message)); !status.ok()) return status;
  }
  return std::move(decoder).Finish({&slab, 1});
}

int RunManifest() {
  const std::vector<v1::Tensor> rows = ManifestRows();
  const auto tensor_count = static_cast<int64_t>(rows.size());
  const std::vector<std::byte> slab(rows.size() * kTensorBytes);
  const auto bytes = SerializeManifest(rows);
  if (!bytes.ok()) return 1;
  const auto frames = SplitManifest(*bytes);
  if (!frames.ok()) return 1;
  std::vector<client::RawMessage> messages;
  for (const std::string_view frame : *frames) messages.emplace_back(frame);
  const auto manifest =
      DecodeManifest(std::move(messages), {slab.data(), static_cast<int64_t>(slab.size())}, tensor_count);
  if (!manifest.ok() || static_cast<int64_t>(manifest->tensors.size()) != tensor_count) {
    fprintf(stderr, "%s\n", manifest.status().ToString().c_str());
    return 1;
  }
  printf("%zu tensors\n", manifest->tensors.size());
  return 0;
}

int RunHealth(const std::string& socket, int calls) {
  const auto connection = client::Connection::Open({.socket_path = socket});
  if (!connection.ok()) return 1;
  const client::Deadline deadline = client::DeadlineIn(std::chrono::minutes(2));
  if (!(*connection)->WaitUntilConnected(deadline).ok()) return 1;
  for (int i = 0; i < calls; ++i) {
    v1::HealthResponse response;
    const absl::Status status = (*connection)->Call(deadline, [&](grpc::ClientContext& context) {
      return (*connection)->service().Health(&context, {}, &response);
    });
    if (!status.ok()) {
      fprintf(stderr, "%s\n", status.ToString().c_str());
      return 1;
    }
  }
  return 0;
}

}  // namespace weightbroker

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments == std::vector<std::string>{"manifest"}) return weightbroker::RunManifest();
  if (arguments.size() == 3 && arguments[0] == "health") {
    return weightbroker::RunHealth(arguments[1], atoi(arguments[2].c_str()));
  }
  fprintf(stderr, "usage: callgrind_workload manifest | health SOCKET CALLS\n");
  return 2;
}
