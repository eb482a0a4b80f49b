// The process that made a weight set's CUDA IPC memory. New engines can open that memory only while it lives; those
// that have opened it keep it. It was the set's loader, and lives for as long as anybody holds its control socket: this
// object does, and so does the keeper, with whom the next broker finds it.
//
//   ASSIGN_OR_RETURN(const auto exporter, Exporter::Keep(control_socket.get(), process));
//   if (!exporter->alive()) return ExporterDeadError(...);
//
// Thread-safe. It knows no CUDA.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/mutex.h"
#include "common/base/unique_fd.h"

namespace weightbroker {

class LoaderProcess;

class Exporter {
 public:
  // Makes a loader that has handed over its memory its exporter: it outlives its other ends from then on. The socket
  // stays the caller's, too. Fails as LoaderProcess::Detach; SYSTEM_ERROR.
  static absl::StatusOr<std::shared_ptr<const Exporter>> Keep(int control_fd, std::shared_ptr<LoaderProcess> process);

  // `process` is null for one that another broker had started.
  explicit Exporter(UniqueFd control_socket, std::shared_ptr<LoaderProcess> process = nullptr)
      : process_(std::move(process)), control_socket_(std::move(control_socket)) {}

  // Asks the kernel whether the other end of the socket is open still.
  bool alive() const;

  int control_fd() const { return control_socket_.get(); }

 private:
  const std::shared_ptr<LoaderProcess> process_;
  const UniqueFd control_socket_;  // closed first: then it ends by itself
};

// Tells when exporters end that should not: of each once, within an interval of its end. Whoever wants to know at once
// asks alive().
//
//   ExporterWatch watch([](const std::string& fingerprint) { Log(...); });
//   watch.Add(exporter, fingerprint);
//
// Runs one thread, which calls the function, with no lock held. It looks instead of waiting, because waiting would hold
// the socket of one that is to end. Thread-safe.
class ExporterWatch {
 public:
  using Ended = std::function<void(const std::string& fingerprint)>;

  explicit ExporterWatch(Ended ended, std::chrono::milliseconds interval = std::chrono::milliseconds(250));
  ~ExporterWatch();
  ExporterWatch(const ExporterWatch&) = delete;
  ExporterWatch& operator=(const ExporterWatch&) = delete;

  // Does not keep it: one that is given up is not told of. Of several with one fingerprint (each rank of an adopted set
  // has its own way to the same process) the first is watched.
  void Add(const std::shared_ptr<const Exporter>& exporter, const std::string& fingerprint);

 private:
  struct Watched {
    std::weak_ptr<const Exporter> exporter;
    std::string fingerprint;
  };

  void Run();
  // Takes those that have ended, or been given up, out of watched_ and returns the fingerprints of the former.
  std::vector<std::string> TakeEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Ended ended_;
  const std::chrono::milliseconds interval_;

  Mutex mutex_;
  CondVar changed_;
  std::vector<Watched> watched_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace weightbroker
