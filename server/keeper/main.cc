// weightbrokerd: what an operator starts. It takes the broker's flags, and exits with the broker's exit code: 0 after a
// clean stop, 2 for an invalid configuration, 1 if socket or broker cannot be had, 128 and the signal's number if one
// killed the broker.
#include <cstdio>
#include <string>
#include <vector>

#include "common/base/log.h"
#include "common/base/socket.h"
#include "server/config/config.h"
#include "server/keeper/keeper.h"

namespace weightbroker {
namespace {

constexpr char kProgram[] = "weightbrokerd";

int Fail(const absl::Status& status) {
  fprintf(stderr, "%s: %s\n", kProgram, std::string(status.message()).c_str());
  return 1;
}

int Main(int argc, char** argv) {
  const auto config = ParseBrokerConfig(argc, argv);
  if (const auto code = AnswerWithoutServing(kProgram, config); code.has_value()) return *code;
  if (config->listen_fd.has_value()) {
    fprintf(stderr, "%s: --listen_fd is for the broker: %s makes the socket and passes it on\n", kProgram, kProgram);
    return 2;
  }
  SetLogProgram("keeper");
  SetLogLevel(config->log_level);
  RaiseFdLimit();  // the broker inherits it

  auto keeper = Keeper::Create(*config, std::vector<std::string>(argv + 1, argv + argc));
  if (!keeper.ok()) return Fail(keeper.status());
  const auto broker = keeper->Run();
  if (!broker.ok()) return Fail(broker.status());
  return broker->shell_code();
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) { return weightbroker::Main(argc, argv); }
