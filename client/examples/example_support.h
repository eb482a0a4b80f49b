// What the two example engines share and what no engine needs: their flags, a checksum, and a report. It knows nothing
// of weightbroker. See engine.cc and stub_engine.cc for how an engine gets its weights.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace example {

struct Flags {
  std::string socket;  // empty: not given
  std::string model;
  std::string torch_version;
  int tensor_parallel_size = 1;
  std::string layout;
  std::string quantization;
  int rank = 0;
  bool register_if_missing = false;
  bool json = false;
  bool write_fault = false;
  std::string dump_dir;  // empty: none
  int hold_seconds = 0;
  bool keep_reading = false;
  int loop = 1;
};

// Adds the shared flags, and says in --help how to recompute the checksum.
void AddFlags(CLI::App& app, Flags* flags);

struct View {
  std::string_view name;
  std::string_view bytes;
  bool is_alias = false;
};

struct Report {
  std::string program;
  std::string source;  // "attached" or "disk"
  std::string why_not_attached;
  std::string device = "host";  // or a GPU's UUID
  std::string fingerprint;
  int64_t generation = 0;
  double attach_seconds = 0;

  // By ReadAll.
  int64_t tensors = 0;  // aliases among them
  int64_t aliases = 0;
  int64_t bytes = 0;  // of all tensors but aliases
  double first_touch_seconds = 0;
  double checksum_seconds = 0;
  std::string checksum;
};

// Reads every tensor: one byte of each page first, then all of it for the checksum. `views` must be sorted by name.
void ReadAll(const std::vector<View>& views, Report* report);

// Writes each tensor's bytes to a file of its name in `folder`, for others to compare. Returns whether all were
// written, and says on stderr which was not. A name that would lie elsewhere is refused.
bool DumpAll(const std::vector<View>& views, const std::string& folder);

void Print(const Report& report, bool json);

// Says why there is no report, on stderr and with `json` also on stdout. Returns the exit code: 4 if `unavailable`,
// else 3.
int PrintFailure(const std::string& reason, const std::string& message,
                 const std::map<std::string, std::string>& metadata, bool unavailable, bool json);

// Prints the line "attached", for scripts, and waits for `flags.hold_seconds`; with `flags.keep_reading` it reads
// everything again and again meanwhile. Returns the exit code: 1 if what it reads is not what `report` says any more.
int Hold(const Flags& flags, const std::vector<View>& views, const Report& report);

// Writes to the first byte there is. The memory is read-only: this ends the process with SIGSEGV. Returns 1 if it does
// not.
int WriteToWeights(const std::vector<View>& views);

// Seconds of a steady clock, from some time on.
double Now();

}  // namespace example
