#include "server/broker/metrics.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/strings.h"
#include "common/base/unique_fd.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::Not;
using testing::StatusIs;

GaugeValues SomeGauges() {
  GaugeValues values;
  values.weight_sets_by_state = {{"RESIDENT", 2}, {"FAILED", 0}};
  values.resident_bytes = 4096;
  values.leases = 3;
  return values;
}

const char* TypeName(MetricType type) {
  constexpr const char* kNames[] = {"counter", "gauge", "histogram"};
  return kNames[static_cast<size_t>(type)];
}

// "a, b" with each label in backticks, as the page writes them.
std::string LabelCell(std::string_view labels) {
  std::string cell;
  std::istringstream stream{std::string(labels)};
  for (std::string label; std::getline(stream, label, ',');) {
    absl::StrAppend(&cell, cell.empty() ? "" : ", ", "`", label, "`");
  }
  return cell;
}

std::vector<std::string> DocumentedRows() {
  std::ifstream file(WEIGHTBROKER_DOCS "/metrics.md");
  std::vector<std::string> rows;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("| `weightbroker_", 0) == 0) rows.push_back(line);
  }
  return rows;
}

// Runs `promtool check metrics` on `text`; gives its exit code and what it said.
std::pair<int, std::string> CheckWithPromtool(const std::string& text) {
  const std::string path = ::testing::TempDir() + "/metrics.txt";
  std::ofstream(path) << text;
  FILE* const pipe = popen(absl::StrCat("promtool check metrics < ", path, " 2>&1").c_str(), "r");
  std::string output;
  char buffer[512];
  while (fgets(buffer, sizeof(buffer), pipe) != nullptr) output += buffer;
  return {pclose(pipe), output};
}

TEST(Metrics, RendersEveryRowOfTheTable) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.CountRefusal("LEASED");
  metrics.CountFingerprintMismatch("spec.dtype");
  metrics.CountRpc(RpcMethod::kHealth, absl::StatusCode::kOk);
  const std::string text = metrics.Render();
  for (const MetricInfo& info : MetricTable()) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# TYPE ", ToAbsl(info.name), " ", TypeName(info.type), "\n")));
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# HELP ", ToAbsl(info.name), " ", ToAbsl(info.help), "\n")));
  }
}

TEST(Metrics, AreReadAtTheMomentOfTheScrape) {
  int leases = 1;
  Metrics metrics("1.2.3", [&] {
    GaugeValues values;
    values.leases = leases;
    return values;
  });
  EXPECT_THAT(metrics.Render(), HasSubstr("weightbroker_leases 1\n"));
  leases = 5;
  EXPECT_THAT(metrics.Render(), HasSubstr("weightbroker_leases 5\n"));
}

TEST(Metrics, TellOfEngineGroupsByRoleAndCause) {
  Metrics metrics("1.2.3", [] {
    GaugeValues values;
    values.groups = 2;
    values.group_members_by_role = {{"active", 1}, {"standby", 3}};
    values.group_takeovers_by_cause = {{"died", 4}, {"hung", 0}};
    return values;
  });
  const std::string text = metrics.Render();
  EXPECT_THAT(text, HasSubstr("weightbroker_groups 2\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_group_members{role=\"standby\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_group_takeovers_total{cause=\"died\"} 4\n"));
}

TEST(Metrics, CountCallsByMethodAndCode) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.CountRpc(RpcMethod::kExport, absl::StatusCode::kOk);
  metrics.CountRpc(RpcMethod::kExport, absl::StatusCode::kOk);
  metrics.CountRpc(RpcMethod::kExport, absl::StatusCode::kNotFound);
  const std::string text = metrics.Render();
  EXPECT_THAT(text, HasSubstr("weightbroker_rpcs_total{code=\"OK\",method=\"Export\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_rpcs_total{code=\"NOT_FOUND\",method=\"Export\"} 1\n"));
}

TEST(Metrics, StartLoadResultsAtZeroSoThatTheFirstEventIsSeen) {
  EXPECT_THAT(Metrics("1.2.3", SomeGauges).Render(), HasSubstr("weightbroker_loads_total{result=\"failed\"} 0\n"));
}

TEST(Metrics, ObserveTheDurationOfLoadsThatBecameResidentOnly) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.CountLoad(LoadResult::kResident, 2.0);
  metrics.CountLoad(LoadResult::kFailed, 9.0);
  metrics.CountLoad(LoadResult::kStalled, 9.0);
  EXPECT_THAT(metrics.Render(), HasSubstr("weightbroker_load_seconds_count 1\n"));
}

TEST(Metrics, CountLoadsThatWereSlowerThanTheyCouldBe) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.CountDegradedLoad("not_pinned");
  const std::string text = metrics.Render();
  EXPECT_THAT(text, HasSubstr("weightbroker_degraded_loads_total{reason=\"not_pinned\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_degraded_loads_total{reason=\"no_io_uring\"} 0\n"));
}

TEST(Metrics, FoldWhatIsNotInTheTablesSoThatLabelsStayBounded) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.CountRefusal("MADE_UP_BY_A_LOADER");
  metrics.CountConnectionRefused("made up");
  const std::string text = metrics.Render();
  EXPECT_THAT(text, HasSubstr("weightbroker_refusals_total{reason=\"OTHER\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_connections_refused_total{reason=\"other\"} 1\n"));
  EXPECT_THAT(text, Not(HasSubstr("MADE_UP")));
}

TEST(MismatchFieldLabel, LeavesOutTheNamesOfFiles) {
  EXPECT_EQ(MismatchFieldLabel("checkpoint.files.model-00001-of-00002.safetensors.header_sha256"),
            "checkpoint.files.header_sha256");
  EXPECT_EQ(MismatchFieldLabel("spec.dtype"), "spec.dtype");
  EXPECT_EQ(MismatchFieldLabel("anything else"), "other");
}

TEST(Metrics, SatisfyPromtool) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.CountLoad(LoadResult::kResident, 2.0);
  metrics.CountExport(ExportResult::kGranted);
  metrics.CountRefusal("LEASED");
  metrics.CountFingerprintMismatch("spec.dtype");
  metrics.CountRpc(RpcMethod::kHealth, absl::StatusCode::kOk);
  const auto [code, output] = CheckWithPromtool(metrics.Render());
  EXPECT_EQ(code, 0) << output;
  EXPECT_EQ(output, "");
}

TEST(Metrics, StopBeingServedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 5; ++i) {
    Metrics metrics("1.2.3", [] { return GaugeValues(); });
    ASSERT_THAT(metrics.Serve(0), IsOk());
  }
  // The listener by itself would take up to two seconds each time.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

TEST(Metrics, CountWhatBecameOfWhatAnotherBrokerLeft) {
  Metrics metrics("1.2.3", [] { return GaugeValues(); });
  metrics.CountAdoptions(AdoptionResult::kAdopted, 2);
  metrics.CountAdoptions(AdoptionResult::kDropped, 3);
  EXPECT_THAT(metrics.Render(), HasSubstr("weightbroker_adoptions_total{result=\"adopted\"} 2"));
  EXPECT_THAT(metrics.Render(), HasSubstr("weightbroker_adoptions_total{result=\"restarted\"} 0"));
  EXPECT_THAT(metrics.Render(), HasSubstr("weightbroker_adoptions_total{result=\"dropped\"} 3"));
}

TEST(Metrics, CountLogLinesThatNobodyReads) {
  signal(SIGPIPE, SIG_IGN);
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  close(fds[0]);
  const UniqueFd before(dup(STDERR_FILENO));
  dup2(fds[1], STDERR_FILENO);
  close(fds[1]);
  Log(LogLevel::kError, "test.line");
  dup2(before.get(), STDERR_FILENO);
  const std::string text = Metrics("1.2.3", SomeGauges).Render();
  EXPECT_THAT(text, HasSubstr("# TYPE weightbroker_log_lines_dropped_total counter\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_log_lines_dropped_total 1\n"));
}

TEST(Metrics, SayWhichAddressCannotBeServed) {
  Metrics first("1.2.3", SomeGauges);
  const auto port = first.Serve(0);
  ASSERT_THAT(port, IsOk());
  Metrics second("1.2.3", SomeGauges);
  EXPECT_THAT(second.Serve(*port), StatusIs(Reason::kSystemError, HasSubstr(absl::StrCat("127.0.0.1:", *port))));
}

TEST(MetricsPage, HasExactlyTheRowsOfTheTable) {
  std::vector<std::string> expected;
  for (const MetricInfo& info : MetricTable()) {
    expected.push_back(absl::StrCat("| `", ToAbsl(info.name), "` | ", TypeName(info.type), " | ",
                                    LabelCell(info.labels), " | ", ToAbsl(info.help), " |"));
  }
  EXPECT_THAT(DocumentedRows(), ::testing::UnorderedElementsAreArray(expected));
}

}  // namespace
}  // namespace weightbroker
