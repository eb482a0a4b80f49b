// A program of ours that runs as a process of its own, with what it prints.
//
//   Program engine("engine", {"--socket", socket, "--model", model, "--hold_seconds", "60"});
//   ASSERT_TRUE(engine.WaitForLine("attached")) << engine.Errors();
//   engine.Kill(SIGKILL);
//   EXPECT_EQ(engine.Wait().signal, SIGKILL);
//
// Killed when destroyed. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/process/spawn.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {

inline constexpr std::chrono::seconds kPatience{60};  // for what takes a second on a machine that is not busy

class Program {
 public:
  // Starts build/<preset>/bin/<name>. Ends the test program if it cannot be started. If `errors_fd` is given it is the
  // program's stderr, and Errors knows nothing of it.
  Program(const std::string& name, const std::vector<std::string>& arguments, int errors_fd = -1);

  pid_t pid() const { return child_->pid(); }
  int pidfd() const { return child_->pidfd(); }

  // Whether it prints `text` on stdout before it ends, and before kPatience has passed.
  bool WaitForLine(const std::string& text);

  void Kill(int signal);
  // Waits for its end, at most kPatience; then it is killed.
  ExitStatus Wait();
  bool IsRunning();

  // What it has printed so far; all of it after Wait.
  std::string Output() const;
  std::string Errors() const;

  // The first line of its output that is a JSON object; null if there is none.
  nlohmann::json Json() const;

 private:
  TemporaryFolder folder_;  // stdout and stderr are files in it: no pipe that fills up
  std::optional<ChildProcess> child_;
};

// Runs to the end. What it printed and how it ended.
struct Finished {
  ExitStatus exit;
  std::string output;
  std::string errors;
  nlohmann::json json;
};
Finished RunProgram(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace weightbroker::testing
