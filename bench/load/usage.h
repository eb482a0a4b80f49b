// What a process has used: of this one between two moments, and of a child over its whole life.
//
//   OwnUsage meter;  ... work ...  const Usage used = meter.Finish();
//
//   ChildUsage watch(child.pid());  ... talk to it ...  const Usage used = watch.Finish();   // waits for its end, and
//   child.Wait();                                                                            // leaves it to be reaped
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <thread>

namespace weightbroker::bench {

// As rival.py says it of itself. -1 where the system does not tell.
struct Usage {
  double cpu_seconds = 0;
  int64_t storage_read_bytes = -1;   // what the kernel fetched for it (read_bytes of /proc/PID/io)
  int64_t read_call_bytes = -1;      // what its read calls returned (rchar); reads by io_uring are not in it
  int64_t peak_resident_bytes = 0;   // shared pages included
  int64_t peak_anonymous_bytes = 0;  // without pages of files and memfds; of children only
  int64_t resident_before_bytes = 0;
};

void to_json(nlohmann::ordered_json& json, const Usage& usage);

class OwnUsage {
 public:
  OwnUsage();  // and lets the kernel forget the peak so far, where it may
  Usage Finish() const;

 private:
  Usage before_;
};

// Looks at the child's memory every few milliseconds from a thread of its own.
class ChildUsage {
 public:
  explicit ChildUsage(pid_t pid);
  ~ChildUsage();
  ChildUsage(const ChildUsage&) = delete;
  ChildUsage& operator=(const ChildUsage&) = delete;

  // Once. Waits until it has ended.
  Usage Finish();

 private:
  void Watch();

  const pid_t pid_;
  std::atomic<bool> ended_{false};
  Usage peaks_;  // the thread's
  std::thread thread_;
};

}  // namespace weightbroker::bench
