// What Register would say of a file or of a model folder, found offline: nothing is allocated, no service is asked.
//
//   const InspectReport report = InspectFolder(RealFileSystem(), "/models/llama");
//   std::cout << InspectTable(report);                        // or InspectJson(report)
//   return report.ok ? 0 : 3;
//
// Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "common/base/file.h"

namespace weightbroker {

struct InspectVerdict {
  bool ok = false;
  std::string reason;   // "OK", or why not, UPPER_SNAKE
  std::string message;  // for people
};

struct InspectReport : InspectVerdict {
  std::string path;
  std::string quantization;  // "none", "fp8", or the method that is refused; empty if it is not known
  int64_t tensors = 0;       // 0 if they could not be read
  int64_t bytes = 0;         // of all tensors

  // For a file: whether a checkpoint of it alone would be served (given a config that fits it).
  std::optional<InspectVerdict> checkpoint;
};

// `ok` says whether the file is a safetensors file, every type of the format included.
InspectReport InspectFile(FileSystem& file_system, const std::string& path);

// `ok` says whether the folder's checkpoint would be served.
InspectReport InspectFolder(FileSystem& file_system, const std::string& folder);

// One JSON object, indented, with a newline at the end. Always valid UTF-8.
std::string InspectJson(const InspectReport& report);

// One line for each field.
std::string InspectTable(const InspectReport& report);

}  // namespace weightbroker
