#include "client/tool/progress.h"

#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "client/tool/format.h"

namespace weightbroker::tool {
namespace {

std::string Describe(const LoadProgress& progress) {
  if (progress.total_bytes == 0) return progress.phase;
  std::string text =
      absl::StrCat(progress.phase, "  ", FormatBytes(progress.done_bytes), " of ", FormatBytes(progress.total_bytes));
  if (progress.rate_bytes_per_second > 0) {
    absl::StrAppend(&text, ", ", FormatBytes(static_cast<int64_t>(progress.rate_bytes_per_second)), "/s");
  }
  if (progress.seconds_left > 0) absl::StrAppend(&text, ", ", FormatSecondsLeft(progress.seconds_left), " left");
  return text;
}

}  // namespace

ProgressPrinter::ProgressPrinter() : is_terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressPrinter::~ProgressPrinter() {
  if (bar_drawn_) fputc('\n', stderr);
}

void ProgressPrinter::Show(const LoadProgress& progress) {
  if (is_terminal_) {
    constexpr char kClearLine[] = "\r\033[K";
    fprintf(stderr, "%s%s %s", kClearLine, FormatBar(progress.done_bytes, progress.total_bytes, 30).c_str(),
            Describe(progress).c_str());
    fflush(stderr);
    bar_drawn_ = true;
    return;
  }
  const auto now = Clock::now();
  if (progress.phase == last_phase_ && last_line_.has_value() && now - *last_line_ < std::chrono::seconds(2)) return;
  last_phase_ = progress.phase;
  last_line_ = now;
  fprintf(stderr, "%s\n", Describe(progress).c_str());
}

}  // namespace weightbroker::tool
