// A strict reader of safetensors headers (https://github.com/huggingface/safetensors, "Format").
//
//   ASSIGN_OR_RETURN(auto file, file_system.Open(path, ReadMode::kBuffered));
//   auto header = ReadSafetensorsHeader(*file, "model.safetensors");
//   if (!header.ok()) return header.status();      // names file, tensor, expected and found
//
// It refuses everything that the reference reader refuses, and some of what that lets pass: docs/checkpoint-rules.md
// has the list. What is plainly another kind of file (a Git LFS pointer, an HTML page, a pickle) is said to be that,
// with CHECKPOINT_NOT_SAFETENSORS. Bounded in time and memory by the header's size. Thread-safe: all functions are
// pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/checkpoint/dtype.h"

namespace weightbroker {

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
inline constexpr int kMaxRank = 64;

struct SafetensorsTensor {
  std::string name;
  const DtypeInfo* dtype = nullptr;
  std::vector<int64_t> shape;
  int64_t begin_bytes = 0;  // from the start of the data, not of the file
  int64_t end_bytes = 0;

  int64_t size_bytes() const { return end_bytes - begin_bytes; }
};

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;       // sorted by begin_bytes, then end_bytes, then name
  std::map<std::string, std::string> metadata;  // __metadata__
  int64_t data_offset_bytes = 0;                // where the data starts in the file: 8 + header length
  int64_t data_size_bytes = 0;
};

// Checks the header text against the size of the data that follows it. `file_label` stands in messages.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view json, int64_t data_size_bytes,
                                                         const std::string& file_label);

// Reads the length and the header from `file` and checks them against the file's size.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(File& file, const std::string& file_label);

}  // namespace weightbroker
