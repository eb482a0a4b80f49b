// weightbrokerd: what an operator starts. Keeps model weights resident and runs the broker that serves them, whose
// flags it takes: see docs/keeper.md. Exits 0 after a clean stop, 2 for an invalid configuration, 1 if the socket is
// not to be had, 4 if a live service has it, and refuses an upgrade with 3.
#include <fcntl.h>
#include <limits.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/log_format.h"
#include "common/base/unique_fd.h"
#include "common/process/spawn.h"
#include "server/config/config.h"
#include "server/keeper/detach.h"
#include "server/keeper/keeper.h"
#include "server/keeper/startup_pages.h"

namespace weightbroker {
namespace {

constexpr char kProgram[] = "weightbrokerd";
constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr int kCannotTakeOver = 3;
constexpr int kSocketInUse = 4;

// The absolute path by which this program was called, its symlinks as they are.
std::string FindProgram(const std::string& name) {
  char folder[PATH_MAX];
  if (absl::StartsWith(name, "/")) return name;
  if (absl::StrContains(name, "/")) {
    return getcwd(folder, sizeof(folder)) != nullptr ? absl::StrCat(folder, "/", name) : name;
  }
  const char* path = getenv("PATH");
  for (const std::string& candidate : std::vector<std::string>(absl::StrSplit(path == nullptr ? "" : path, ':'))) {
    const std::string program = absl::StrCat(candidate, "/", name);
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return name;
}

// An earlier upgrade's descriptor is not the next one's, and what is detached is so for good.
std::vector<std::string> ArgumentsToPassOn(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::erase_if(arguments, [](const std::string& argument) {
    return absl::StartsWith(argument, "--resume_fd=") || argument == "--detach" || argument == "--detach=true";
  });
  return arguments;
}

int Fail(const absl::Status& status) {
  fprintf(stderr, "%s: %s\n", kProgram, std::string(status.message()).c_str());
  return HasReason(status, Reason::kSocketInUse) ? kSocketInUse : kFailed;
}

// The broker knows what else the start would say of the desired state, and says it on stderr. Its exit code.
int CheckDesired(const BrokerConfig& config, int argc, char** argv) {
  const UniqueFd nothing(open("/dev/null", O_WRONLY | O_CLOEXEC));
  std::vector<std::string> arguments = ArgumentsToPassOn(argc, argv);
  if (!config.check_config) arguments.emplace_back("--check_config");
  auto broker =
      Spawn({.path = config.broker_path, .arguments = std::move(arguments), .fds = {{nothing.get(), STDOUT_FILENO}}});
  if (!broker.ok()) return Fail(broker.status());
  const auto exit = broker->Wait();
  return exit.ok() ? exit->shell_code() : Fail(exit.status());
}

int Main(int argc, char** argv) {
  auto config = ParseBrokerConfig(argc, argv);
  // Also before --detach, whose command has ended by the time the broker would say it.
  if (config.ok() && (config->check_config || config->detach) && !config->desired_file.empty()) {
    if (const int code = CheckDesired(*config, argc, argv); code != 0) return code;
  }
  if (const auto code = AnswerWithoutServing(kProgram, config); code.has_value()) return *code;
  if (config->check_resume.has_value()) return *config->check_resume <= kKeeperStateVersion ? 0 : kCannotTakeOver;
  if (config->listen_fd.has_value() || config->keeper_fd.has_value()) {
    fprintf(stderr, "%s: --listen_fd and --keeper_fd are for the broker: %s makes both and passes them on\n", kProgram,
            kProgram);
    return kUsage;
  }
  SetLogProgram("keeper");
  SetLogLevel(config->log_level);
  SetLogFormat(config->log_format);
  std::optional<Detached> detached;
  if (config->detach) {
    auto entered = Detached::Enter();
    if (!entered.ok()) return Fail(entered.status());
    detached = *std::move(entered);
  }
  auto keeper = Keeper::Start(*std::move(config), {FindProgram(argv[0]), ArgumentsToPassOn(argc, argv)});
  const int start_code = keeper.ok() ? 0 : Fail(keeper.status());
  if (detached.has_value()) std::move(*detached).Report(start_code);
  if (!keeper.ok()) return start_code;
  ForgetStartupPages();
  return (*keeper)->Run();
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) { return weightbroker::Main(argc, argv); }
