#include "bench/load/usage.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"

namespace weightbroker::bench {
namespace {

constexpr std::chrono::milliseconds kWatchInterval(5);

// "Key:  123 kB" -> 123.
std::map<std::string, int64_t> NumbersOf(const std::string& path) {
  std::map<std::string, int64_t> numbers;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon != std::string::npos)
      numbers[line.substr(0, colon)] = std::strtoll(line.c_str() + colon + 1, nullptr, 10);
  }
  return numbers;
}

double CpuSeconds(clockid_t clock) {
  timespec time{};
  if (clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void ReadTransfers(const std::string& process, Usage* usage) {
  const std::map<std::string, int64_t> numbers = NumbersOf(absl::StrCat("/proc/", process, "/io"));
  if (const auto found = numbers.find("read_bytes"); found != numbers.end()) usage->storage_read_bytes = found->second;
  if (const auto found = numbers.find("rchar"); found != numbers.end()) usage->read_call_bytes = found->second;
}

int64_t Difference(int64_t after, int64_t before) { return after < 0 || before < 0 ? -1 : after - before; }

}  // namespace

void to_json(nlohmann::ordered_json& json, const Usage& usage) {
  json = {{"cpu_seconds", usage.cpu_seconds},
          {"storage_read_bytes", usage.storage_read_bytes},
          {"read_call_bytes", usage.read_call_bytes},
          {"peak_resident_bytes", usage.peak_resident_bytes},
          {"peak_anonymous_bytes", usage.peak_anonymous_bytes},
          {"resident_before_bytes", usage.resident_before_bytes}};
}

OwnUsage::OwnUsage() {
  std::ofstream("/proc/self/clear_refs") << "5";
  before_.cpu_seconds = CpuSeconds(CLOCK_PROCESS_CPUTIME_ID);
  before_.resident_before_bytes = NumbersOf("/proc/self/status")["VmRSS"] * 1024;
  ReadTransfers("self", &before_);
}

Usage OwnUsage::Finish() const {
  Usage usage;
  ReadTransfers("self", &usage);
  usage.cpu_seconds = CpuSeconds(CLOCK_PROCESS_CPUTIME_ID) - before_.cpu_seconds;
  usage.storage_read_bytes = Difference(usage.storage_read_bytes, before_.storage_read_bytes);
  usage.read_call_bytes = Difference(usage.read_call_bytes, before_.read_call_bytes);
  usage.peak_resident_bytes = NumbersOf("/proc/self/status")["VmHWM"] * 1024;
  usage.resident_before_bytes = before_.resident_before_bytes;
  return usage;
}

ChildUsage::ChildUsage(pid_t pid) : pid_(pid), thread_([this] { Watch(); }) {}

ChildUsage::~ChildUsage() {
  ended_ = true;
  if (thread_.joinable()) thread_.join();
}

void ChildUsage::Watch() {
  const std::string path = absl::StrCat("/proc/", pid_, "/status");
  while (!ended_) {
    std::map<std::string, int64_t> numbers = NumbersOf(path);
    peaks_.peak_resident_bytes = std::max(peaks_.peak_resident_bytes, numbers["VmHWM"] * 1024);
    peaks_.peak_anonymous_bytes = std::max(peaks_.peak_anonymous_bytes, numbers["RssAnon"] * 1024);
    std::this_thread::sleep_for(kWatchInterval);
  }
}

Usage ChildUsage::Finish() {
  siginfo_t info{};
  while (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
  ended_ = true;
  thread_.join();
  Usage usage = peaks_;
  if (clockid_t clock{}; clock_getcpuclockid(pid_, &clock) == 0) usage.cpu_seconds = CpuSeconds(clock);
  ReadTransfers(std::to_string(pid_), &usage);
  return usage;
}

}  // namespace weightbroker::bench
