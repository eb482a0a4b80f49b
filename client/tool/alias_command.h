// The subcommands for aliases: names that stand for one resident weight set at a time.
#pragma once

#include <optional>
#include <string>

#include "client/tool/output.h"
#include "client/tool/service_commands.h"

namespace weightbroker::tool {

struct AliasFlags {
  std::string alias;
  std::string fingerprint;                          // of what it is to name; with `set`
  std::optional<std::string> expected_fingerprint;  // that it names now, or digits of it; "none": it must not exist
  bool release_previous = false;
};

ExitCode RunAliasSet(const ServiceFlags& service, const AliasFlags& flags);
ExitCode RunAliasDelete(const ServiceFlags& service, const AliasFlags& flags);
ExitCode RunAliasList(const ServiceFlags& service);

}  // namespace weightbroker::tool
