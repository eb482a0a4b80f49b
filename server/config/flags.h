// The flags of weightbrokerd and weightbroker-broker, as one table, and what a command line and a configuration file
// say about them: text still, with where each value came from. config.h turns it into a BrokerConfig.
//
// Thread-safe: all functions are pure, but for reading the configuration file.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace weightbroker {

enum class FlagKind {
  kText,      // one value
  kRepeated,  // may be repeated; an array in the file
  kList,      // the same, and values may be separated by commas
  kSwitch,    // true or false
};

enum class FlagPlace {
  kEverywhere,
  kCommandLine,  // makes no sense in a file
  kInternal,     // nor by hand: one of our programs says it to another; the help text leaves it out
};

struct FlagRow {
  const char* name;
  FlagKind kind;
  FlagPlace place;
  const char* value_name;     // for the help text
  const char* default_value;  // what ParseBrokerConfig takes if nothing is said; "" if that is worked out
  const char* help;
};

// Every flag, in the order of the help text, the internal ones among them. docs/configuration.md has the same rows.
std::span<const FlagRow> FlagRows();

// What was said about one flag, and where: "--socket" or "/etc/weightbroker.json: socket".
struct FlagValue {
  std::string source;
  std::vector<std::string> values;
};

// By flag name; flags that nobody spoke of have their default, with their name as source, or are missing.
using FlagValues = std::map<std::string, FlagValue>;

// Reads the command line and, if it names one, the file of --config_file. The command line wins, flag by flag.
// CONFIGURATION_INVALID naming flag or file and key, with the nearest flag there is for one that is unknown.
absl::StatusOr<FlagValues> ReadFlags(int argc, const char* const* argv);

// The help text.
std::string FlagHelp(const std::string& program);

}  // namespace weightbroker
