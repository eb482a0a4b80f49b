// What a node is to hold, as the JSON file of --desired says it: weight sets, each with a name of its own, and aliases
// that stand for them. docs/desired-state.md describes the file, deploy/desired/desired.schema.json is its schema.
//
//   const auto desired = ReadDesiredFile(RealFileSystem(), "/etc/weightbroker/sets.json");
//   if (!desired.ok()) return desired.status();     // ".../sets.json: /sets/0/dtpye: there is no such key ..."
//
// This is the file by itself: whether the models are there is seen when they are loaded. Thread-safe: all functions are
// pure, but for reading the file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/file.h"

namespace weightbroker {

inline constexpr int kDesiredStateVersion = 1;

// What RegisterRequest says of a weight set, field by field; empty or 0 where the file says nothing.
struct DesiredSet {
  std::string name;
  std::string model;
  std::string torch_version;
  int32_t tensor_parallel_size = 0;
  int32_t pipeline_parallel_size = 0;
  int32_t expert_parallel_size = 0;
  int32_t data_parallel_size = 0;
  std::string quantization;
  std::vector<std::string> unquantized_modules;
  std::string dtype;
  std::string layout;
  std::string mtp_layers;
  std::vector<int32_t> ranks;
  std::vector<std::string> devices;       // "host", or a GPU's UUID
  std::vector<std::string> handle_kinds;  // as in the API, without "HANDLE_KIND_"
};

struct DesiredState {
  std::vector<DesiredSet> sets;                // in the order of the file, which is that of loading
  std::map<std::string, std::string> aliases;  // to the name of the set that each stands for
};

// CONFIGURATION_INVALID with `file`, the JSON pointer of what is wrong there, what was found and what is allowed.
absl::Status DesiredStateError(const std::string& file, const std::string& pointer, const std::string& what,
                               const std::string& found, const std::string& allowed);

// Reads the text of a file; `file` names it in errors, which are DesiredStateError's: for JSON that is none or has a
// key twice, a version that is not kDesiredStateVersion, a key that is not known or is missing, a value of another type
// or out of its range, a set's name given twice, an alias that is none or stands for a set that is not there.
absl::StatusOr<DesiredState> ParseDesiredState(std::string_view text, const std::string& file);

// The same of a file, of at most 1 MiB. CONFIGURATION_INVALID, too, if it cannot be read.
absl::StatusOr<DesiredState> ReadDesiredFile(FileSystem& files, const std::string& path);

}  // namespace weightbroker
