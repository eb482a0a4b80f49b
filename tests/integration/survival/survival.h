// What the tests of survival need beside the service: its broker, how to end it, and who opens which file.
//
//   Service service;
//   const pid_t before = BrokerOf(service);
//   KillBroker(service, SIGKILL);                    // returns once another one is there
//   EXPECT_NE(BrokerOf(service), before);
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "common/base/unique_fd.h"
#include "tests/integration/service.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {

// The broker's process, or 0 if there is none at this moment.
pid_t BrokerOf(const Service& service);

// Whether another process than `before` is the broker, in time.
bool WaitForAnotherBroker(const Service& service, pid_t before);

// Ends the broker and waits for the next one. False if none comes.
bool KillBroker(const Service& service, int signal);

// Whether Health says so in time, over whichever broker answers.
bool WaitForStatus(const Service& service, v1::HealthResponse::Status status);

// A port of loopback that nobody listens on, for --metrics_address.
int FreePort();

// All metrics on that port, a line's end before the first; empty if nobody answers.
std::string ScrapeMetrics(int port);

// The value of a metric without labels on that port; -1 if nobody answers or it is not there.
double ReadMetric(int port, const std::string& name);

// A broker program that can be replaced by a new file while the service runs: for --broker_path.
class InstalledBroker {
 public:
  InstalledBroker();

  const std::string& path() const { return path_; }
  // As package managers do: another file is moved over it.
  void InstallAnew() const;

 private:
  TemporaryFolder folder_;
  std::string path_;
};

// A model of `bytes` in one file that is a hole but for its header: large for a loader, small on disk.
void WriteLargeModel(const std::string& folder, int64_t bytes);

// Sees every opening of a file in a folder, whoever does it.
class OpenWatch {
 public:
  explicit OpenWatch(const std::string& folder);

  // The names of the files that have been opened since the last call.
  std::vector<std::string> Opened();

 private:
  UniqueFd inotify_;
};

}  // namespace weightbroker::testing
