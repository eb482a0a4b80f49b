#include "client/tool/top_command.h"

#include <google/protobuf/util/time_util.h>
#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tool/format.h"
#include "common/base/quote.h"

namespace weightbroker::tool {
namespace {

using google::protobuf::util::TimeUtil;

constexpr char kHomeAndClear[] = "\x1b[H\x1b[2J";
constexpr int kBarWidth = 20;

std::string Now() {
  const time_t now = time(nullptr);
  tm parts{};
  localtime_r(&now, &parts);
  char text[16];
  return std::string(text, strftime(text, sizeof(text), "%H:%M:%S", &parts));
}

// " (+2)" or " (-1)"; empty if nothing has changed.
std::string Change(int now, int before) {
  const int change = now - before;
  if (change == 0) return "";
  return absl::StrCat(" (", change > 0 ? "+" : "", change, ")");
}

// Of loads that know how much there is to read.
void PrintLoads(const v1::HealthResponse& health) {
  std::vector<std::vector<std::string>> rows = {{"LOADING", "PROGRESS", "READ", "RATE", "LEFT", "MODEL"}};
  for (const v1::WeightSet& set : health.weight_sets()) {
    if (!set.has_progress()) continue;
    const v1::LoadProgress& progress = set.progress();
    rows.push_back(
        {set.fingerprint().substr(0, 12), FormatBar(progress.done_bytes(), progress.total_bytes(), kBarWidth),
         absl::StrCat(FormatBytes(progress.done_bytes()), " of ", FormatBytes(progress.total_bytes())),
         absl::StrCat(FormatBytes(static_cast<int64_t>(progress.rate_bytes_per_second())), "/s"),
         progress.has_seconds_left() ? FormatSecondsLeft(progress.seconds_left()) : "", Printable(set.spec().model())});
  }
  if (rows.size() > 1) printf("\n%s", FormatTable(rows).c_str());
}

void PrintLook(const v1::HealthResponse& health, const std::optional<v1::HealthResponse>& before) {
  const bool replaced = before.has_value() && before->process_id() != health.process_id();
  printf("%s  broker %lld%s, %s%s, %s\n\n", Now().c_str(), static_cast<long long>(health.process_id()),
         replaced ? " (another one than before)" : "", FormatCount(health.lease_count(), "lease").c_str(),
         Change(health.lease_count(), before.value_or(health).lease_count()).c_str(),
         FormatCount(health.load_count(), "load").c_str());
  PrintHealth(health);
  PrintLoads(health);
}

}  // namespace

ExitCode RunTop(const ServiceFlags& service, const TopFlags& flags) {
  const bool terminal = isatty(STDOUT_FILENO) == 1 && !service.json;
  std::optional<v1::HealthResponse> before;
  ExitCode code = kDone;
  for (int look = 0; flags.count == 0 || look < flags.count; ++look) {
    if (look > 0) std::this_thread::sleep_for(flags.interval);
    const absl::StatusOr<v1::HealthResponse> health = AskHealth(service);
    if (terminal) printf("%s", kHomeAndClear);
    if (!terminal && !service.json && look > 0) printf("\n");
    if (!health.ok()) {
      code = PrintError(health.status(), service.json);
    } else if (service.json) {
      PrintJson(*health);
      code = kDone;
    } else {
      PrintLook(*health, before);
      code = kDone;
    }
    if (health.ok()) before = *health;
    if (fflush(stdout) != 0 || ferror(stdout) != 0) break;  // whoever reads it has gone
  }
  return code;
}

}  // namespace weightbroker::tool
