#include "bench/standby/observer.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/bench_process.h"
#include "bench/bench_support.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

constexpr double kPatienceSeconds = 60;

struct SocketPair {
  UniqueFd ours;
  UniqueFd theirs;
};

absl::StatusOr<SocketPair> MakeSocketPair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) return SystemError("socketpair", errno);
  return SocketPair{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

absl::StatusOr<MemberReport> Receive(int fd) {
  MemberReport report;
  const ssize_t size = recv(fd, &report, sizeof(report), 0);
  if (size == static_cast<ssize_t>(sizeof(report))) return report;
  return MakeError(Reason::kSystemError, size == 0 ? "a member ended before its report" : "a report could not be read");
}

// Polls one of them until it is readable or closed. False after the time.
bool WaitReadable(int fd, double seconds) {
  pollfd waiting = {fd, POLLIN, 0};
  return poll(&waiting, 1, static_cast<int>(seconds * 1000)) == 1;
}

// Takes the standby's report that it is active out of its socket.
absl::Status TakeActive(WatchedMember& standby, double from, Sample* sample) {
  (*sample)["takeover"] = NowSeconds() - from;
  ASSIGN_OR_RETURN(const MemberReport report, Receive(standby.report_fd()));
  if (report.step != MemberReport::Step::kActive) {
    return MakeError(Reason::kProtocolError, "the standby says something else than that it is active");
  }
  (*sample)["woken"] = report.woken_at - from;
  (*sample)["first_read"] = report.read_at - from;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<WatchedMember> WatchedMember::Start(const MemberFlags& flags) {
  ASSIGN_OR_RETURN(SocketPair report, MakeSocketPair());
  ASSIGN_OR_RETURN(SocketPair silent, MakeSocketPair());
  SpawnOptions options = {
      .path = OwnPath(),
      .arguments = {"--member", "--socket", flags.socket, "--folder", flags.model, "--group", flags.group,
                    "--hold_bytes", absl::StrCat(flags.hold_bytes), "--timeout_ms", absl::StrCat(flags.timeout_ms)},
      .fds = {{report.theirs.get(), kReportFd}, {silent.theirs.get(), kSilentFd}}};
  if (flags.huge_pages) options.arguments.emplace_back("--huge_pages");
  if (flags.gpu) options.arguments.emplace_back("--gpu");
  ASSIGN_OR_RETURN(ChildProcess process, Spawn(options));
  return WatchedMember(std::move(process), std::move(report.ours), std::move(silent.ours));
}

absl::StatusOr<MemberReport> WatchedMember::WaitFor(MemberReport::Step step, double seconds) {
  if (!WaitReadable(report_.get(), seconds)) return MakeError(Reason::kDeadlineExceeded, "a member says nothing");
  ASSIGN_OR_RETURN(const MemberReport report, Receive(report_.get()));
  if (report.step == step) return report;
  return MakeError(Reason::kProtocolError, absl::StrCat("a member reports step ", static_cast<int>(report.step),
                                                        " instead of ", static_cast<int>(step)));
}

absl::StatusOr<Sample> TimeDeath(WatchedMember& active, WatchedMember& standby) {
  Sample sample;
  pollfd waiting[] = {
      {standby.report_fd(), POLLIN, 0}, {active.silent_fd(), POLLIN, 0}, {active.process().pidfd(), POLLIN, 0}};
  const double from = NowSeconds();
  RETURN_IF_ERROR(active.process().Kill(SIGKILL));
  const double until = from + kPatienceSeconds;
  while (std::any_of(std::begin(waiting), std::end(waiting), [](const pollfd& fd) { return fd.fd >= 0; })) {
    if (NowSeconds() > until) return MakeError(Reason::kDeadlineExceeded, "nobody took over from a member that died");
    if (poll(waiting, std::size(waiting), 1000) < 0 && errno != EINTR) return SystemError("poll", errno);
    if (waiting[0].revents != 0) RETURN_IF_ERROR(TakeActive(standby, from, &sample));
    if (waiting[1].revents != 0) sample["socket_close"] = NowSeconds() - from;
    if (waiting[2].revents != 0) sample["pidfd"] = NowSeconds() - from;
    for (pollfd& fd : waiting) {
      if (fd.revents != 0) fd.fd = -1;  // poll passes over it from here on
    }
  }
  return sample;
}

absl::StatusOr<Sample> TimeHang(WatchedMember& active, WatchedMember& standby) {
  Sample sample;
  const double from = NowSeconds();
  RETURN_IF_ERROR(active.process().Kill(SIGSTOP));
  if (!WaitReadable(standby.report_fd(), kPatienceSeconds)) {
    return MakeError(Reason::kDeadlineExceeded, "nobody took over from a member that was stopped");
  }
  RETURN_IF_ERROR(TakeActive(standby, from, &sample));
  const double continued = NowSeconds();
  RETURN_IF_ERROR(active.process().Kill(SIGCONT));
  RETURN_IF_ERROR(active.WaitFor(MemberReport::Step::kFenced, kPatienceSeconds).status());
  sample["fenced_after_continue"] = NowSeconds() - continued;
  return sample;
}

}  // namespace weightbroker::bench
