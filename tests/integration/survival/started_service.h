// A service that an engine has started, found by its socket.
//
//   StartedService service(folder / "s.sock");
//   RunProgram("engine", service.EngineFlags("models:small", "models=" + folder / "models"));
//   EXPECT_EQ(service.CountKeepers(), 1);
//
// Stopped when destroyed, if there is one.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <vector>

namespace weightbroker::testing {

class StartedService {
 public:
  explicit StartedService(const std::string& socket) : socket_(socket) {}
  ~StartedService() { Kill(SIGTERM); }
  StartedService(const StartedService&) = delete;
  StartedService& operator=(const StartedService&) = delete;

  std::string log_path() const { return socket_ + ".log"; }

  // Flags for an engine that starts it, has it load the model, and attaches or fails.
  std::vector<std::string> EngineFlags(const std::string& model, const std::string& model_root,
                                       const std::string& metrics_address = "127.0.0.1:0") const;

  // Its weightbrokerd, or 0; and how many processes of that program were started for this socket.
  pid_t Keeper() const;
  int CountKeepers() const { return static_cast<int>(Keepers().size()); }

  // Sends keeper and broker the signal, and waits until they have gone. Whether they have.
  bool Kill(int signal);

 private:
  std::vector<pid_t> Keepers() const;

  const std::string socket_;
};

}  // namespace weightbroker::testing
