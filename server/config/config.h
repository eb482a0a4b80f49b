// What the service was told to do, checked: one struct from flags and a JSON file (see flags.h for both).
//
//   const auto config = ParseBrokerConfig(argc, argv);
//   if (const auto code = AnswerWithoutServing("weightbroker-broker", config); code.has_value()) return *code;
//   Serve(*config);
//
// Thread-safe once made: a plain value. Parsing looks users and groups up by name, which getpwnam does not do in
// parallel: do it before there are threads.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/log.h"
#include "common/base/log_format.h"
#include "server/config/values.h"
#include "server/endpoint/access.h"

namespace weightbroker {

// A folder under which models may lie: "name:relative/path" in a spec.
struct ConfiguredModelRoot {
  std::string name;
  std::string path;  // absolute, a folder, symbolic links resolved
};

struct BrokerConfig {
  std::string socket;                 // absolute, short enough for a socket
  bool create_socket_folder = false;  // for ListenerOptions: it is a built-in default
  mode_t socket_mode = 0660;
  std::optional<gid_t> socket_group;

  AccessPolicy access;

  std::vector<ConfiguredModelRoot> model_roots;  // in their order; no name and no path twice
  std::vector<std::string> devices;              // GPUs by ordinal or UUID, or "all" or "host" alone; never empty
  MemoryLimit memory_limit;                      // on the host; none but the machine's by default
  MemoryLimit device_memory_limit;               // on each GPU
  bool evicts_idle = false;
  std::string architecture_dir;     // empty for none
  std::string desired_file;         // likewise
  std::optional<int> metrics_port;  // on 127.0.0.1; 0 for a free one; unset for no metrics
  int reader_threads = 0;           // 0: the loader chooses, as for the next two
  int reads_per_thread = 0;
  int64_t read_chunk_bytes = 0;
  std::string read_method;  // "io_uring", "pread", or empty for io_uring where it is to be had
  int max_concurrent_loads = 2;
  std::chrono::milliseconds publish_timeout{std::chrono::minutes(60)};
  std::vector<EngineMethod> publish_quantizations;
  bool exports_unverified = false;
  std::chrono::milliseconds loader_stall_timeout{600'000};  // 0: never
  std::chrono::milliseconds scrub_interval{0};              // 0: never
  int64_t scrub_bytes_per_second = 0;                       // 0: no cap
  int max_connections_per_uid = 512;                        // 0: no limit, as for the next but one
  int max_streams_per_connection = 1024;
  int max_calls_per_uid = 4096;
  int max_request_bytes = 1 << 20;
  int max_metadata_bytes = 8 << 10;
  std::chrono::milliseconds call_deadline{60'000};  // 0: none
  std::chrono::milliseconds write_timeout{30'000};
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;

  std::string broker_path;
  std::string loader_path;
  std::optional<int> listen_fd;  // an open, listening socket

  std::string keeper_socket;  // empty: none
  bool no_broker = false;     // only with keeper_socket
  bool detach = false;
  std::chrono::milliseconds broker_ping_interval{1'000};
  std::chrono::milliseconds broker_ping_timeout{5'000};    // 0: never
  std::chrono::milliseconds broker_start_timeout{30'000};  // 0: never
  int max_loaders = 64;
  std::optional<int> keeper_fd;     // an open socket
  std::optional<int> resume_fd;     // an open file
  std::optional<int> check_resume;  // a version of the keeper's state

  bool check_config = false;
  bool version = false;
  bool help = false;

  // Whether `devices` has a GPU in it.
  bool names_gpus() const { return !devices.empty() && devices[0] != "all" && devices[0] != "host"; }
};

// Reads and checks everything that can be checked without changing anything: paths, folders, users, programs that were
// named, the inherited socket. With check_config also the programs at their default places, and the form
// of the desired state: common/desired/desired_check.h has the rest, which needs protobuf. CONFIGURATION_INVALID naming
// the flag (or file and key), what was found there, and what is allowed. Nothing is checked with --help or --version.
absl::StatusOr<BrokerConfig> ParseBrokerConfig(int argc, const char* const* argv);

// Prints what --help, --version or --check_config ask for (stdout), or why the configuration is invalid (stderr), and
// gives the exit code: 0, or 2 for an invalid configuration. nullopt if the program is to serve.
std::optional<int> AnswerWithoutServing(const std::string& program, const absl::StatusOr<BrokerConfig>& config);

}  // namespace weightbroker
