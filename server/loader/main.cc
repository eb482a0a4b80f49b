// weightbroker-loader: does one load, publication or scrub for the broker, hands over its memory, and exits; of memory
// of kind CUDA_IPC it stays as the exporter until nobody holds its control socket any more. A malformed file or an
// out-of-memory ends this process and nothing else. Exit codes: 0 handed over, 1 failed (and the broker was told), 2
// usage.
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "server/loader/load_session.h"
#include "server/loader/oom_volunteer.h"
#include "server/loader/publish_session.h"
#include "server/loader/scrub_session.h"

namespace weightbroker {
namespace {

constexpr int kScrubNiceness = 10;

// Set when the result is being sent: a broker that has received it may close the socket before this process has ended.
std::atomic<bool> g_handing_over{false};

// Ends this process as soon as the broker's end of the control socket is closed: the broker has died, or it has
// cancelled the load. Whatever the other threads are doing, their result has nowhere to go, and the kernel gives all
// memory back.
void EndWithTheBroker(int control_fd) {
  while (true) {
    pollfd entry{.fd = control_fd, .events = POLLRDHUP, .revents = 0};
    if (poll(&entry, 1, -1) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) {
      _exit(g_handing_over ? 0 : 1);
    }
  }
}

// Where memory runs out during a load, the load should go, and not the broker or an engine. But an exporter is what new
// engines need its set for.
void StayAsExporter(OomVolunteer& volunteer) {
  const absl::Status withdrawn = volunteer.Withdraw();
  if (withdrawn.ok()) return;
  Log(LogLevel::kWarning, "exporter.oom_score",
      {{"message", absl::StrCat(std::string(withdrawn.message()),
                                ": where memory runs out, the kernel ends this exporter first")}});
}

// Lets CUDA see the GPUs of the request and no other, whatever this process was started with: fewer are found faster,
// and no context comes to be on another one.
absl::StatusOr<CudaDriver*> OpenCuda(const internal::v1::LoadRequest& request) {
  std::set<std::string> visible;  // each once: of a list that names one twice CUDA sees none
  for (const internal::v1::RankPlacement& rank : request.ranks()) visible.insert(rank.device());
  setenv("CUDA_VISIBLE_DEVICES", absl::StrJoin(visible, ",").c_str(), 1);  // the only other thread reads no environment
  return LoadCudaDriver();
}

absl::Status Load(int request_fd, int control_fd) {
  OomVolunteer volunteer;
  ASSIGN_OR_RETURN(const internal::v1::LoadRequest request, ReadLoadRequest(request_fd));
  const auto before_hand_over = [&] {
    if (request.handle_kind() == v1::HANDLE_KIND_CUDA_IPC) StayAsExporter(volunteer);
    g_handing_over = true;
  };
  const CudaOpener open_cuda = [&request] { return OpenCuda(request); };
  if (request.has_scrub()) {
    setpriority(PRIO_PROCESS, 0, kScrubNiceness);  // engines go first; where that is refused it is but less polite
    return RunScrubSession(
        request, control_fd, [] { g_handing_over = true; }, open_cuda);
  }
  if (request.has_publish()) {
    return RunPublishSession(RealFileSystem(), request, control_fd, before_hand_over, open_cuda);
  }
  Log(LogLevel::kInfo, "load.started", {{"fingerprint", request.fingerprint()}, {"model", request.spec().model()}});
  return RunLoadSession(RealFileSystem(), request, control_fd, {}, before_hand_over, open_cuda);
}

int Run(int request_fd, int control_fd) {
  SetLogProgram("loader");
  std::signal(SIGPIPE, SIG_IGN);
  RaiseFdLimit();
  StartThreadOrExit("the end of the broker", [control_fd] { EndWithTheBroker(control_fd); }).detach();
  const absl::Status status = Load(request_fd, control_fd);
  if (!status.ok()) {
    Log(LogLevel::kError, "load.failed",
        {{"reason", GetErrorDetails(status).reason}, {"message", std::string(status.message())}});
  }
  // No destructors: a large mapping takes time to unmap by hand, and the other thread still polls.
  _exit(status.ok() ? 0 : 1);
}

}  // namespace
}  // namespace weightbroker

int main(int argc, char** argv) {
  CLI::App app("Loads one shard for the broker of weightbroker, which starts it; not for use by hand.");
  int request_fd = -1;
  int control_fd = -1;
  app.add_option("--request_fd", request_fd, "Descriptor of a sealed memfd with the LoadRequest")->required();
  app.add_option("--control_fd", control_fd, "Descriptor of the control socket")->required();
  app.set_version_flag("--version", std::string(WEIGHTBROKER_VERSION));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return weightbroker::Run(request_fd, control_fd);
}
