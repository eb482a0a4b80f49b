#include "server/broker/exporter.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "server/broker/loader_spawner.h"

namespace weightbroker {

absl::StatusOr<std::shared_ptr<const Exporter>> Exporter::Keep(int control_fd, std::shared_ptr<LoaderProcess> process) {
  RETURN_IF_ERROR(process->Detach());
  UniqueFd socket(fcntl(control_fd, F_DUPFD_CLOEXEC, 0));
  if (!socket.valid()) return SystemError("duplicating an exporter's control socket", errno);
  return std::make_shared<const Exporter>(std::move(socket), std::move(process));
}

bool Exporter::alive() const {
  pollfd entry{.fd = control_socket_.get(), .events = POLLRDHUP, .revents = 0};
  return poll(&entry, 1, 0) == 0;
}

ExporterWatch::ExporterWatch(Ended ended, std::chrono::milliseconds interval)
    : ended_(std::move(ended)), interval_(interval), thread_([this] { Run(); }) {}

ExporterWatch::~ExporterWatch() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void ExporterWatch::Add(const std::shared_ptr<const Exporter>& exporter, const std::string& fingerprint) {
  MutexLock lock(mutex_);
  const bool is_there = std::any_of(watched_.begin(), watched_.end(), [&](const Watched& watched) {
    return watched.fingerprint == fingerprint && !watched.exporter.expired();
  });
  if (is_there) return;
  watched_.push_back({exporter, fingerprint});
  changed_.NotifyAll();
}

void ExporterWatch::Run() {
  while (true) {
    std::vector<std::string> ended;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && watched_.empty()) changed_.Wait(mutex_);
      if (stopping_) return;
      ended = TakeEnded();
      if (ended.empty()) changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + interval_);
    }
    for (const std::string& fingerprint : ended) ended_(fingerprint);
  }
}

std::vector<std::string> ExporterWatch::TakeEnded() {
  std::vector<std::string> ended;
  const auto is_over = [&](const Watched& watched) {
    const auto exporter = watched.exporter.lock();
    if (exporter == nullptr) return true;
    if (exporter->alive()) return false;
    ended.push_back(watched.fingerprint);
    return true;
  };
  watched_.erase(std::remove_if(watched_.begin(), watched_.end(), is_over), watched_.end());
  return ended;
}

}  // namespace weightbroker
