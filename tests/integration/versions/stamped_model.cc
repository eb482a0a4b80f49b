#include "tests/integration/versions/stamped_model.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {

void WriteStampedModel(const std::string& folder, uint64_t version, int tensor_count, int64_t tensor_bytes) {
  nlohmann::json header;
  for (int i = 0; i < tensor_count; ++i) {
    header["layer." + std::to_string(i)] = {
        {"dtype", "U8"}, {"shape", {tensor_bytes}}, {"data_offsets", {i * tensor_bytes, (i + 1) * tensor_bytes}}};
  }
  const std::vector<uint64_t> words(static_cast<size_t>(tensor_count * tensor_bytes) / sizeof(version), version);
  std::string data(words.size() * sizeof(version), '\0');
  memcpy(data.data(), words.data(), data.size());
  WriteFile(folder + "/config.json", kPlainConfig);
  WriteFile(folder + "/model.safetensors", RawSafetensors(header.dump()) + data);
}

}  // namespace weightbroker::testing
