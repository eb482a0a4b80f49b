#include "tests/integration/survival/started_service.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/integration/service.h"

namespace weightbroker::testing {
namespace {

bool IsThere(pid_t pid) {
  std::error_code error;
  return !std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", error).empty();
}

// Every process of `program` that has `argument` on its command line.
std::vector<pid_t> Find(const std::string& program, const std::string& argument) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& folder : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = atoi(folder.path().filename().c_str());
    if (pid == 0) continue;
    if (std::filesystem::read_symlink(folder.path() / "exe", error).filename() != program) continue;
    std::ifstream file(folder.path() / "cmdline");
    const std::string command((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (command.find(argument + '\0') != std::string::npos) found.push_back(pid);
  }
  return found;
}

}  // namespace

std::vector<std::string> StartedService::EngineFlags(const std::string& model, const std::string& model_root,
                                                     const std::string& metrics_address) const {
  return {"--mode",
          "daemon",
          "--register",
          "--fallback",
          "fail",
          "--json",
          "--socket",
          socket_,
          "--model",
          model,
          "--torch_version",
          "any",
          "--model_root",
          model_root,
          "--daemon_flag=--metrics_address=" + metrics_address};
}

std::vector<pid_t> StartedService::Keepers() const { return Find("weightbrokerd", "--socket=" + socket_); }

pid_t StartedService::Keeper() const {
  const std::vector<pid_t> keepers = Keepers();
  return keepers.empty() ? 0 : keepers.front();
}

bool StartedService::Kill(int signal) {
  std::vector<pid_t> processes = Keepers();
  // A broker that is asked to end while its keeper is would be replaced.
  const std::vector<pid_t> brokers = Find("weightbroker-broker", "--socket=" + socket_);
  for (const pid_t pid : processes) kill(pid, signal);
  if (signal == SIGKILL) {
    for (const pid_t pid : brokers) kill(pid, signal);
  }
  processes.insert(processes.end(), brokers.begin(), brokers.end());
  return Eventually([&] {
    for (const pid_t pid : processes) {
      if (IsThere(pid)) return false;
    }
    return true;
  });
}

}  // namespace weightbroker::testing
