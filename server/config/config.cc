#include "server/config/config.h"

#include <sys/socket.h>

#include <cstdio>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/status_macros.h"
#include "common/desired/desired_state.h"
#include "common/process/spawn.h"
#include "server/config/flags.h"
#include "server/config/gpu_uuid.h"
#include "server/config/values.h"
#include "server/endpoint/listener.h"

namespace weightbroker {
namespace {

// Takes flags out of what was read, each with its source for the error message.
class FlagReader {
 public:
  explicit FlagReader(const FlagValues& values) : values_(values) {}

  bool IsSet(const char* flag) const { return values_.count(flag) > 0; }
  bool IsTrue(const char* flag) const { return IsSet(flag) && values_.at(flag).values.front() == "true"; }

  // Calls `take` with each value said for `flag`, if any. What it answers is reported with the flag and the value.
  absl::Status ForEach(const char* flag, const std::function<absl::Status(const std::string&)>& take) const {
    const auto it = values_.find(flag);
    if (it == values_.end()) return absl::OkStatus();
    for (const std::string& value : it->second.values) {
      if (const absl::Status status = take(value); !status.ok()) {
        return MakeError(Reason::kConfigurationInvalid, absl::StrCat(it->second.source, ": ", status.message()),
                         {{"flag", flag}, {"value", value}, {"source", it->second.source}});
      }
    }
    return absl::OkStatus();
  }

  // Parses each value said for `flag` and hands it to `take`.
  template <typename T, typename Take>
  absl::Status Parse(const char* flag, absl::StatusOr<T> (*parse)(const std::string&), Take take) const {
    return ForEach(flag, [&](const std::string& text) -> absl::Status {
      ASSIGN_OR_RETURN(T value, parse(text));
      take(std::move(value));
      return absl::OkStatus();
    });
  }

  absl::Status ParseInt(const char* flag, int least, int greatest, int* out) const {
    return ForEach(flag, [=](const std::string& text) -> absl::Status {
      ASSIGN_OR_RETURN(const int64_t value, ParseNumber(text, least, greatest));
      *out = static_cast<int>(value);
      return absl::OkStatus();
    });
  }

 private:
  const FlagValues& values_;
};

absl::Status ReadSocket(const FlagReader& flags, BrokerConfig* config) {
  RETURN_IF_ERROR(flags.ForEach("socket", [config](const std::string& path) -> absl::Status {
    ASSIGN_OR_RETURN(config->socket, ExpandGpuUuid(path, config->devices));
    return CheckSocketPath(config->socket);
  }));
  if (config->socket.empty()) {
    ASSIGN_OR_RETURN(DefaultSocket found, FindDefaultSocket());
    RETURN_IF_ERROR(CheckSocketPath(found.path));
    config->socket = std::move(found.path);
    config->create_socket_folder = found.create_folder;
  }
  RETURN_IF_ERROR(flags.Parse("socket_mode", ParseMode, [config](mode_t mode) { config->socket_mode = mode; }));
  return flags.Parse("socket_group", ParseGroup, [config](gid_t group) { config->socket_group = group; });
}

absl::Status ReadDevices(const FlagReader& flags, BrokerConfig* config) {
  RETURN_IF_ERROR(flags.Parse("devices", ParseDevice,
                              [config](std::string device) { config->devices.push_back(std::move(device)); }));
  return flags.ForEach("devices", [config](const std::string& word) -> absl::Status {
    if ((word != "all" && word != "host") || config->devices.size() == 1) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("\"", word, "\" stands alone, and ", config->devices.size(), " devices are named"));
  });
}

absl::Status CheckListens(int fd) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
    return absl::InvalidArgumentError(absl::StrCat("descriptor ", fd, " is not a listening socket"));
  }
  return absl::OkStatus();
}

absl::Status ReadListenFd(const FlagReader& flags, BrokerConfig* config) {
  return flags.ForEach("listen_fd", [config](const std::string& text) -> absl::Status {
    ASSIGN_OR_RETURN(const int64_t fd, ParseNumber(text, 0, 1'000'000));
    config->listen_fd = static_cast<int>(fd);
    return CheckListens(*config->listen_fd);
  });
}

absl::Status ReadOptionalNumber(const FlagReader& flags, const char* flag, int least, std::optional<int>* out) {
  return flags.ForEach(flag, [=](const std::string& text) -> absl::Status {
    ASSIGN_OR_RETURN(const int64_t number, ParseNumber(text, least, 1'000'000));
    *out = static_cast<int>(number);
    return absl::OkStatus();
  });
}

absl::Status ReadKeeper(const FlagReader& flags, BrokerConfig* config) {
  using std::chrono::milliseconds;
  RETURN_IF_ERROR(flags.ForEach("keeper_socket", [config](const std::string& path) -> absl::Status {
    ASSIGN_OR_RETURN(config->keeper_socket, ExpandGpuUuid(path, config->devices));
    return CheckSocketPath(config->keeper_socket);
  }));
  config->no_broker = flags.IsTrue("no_broker");
  config->detach = flags.IsTrue("detach");
  if (config->no_broker && config->keeper_socket.empty()) {
    return MakeError(Reason::kConfigurationInvalid,
                     "--no_broker: needs --keeper_socket, without which no broker could reach weightbrokerd",
                     {{"flag", "no_broker"}, {"source", "--no_broker"}});
  }
  RETURN_IF_ERROR(flags.Parse("broker_ping_interval", ParsePositiveDuration,
                              [config](milliseconds time) { config->broker_ping_interval = time; }));
  RETURN_IF_ERROR(flags.Parse("broker_ping_timeout", ParseDuration,
                              [config](milliseconds time) { config->broker_ping_timeout = time; }));
  RETURN_IF_ERROR(flags.Parse("broker_start_timeout", ParseDuration,
                              [config](milliseconds time) { config->broker_start_timeout = time; }));
  RETURN_IF_ERROR(flags.ParseInt("max_loaders", 1, 1024, &config->max_loaders));
  RETURN_IF_ERROR(ReadOptionalNumber(flags, "keeper_fd", 0, &config->keeper_fd));
  RETURN_IF_ERROR(ReadOptionalNumber(flags, "resume_fd", 0, &config->resume_fd));
  return ReadOptionalNumber(flags, "check_resume", 1, &config->check_resume);
}

absl::Status ReadUsers(const FlagReader& flags, const std::string& prefix, std::set<uid_t>* uids,
                       std::set<gid_t>* gids) {
  RETURN_IF_ERROR(flags.Parse((prefix + "_uids").c_str(), ParseUser, [uids](uid_t uid) { uids->insert(uid); }));
  return flags.Parse((prefix + "_gids").c_str(), ParseGroup, [gids](gid_t gid) { gids->insert(gid); });
}

absl::Status ReadAccess(const FlagReader& flags, AccessPolicy* access) {
  RETURN_IF_ERROR(ReadUsers(flags, "allowed", &access->allowed_uids, &access->allowed_gids));
  for (size_t i = 0; i < kOperationCount; ++i) {
    UserList& list = access->operations[i];
    RETURN_IF_ERROR(ReadUsers(flags, OperationName(static_cast<Operation>(i)), &list.uids, &list.gids));
  }
  return absl::OkStatus();
}

absl::Status ReadIntegrity(const FlagReader& flags, BrokerConfig* config) {
  RETURN_IF_ERROR(flags.Parse("scrub_interval", ParseDuration,
                              [config](std::chrono::milliseconds time) { config->scrub_interval = time; }));
  return flags.Parse("scrub_bandwidth", ParseByteCount,
                     [config](int64_t bytes) { config->scrub_bytes_per_second = bytes; });
}

// A size that an int holds, which is what gRPC takes.
absl::Status ReadSize(const FlagReader& flags, const char* flag, int64_t most, int* out) {
  return flags.ForEach(flag, [=](const std::string& text) -> absl::Status {
    ASSIGN_OR_RETURN(const int64_t bytes, ParseByteCount(text));
    if (bytes < 1024 || bytes > most) {
      return absl::InvalidArgumentError(absl::StrCat(bytes, " bytes; 1024 to ", most, " are allowed"));
    }
    *out = static_cast<int>(bytes);
    return absl::OkStatus();
  });
}

absl::Status ReadCaps(const FlagReader& flags, BrokerConfig* config) {
  using std::chrono::milliseconds;
  RETURN_IF_ERROR(flags.ParseInt("max_connections_per_uid", 0, 1'000'000, &config->max_connections_per_uid));
  RETURN_IF_ERROR(flags.ParseInt("max_streams_per_connection", 1, 1'000'000, &config->max_streams_per_connection));
  RETURN_IF_ERROR(flags.ParseInt("max_calls_per_uid", 0, 1'000'000, &config->max_calls_per_uid));
  RETURN_IF_ERROR(ReadSize(flags, "max_request", int64_t{64} << 20, &config->max_request_bytes));
  RETURN_IF_ERROR(ReadSize(flags, "max_metadata", int64_t{1} << 20, &config->max_metadata_bytes));
  RETURN_IF_ERROR(
      flags.Parse("call_deadline", ParseDuration, [config](milliseconds time) { config->call_deadline = time; }));
  return flags.Parse("write_timeout", ParsePositiveDuration,
                     [config](milliseconds time) { config->write_timeout = time; });
}

absl::Status AddModelRoot(const std::string& text, BrokerConfig* config) {
  ASSIGN_OR_RETURN(auto root, ParseModelRoot(text));
  for (const ConfiguredModelRoot& other : config->model_roots) {
    if (other.name == root.first)
      return absl::InvalidArgumentError(absl::StrCat("the name \"", other.name, "\" is given twice"));
    if (other.path == root.second) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", root.first, "\" and \"", other.name, "\" are the same folder, ", other.path));
    }
  }
  config->model_roots.push_back({std::move(root.first), std::move(root.second)});
  return absl::OkStatus();
}

// A program that is named must be there. At its default place it need not be until it is started, or checked.
absl::Status ReadProgram(const FlagReader& flags, const char* flag, const char* default_name, std::string* path) {
  RETURN_IF_ERROR(flags.ForEach(flag, [path](const std::string& text) {
    *path = text;
    return CheckProgram(text);
  }));
  if (!path->empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(*path, PathBesideThisProgram(default_name));
  const absl::Status there = flags.IsTrue("check_config") ? CheckProgram(*path) : absl::OkStatus();
  if (there.ok()) return there;
  return MakeError(Reason::kConfigurationInvalid, absl::StrCat("--", flag, ": ", there.message()),
                   {{"flag", flag}, {"value", *path}, {"source", "default"}});
}

}  // namespace

absl::StatusOr<BrokerConfig> ParseBrokerConfig(int argc, const char* const* argv) {
  ASSIGN_OR_RETURN(const FlagValues values, ReadFlags(argc, argv));
  const FlagReader flags(values);
  BrokerConfig config;
  config.help = flags.IsTrue("help");
  config.version = flags.IsTrue("version");
  config.check_config = flags.IsTrue("check_config");
  if (config.help || config.version) return config;

  RETURN_IF_ERROR(ReadDevices(flags, &config));
  RETURN_IF_ERROR(ReadSocket(flags, &config));
  RETURN_IF_ERROR(ReadListenFd(flags, &config));
  RETURN_IF_ERROR(ReadAccess(flags, &config.access));
  RETURN_IF_ERROR(ReadIntegrity(flags, &config));
  RETURN_IF_ERROR(ReadCaps(flags, &config));
  RETURN_IF_ERROR(flags.ForEach("model_roots", [&](const std::string& text) { return AddModelRoot(text, &config); }));
  RETURN_IF_ERROR(
      flags.Parse("memory_limit", ParseMemoryLimit, [&](MemoryLimit limit) { config.memory_limit = limit; }));
  RETURN_IF_ERROR(flags.Parse("device_memory_limit", ParseMemoryLimit,
                              [&](MemoryLimit limit) { config.device_memory_limit = limit; }));
  RETURN_IF_ERROR(flags.Parse("eviction", ParseEviction, [&](bool evicts) { config.evicts_idle = evicts; }));
  RETURN_IF_ERROR(flags.ForEach("architecture_dir", [&](const std::string& path) {
    config.architecture_dir = path;
    return CheckFolder(path);
  }));
  // A broker that takes over serves what is resident whatever is in the file: here it is only named.
  RETURN_IF_ERROR(flags.ForEach("desired", [&](const std::string& path) {
    config.desired_file = path;
    return config.check_config ? ReadDesiredFile(RealFileSystem(), path).status() : absl::OkStatus();
  }));
  RETURN_IF_ERROR(flags.Parse("metrics_address", ParseMetricsAddress,
                              [&](std::optional<int> port) { config.metrics_port = port; }));
  RETURN_IF_ERROR(flags.ParseInt("reader_threads", 0, 256, &config.reader_threads));
  RETURN_IF_ERROR(flags.ParseInt("reads_per_thread", 0, 64, &config.reads_per_thread));
  RETURN_IF_ERROR(flags.Parse("read_chunk", ParseReadChunk, [&](int64_t bytes) { config.read_chunk_bytes = bytes; }));
  RETURN_IF_ERROR(
      flags.Parse("read_method", ParseReadMethod, [&](std::string method) { config.read_method = std::move(method); }));
  RETURN_IF_ERROR(flags.ParseInt("max_concurrent_loads", 1, 64, &config.max_concurrent_loads));
  RETURN_IF_ERROR(flags.Parse("publish_timeout", ParsePositiveDuration,
                              [&](std::chrono::milliseconds time) { config.publish_timeout = time; }));
  RETURN_IF_ERROR(flags.Parse("publish_quantizations", ParseEngineMethod,
                              [&](EngineMethod method) { config.publish_quantizations.push_back(std::move(method)); }));
  RETURN_IF_ERROR(
      flags.Parse("unverified_exports", ParsePermission, [&](bool allowed) { config.exports_unverified = allowed; }));
  RETURN_IF_ERROR(flags.Parse("loader_stall_timeout", ParseDuration,
                              [&](std::chrono::milliseconds time) { config.loader_stall_timeout = time; }));
  RETURN_IF_ERROR(flags.Parse("log_level", ParseLogLevel, [&](LogLevel level) { config.log_level = level; }));
  RETURN_IF_ERROR(flags.Parse("log_format", ParseLogFormat, [&](LogFormat format) { config.log_format = format; }));
  RETURN_IF_ERROR(ReadKeeper(flags, &config));
  RETURN_IF_ERROR(ReadProgram(flags, "broker_path", "weightbroker-broker", &config.broker_path));
  RETURN_IF_ERROR(ReadProgram(flags, "loader_path", "weightbroker-loader", &config.loader_path));
  return config;
}

std::optional<int> AnswerWithoutServing(const std::string& program, const absl::StatusOr<BrokerConfig>& config) {
  if (!config.ok()) {
    fprintf(stderr, "%s: %s\n", program.c_str(), std::string(config.status().message()).c_str());
    return 2;
  }
  if (config->help) {
    printf("%s", FlagHelp(program).c_str());
    return 0;
  }
  if (config->version) {
    printf("%s %s\n", program.c_str(), WEIGHTBROKER_VERSION);
    return 0;
  }
  if (config->check_config) {
    printf("%s: the configuration is valid: socket %s, %zu model roots\n", program.c_str(), config->socket.c_str(),
           config->model_roots.size());
    return 0;
  }
  return std::nullopt;
}

}  // namespace weightbroker
