#include "tests/integration/program.h"

#include <fcntl.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <utility>

#include "common/base/unique_fd.h"

namespace weightbroker::testing {
namespace {

UniqueFd CreateFile(const std::string& path) {
  return UniqueFd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
}

}  // namespace

Program::Program(const std::string& name, const std::vector<std::string>& arguments, int errors_fd) {
  const UniqueFd output = CreateFile(folder_ / "stdout");
  const UniqueFd errors = CreateFile(folder_ / "stderr");
  auto child = Spawn({.path = std::string(WEIGHTBROKER_BIN_DIR) + "/" + name,
                      .arguments = arguments,
                      .fds = {{output.get(), 1}, {errors_fd < 0 ? errors.get() : errors_fd, 2}}});
  if (!child.ok()) {
    fprintf(stderr, "%s\n", child.status().ToString().c_str());
    abort();
  }
  child_ = *std::move(child);
}

bool Program::WaitForLine(const std::string& text) {
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < give_up) {
    const bool running = IsRunning();  // before reading: what it printed last must not be missed
    if (Output().find(text) != std::string::npos) return true;
    if (!running) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

void Program::Kill(int signal) { child_->Kill(signal).IgnoreError(); }

ExitStatus Program::Wait() {
  const auto exit = child_->Wait(kPatience);
  if (exit.ok()) return *exit;
  Kill(SIGKILL);
  return *child_->Wait();
}

bool Program::IsRunning() { return !child_->Wait(std::chrono::milliseconds(0)).ok(); }

std::string Program::Output() const { return ReadFile(folder_ / "stdout"); }

std::string Program::Errors() const { return ReadFile(folder_ / "stderr"); }

nlohmann::json Program::Json() const {
  std::istringstream lines(Output());
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && line[0] == '{') return nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  }
  return nullptr;
}

Finished RunProgram(const std::string& name, const std::vector<std::string>& arguments) {
  Program program(name, arguments);
  const ExitStatus exit = program.Wait();
  return {exit, program.Output(), program.Errors(), program.Json()};
}

}  // namespace weightbroker::testing
