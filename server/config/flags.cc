#include "server/config/flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/json.h"
#include "common/base/near_names.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"

namespace weightbroker {
namespace {

using enum FlagKind;
using enum FlagPlace;

constexpr FlagRow kRows[] = {
    {"config_file", kText, kCommandLine, "FILE", "", "A JSON object with these flags as keys; the command line wins"},
    {"socket", kText, kEverywhere, "PATH", "",
     "The Unix socket to listen on. Default: $WEIGHTBROKER_SOCKET, else /run/weightbroker/weightbroker.sock for root, "
     "else $XDG_RUNTIME_DIR/weightbroker/weightbroker.sock. {gpu_uuid} in it stands for the UUID of the one GPU in "
     "--devices"},
    {"socket_mode", kText, kEverywhere, "OCTAL", "0660", "Permissions of the socket"},
    {"socket_group", kText, kEverywhere, "GROUP", "", "Group of the socket, by name or number. Default: the process's"},
    {"allowed_uids", kList, kEverywhere, "USER,...", "",
     "Users who may connect, by name or number, besides root and the service's own. Default, if allowed_gids is empty "
     "too: whoever the socket's mode lets in"},
    {"allowed_gids", kList, kEverywhere, "GROUP,...", "", "Groups whose members may connect, by name or number"},
    {"read_uids", kList, kEverywhere, "USER,...", "",
     "Users who may read (Export, Fingerprint, Health, ListWeightSets), by name or number, besides root and the "
     "service's own. Default, if read_gids is empty too: whoever may connect"},
    {"read_gids", kList, kEverywhere, "GROUP,...", "", "Groups whose members may read, by name or number"},
    {"register_uids", kList, kEverywhere, "USER,...", "", "The same for who may have weights loaded (Register)"},
    {"register_gids", kList, kEverywhere, "GROUP,...", "", "Groups whose members may, by name or number"},
    {"publish_uids", kList, kEverywhere, "USER,...", "", "The same for who may publish weights"},
    {"publish_gids", kList, kEverywhere, "GROUP,...", "", "Groups whose members may, by name or number"},
    {"admin_uids", kList, kEverywhere, "USER,...", "",
     "The same for who may administer (Unregister, Scrub, SetAlias, DeleteAlias)"},
    {"admin_gids", kList, kEverywhere, "GROUP,...", "", "Groups whose members may, by name or number"},
    {"model_roots", kRepeated, kEverywhere, "NAME=/PATH", "",
     "Folders under which models may lie; whoever may connect may load what is there. A spec says NAME:relative/path "
     "or "
     "an absolute path inside one"},
    {"devices", kList, kEverywhere, "GPU,...", "all",
     "GPUs that weights may be put on, by UUID or by number in the order of PCI addresses; all: those that can be "
     "used; "
     "host: none. Host memory always may"},
    {"memory_limit", kText, kEverywhere, "BYTES", "0",
     "The most host memory that weights may take, in bytes or with KiB, MiB, GiB or TiB, or as a percentage of the "
     "machine's or the cgroup's memory, as 80%; 0: what the machine allows"},
    {"device_memory_limit", kText, kEverywhere, "BYTES", "0",
     "The most memory that weights may take on each GPU, in bytes or with KiB, MiB, GiB or TiB, or as a percentage of "
     "the GPU's memory, as 90%; 0: what the GPU has free"},
    {"eviction", kText, kEverywhere, "POLICY", "refuse",
     "What becomes of a Register for which memory is missing: refuse, or idle: weight sets that nobody holds, pins or "
     "names by an alias are released, those not used for longest first, if that makes room"},
    {"publish_timeout", kText, kEverywhere, "TIME", "60m",
     "How long an engine that publishes weights may take until it commits them: a number with ms, s or m"},
    {"publish_quantizations", kList, kEverywhere, "ENGINE/VERSION/METHOD,...", "",
     "Quantization methods besides none and block-wise FP8 that an engine may publish, each for exactly that engine "
     "and version"},
    {"architecture_dir", kText, kEverywhere, "PATH", "",
     "A folder of architecture files (*.json), which say how to split the weights of models that are not built in"},
    {"desired", kText, kEverywhere, "FILE", "",
     "A JSON file of the weight sets and aliases that this service is to hold: it loads them by itself, and is not "
     "ready "
     "before they are resident; read again at SIGHUP"},
    {"unverified_exports", kText, kEverywhere, "POLICY", "refuse",
     "What becomes of an Export by spec of weights that are resident while files that they were made from are gone: "
     "refuse or allow"},
    {"metrics_address", kText, kEverywhere, "ADDRESS", "127.0.0.1:9464",
     "Where Prometheus finds /metrics: 127.0.0.1:PORT, port 0 for a free one, or empty for nowhere"},
    {"reader_threads", kText, kEverywhere, "N", "0", "Threads that read a checkpoint, at most 256; 0 chooses"},
    {"reads_per_thread", kText, kEverywhere, "N", "0",
     "Reads that each of them has under way at once with io_uring, at most 64; 0 chooses"},
    {"read_chunk", kText, kEverywhere, "BYTES", "0",
     "Length of one read, a multiple of 4KiB from 8KiB to 256MiB; 0 chooses: 1MiB, from memory 2MiB, to a GPU 4MiB"},
    {"read_method", kText, kEverywhere, "METHOD", "auto",
     "How checkpoints are read: io_uring, which fails where the system does not allow it, pread, or auto: io_uring "
     "where it is allowed"},
    {"max_concurrent_loads", kText, kEverywhere, "N", "2", "Loads under way at once, 1 to 64; further ones wait"},
    {"loader_stall_timeout", kText, kEverywhere, "TIME", "10m",
     "A loader that makes no progress for so long (reads no byte and ends no phase) is killed, and its load fails; 0s: "
     "never"},
    {"scrub_interval", kText, kEverywhere, "TIME", "0s",
     "How long after a check of all resident bytes against their digests the next one starts: a number with ms, s or "
     "m; "
     "0s: never"},
    {"scrub_bandwidth", kText, kEverywhere, "BYTES", "0",
     "The most bytes a second that such a check reads; 0: as fast as it goes"},
    {"max_connections_per_uid", kText, kEverywhere, "N", "512",
     "gRPC connections that one user may have open; 0: no limit"},
    {"max_streams_per_connection", kText, kEverywhere, "N", "1024", "Calls that one connection may have under way"},
    {"max_calls_per_uid", kText, kEverywhere, "N", "4096",
     "Calls that one user may have under way, leases among them; 0: no limit"},
    {"max_request", kText, kEverywhere, "BYTES", "1MiB", "The longest request, at most 64MiB"},
    {"max_metadata", kText, kEverywhere, "BYTES", "8KiB", "The longest metadata of a call, at most 1MiB"},
    {"call_deadline", kText, kEverywhere, "TIME", "60s",
     "How long a call may wait for its turn before it is refused, and a Commit may take to say all; 0s: for ever"},
    {"write_timeout", kText, kEverywhere, "TIME", "30s",
     "A call whose caller does not read what is sent to it for so long is cut off"},
    {"log_level", kText, kEverywhere, "LEVEL", "info", "debug, info, warning or error"},
    {"log_format", kText, kEverywhere, "FORMAT", "text", "text: logfmt, or json: one JSON object a line"},
    {"broker_path", kText, kEverywhere, "PATH", "",
     "The program that weightbrokerd starts. Default: weightbroker-broker beside it"},
    {"loader_path", kText, kEverywhere, "PATH", "",
     "The program that loads a model. Default: weightbroker-loader beside this one"},
    {"listen_fd", kText, kInternal, "FD", "", "A listening socket that was inherited, for a broker without a keeper"},
    {"keeper_socket", kText, kEverywhere, "PATH", "",
     "A private socket, mode 0600, between weightbrokerd and a broker that it has not started: the one listens there, "
     "the "
     "other connects"},
    {"no_broker", kSwitch, kCommandLine, "", "", "weightbrokerd starts no broker and waits for one on keeper_socket"},
    {"detach", kSwitch, kCommandLine, "", "",
     "weightbrokerd goes on in the background, in a session of its own, and the command ends once it has the socket"},
    {"broker_ping_interval", kText, kEverywhere, "TIME", "1s",
     "How often weightbrokerd asks the broker whether it is alive: a number with ms, s or m"},
    {"broker_ping_timeout", kText, kEverywhere, "TIME", "5s",
     "A broker that has not answered for so long is killed and replaced; 0s: never"},
    {"broker_start_timeout", kText, kEverywhere, "TIME", "30s",
     "A broker that is not ready after so long is killed and replaced; 0s: never"},
    {"max_loaders", kText, kEverywhere, "N", "64", "Loaders that weightbrokerd starts at once, 1 to 1024"},
    {"keeper_fd", kText, kInternal, "FD", "",
     "A connection to weightbrokerd that was inherited: how it starts the broker"},
    {"resume_fd", kText, kInternal, "FD", "",
     "What weightbrokerd wrote down before it replaced itself: how it goes on after SIGUSR2"},
    {"check_resume", kText, kInternal, "VERSION", "",
     "Say by the exit code whether this program could take over from one that writes down that version, and exit"},
    {"check_config", kSwitch, kCommandLine, "", "",
     "Check flags, file, folders and programs, say the result, and exit"},
    {"version", kSwitch, kCommandLine, "", "", "Print the version and exit"},
    {"help", kSwitch, kCommandLine, "", "", "Print this and exit"},
};

const FlagRow* FindRow(const std::string& name) {
  const auto* row = std::find_if(std::begin(kRows), std::end(kRows), [&](const FlagRow& r) { return r.name == name; });
  return row == std::end(kRows) ? nullptr : row;
}

absl::Status Invalid(const std::string& source, const std::string& why, std::map<std::string, std::string> metadata) {
  metadata["source"] = source;
  return MakeError(Reason::kConfigurationInvalid, absl::StrCat(source, ": ", why), metadata);
}

std::string NearestFlag(const std::string& name) {
  const auto distance = [&](const FlagRow& row) {
    return row.place == kInternal ? std::string::npos : EditDistance(name, row.name);
  };
  return std::min_element(std::begin(kRows), std::end(kRows),
                          [&](const FlagRow& a, const FlagRow& b) { return distance(a) < distance(b); })
      ->name;
}

// "--a=1" and "--a" to "a".
std::string NameIn(const std::string& argument) {
  const std::string text = argument.substr(std::min(argument.find_first_not_of('-'), argument.size()));
  return text.substr(0, text.find('='));
}

absl::Status UnknownArgument(const std::string& argument) {
  if (argument.rfind('-', 0) != 0) {
    return Invalid("command line", absl::StrCat("\"", argument, "\" is not a flag: flags begin with --"),
                   {{"argument", argument}});
  }
  const std::string nearest = NearestFlag(NameIn(argument));
  return Invalid("command line",
                 absl::StrCat("there is no flag ", argument.substr(0, argument.find('=')), "; the nearest is --",
                              nearest, " (--help lists all)"),
                 {{"flag", NameIn(argument)}, {"nearest", nearest}});
}

// A list's values may come in one word, with commas.
std::vector<std::string> SplitList(const std::vector<std::string>& words) {
  std::vector<std::string> values;
  for (const std::string& word : words) {
    for (const auto& value : absl::StrSplit(ToAbsl(word), ',', absl::SkipEmpty())) values.emplace_back(value);
  }
  return values;
}

absl::StatusOr<FlagValue> FromCommandLine(const FlagRow& row, const std::vector<std::string>& words) {
  const std::string source = absl::StrCat("--", row.name);
  if (row.kind == kList) return FlagValue{source, SplitList(words)};
  if (row.kind == kRepeated) return FlagValue{source, words};
  if (words.size() > 1) return Invalid(source, "is given more than once", {{"flag", row.name}});
  return FlagValue{source, words};
}

// What CLI11 made of a command line.
struct Words {
  std::map<std::string, std::vector<std::string>> values;  // by flag
  std::map<std::string, bool> switches;
  std::set<std::string> said;
};

// CLI11 takes the word after "--flag=" for the value that is missing; for us it is empty. Takes such words out.
std::vector<std::string> TakeEmptyValues(int argc, const char* const* argv, Words* words) {
  std::vector<std::string> rest;
  for (int i = argc - 1; i > 0; --i) {  // CLI11 wants them last to first
    const std::string word = argv[i];
    const FlagRow* row = word.ends_with('=') && word.starts_with("--") ? FindRow(NameIn(word)) : nullptr;
    if (row == nullptr || row->kind == kSwitch) {
      rest.push_back(word);
    } else {
      words->values[row->name].emplace_back();
      words->said.insert(row->name);
    }
  }
  return rest;
}

absl::StatusOr<Words> SplitCommandLine(int argc, const char* const* argv) {
  Words words;
  const std::vector<std::string> rest = TakeEmptyValues(argc, argv, &words);
  CLI::App app;
  app.set_help_flag();
  app.allow_extras();
  std::map<std::string, std::vector<std::string>> values;
  for (const FlagRow& row : kRows) {
    const std::string option = absl::StrCat("--", row.name);
    if (row.kind == kSwitch) {
      app.add_flag(option, words.switches[row.name]);
    } else {
      app.add_option(option, values[row.name])->allow_extra_args(false);
    }
  }
  try {
    app.parse(std::vector<std::string>(rest));
  } catch (const CLI::ParseError& error) {
    return Invalid("command line", error.what(), {});
  }
  if (const auto unknown = app.remaining(); !unknown.empty()) return UnknownArgument(unknown.front());
  for (const FlagRow& row : kRows) {
    if (app.count(absl::StrCat("--", row.name)) > 0) words.said.insert(row.name);
    for (std::string& value : values[row.name]) words.values[row.name].push_back(std::move(value));
  }
  return words;
}

absl::StatusOr<FlagValues> ReadCommandLine(int argc, const char* const* argv) {
  ASSIGN_OR_RETURN(Words words, SplitCommandLine(argc, argv));
  FlagValues values;
  for (const FlagRow& row : kRows) {
    if (words.said.count(row.name) == 0) continue;
    if (row.kind == kSwitch) words.values[row.name] = {words.switches[row.name] ? "true" : "false"};
    ASSIGN_OR_RETURN(values[row.name], FromCommandLine(row, words.values[row.name]));
  }
  return values;
}

absl::StatusOr<std::string> TextOf(const std::string& source, const nlohmann::json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer()) return value.dump();
  return Invalid(source, absl::StrCat("must be a string or a whole number, not ", value.type_name()), {});
}

absl::StatusOr<FlagValue> FromFile(const std::string& file, const std::string& key, const nlohmann::json& value) {
  const std::string source = absl::StrCat(file, ": ", key);
  const FlagRow* row = FindRow(key);
  if (row == nullptr) {
    const std::string nearest = NearestFlag(key);
    return Invalid(source, absl::StrCat("there is no such key; the nearest is \"", nearest, "\""),
                   {{"file", file}, {"key", key}, {"nearest", nearest}});
  }
  if (row->place != kEverywhere) {
    return Invalid(source, absl::StrCat("belongs on the command line, as --", key), {{"file", file}, {"key", key}});
  }
  FlagValue result{source, {}};
  if ((row->kind == kList || row->kind == kRepeated) && value.is_array()) {
    for (const nlohmann::json& element : value) {
      ASSIGN_OR_RETURN(result.values.emplace_back(), TextOf(source, element));
    }
    return result;
  }
  ASSIGN_OR_RETURN(result.values.emplace_back(), TextOf(source, value));
  return result;
}

absl::StatusOr<FlagValues> ReadConfigFile(const std::string& path) {
  constexpr int64_t kLimitBytes = 1 << 20;
  const auto text = RealFileSystem().ReadSmallFile(path, kLimitBytes);
  if (!text.ok()) {
    return Invalid("--config_file", std::string(text.status().message()), {{"file", path}});
  }
  const auto json = ParseStrictJson(*text);
  if (!json.ok()) return Invalid(path, std::string(json.status().message()), {{"file", path}});
  if (!json->is_object()) return Invalid(path, "must hold one JSON object", {{"file", path}});
  FlagValues values;
  for (const auto& [key, value] : json->items()) {
    ASSIGN_OR_RETURN(values[key], FromFile(path, key, value));
  }
  return values;
}

}  // namespace

std::span<const FlagRow> FlagRows() { return kRows; }

absl::StatusOr<FlagValues> ReadFlags(int argc, const char* const* argv) {
  ASSIGN_OR_RETURN(FlagValues values, ReadCommandLine(argc, argv));
  if (const auto file = values.find("config_file"); file != values.end()) {
    ASSIGN_OR_RETURN(FlagValues from_file, ReadConfigFile(file->second.values.front()));
    values.merge(from_file);  // keeps what is there
  }
  for (const FlagRow& row : kRows) {
    if (*row.default_value != '\0') values.emplace(row.name, FlagValue{row.name, {row.default_value}});
  }
  return values;
}

std::string FlagHelp(const std::string& program) {
  std::string help = absl::StrCat("Usage: ", program, " [--flag=value ...]\n\n");
  for (const FlagRow& row : kRows) {
    if (row.place == kInternal) continue;
    absl::StrAppend(&help, "  --", row.name, *row.value_name != '\0' ? "=" : "", row.value_name, "\n        ", row.help,
                    *row.default_value != '\0' ? absl::StrCat(". Default: ", row.default_value) : "", "\n");
  }
  return help;
}

}  // namespace weightbroker
