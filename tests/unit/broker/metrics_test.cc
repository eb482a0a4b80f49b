#include "server/broker/metrics.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/strings.h"
#include "common/base/unique_fd.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::Not;
using testing::StatusIs;

GaugeValues SomeGauges() {
  GaugeValues values;
  values.weight_sets_by_state = {{"RESIDENT", 2}, {"FAILED", 0}};
  values.resident_bytes = 4096;
  values.leases = 3;
  values.objects.devices["host"] = {.resident_bytes = 4096, .resident_tensors = 2};
  values.objects.weight_sets = {{.fingerprint = "abcd", .bytes = 4096, .tensors = 2, .leases = 3}};
  values.objects.machine_known = true;
  values.objects.gpus = {{.uuid = "GPU-1",
                          .name = "Fake",
                          .compute_capability = "9.0",
                          .driver_version = "580.1",
                          .served = true,
                          .size_bytes = 100,
                          .free_bytes = 60}};
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
    const bool is_row = line.rfind("| `weightbroker_", 0) == 0 || line.rfind("| `process_", 0) == 0;
    if (is_row) rows.push_back(line);
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
  metrics.CountDeviceFault("GPU-1", "xid");
  const std::string text = metrics.Render();
  for (const MetricInfo& info : MetricTable()) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# TYPE ", ToAbsl(info.name), " ", TypeName(info.type), "\n")));
    EXPECT_THAT(text, HasSubstr(absl::StrCat("# HELP ", ToAbsl(info.name), " ", ToAbsl(info.help), "\n")));
  }
}

TEST(Metrics, NameEachObjectOnlyWhileItIsThere) {
  GaugeValues values = SomeGauges();
  Metrics metrics("1.2.3", [&] { return values; });
  const std::string before = metrics.Render();
  EXPECT_THAT(before, HasSubstr("weightbroker_weight_set_leases{fingerprint=\"abcd\"} 3\n"));
  EXPECT_THAT(before, HasSubstr("weightbroker_device_memory_free_bytes{gpu_uuid=\"GPU-1\"} 60\n"));
  EXPECT_THAT(before, HasSubstr("weightbroker_device_resident_bytes{device=\"host\"} 4096\n"));
  values.objects.weight_sets.clear();
  values.objects.gpus.clear();
  const std::string after = metrics.Render();
  EXPECT_THAT(after, Not(HasSubstr("abcd")));
  EXPECT_THAT(after, Not(HasSubstr("GPU-1")));
}

TEST(Metrics, LeaveOutWhatTheMachineDidNotSayInTime) {
  GaugeValues values = SomeGauges();
  values.objects.machine_known = false;
  const std::string text = Metrics("1.2.3", [&] { return values; }).Render();
  EXPECT_THAT(text, HasSubstr("weightbroker_machine_facts_known 0\n"));
  EXPECT_THAT(text, Not(HasSubstr("weightbroker_host_available_bytes")));
  EXPECT_THAT(text, Not(HasSubstr("weightbroker_device_memory_free_bytes")));
  EXPECT_THAT(text, HasSubstr("weightbroker_device_resident_bytes{device=\"host\"} 4096\n"));
}

TEST(Metrics, CountOutcomesFromZeroInSeriesThatAreThereFromTheStart) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.outcomes().CountRegistration(Registration::kHit);
  metrics.outcomes().CountCheck(FingerprintCheck::kMismatch);
  metrics.outcomes().CountExportRefusal("NOT_RESIDENT");
  metrics.outcomes().CountLoadFailure("MADE_UP_BY_A_LOADER");
  metrics.outcomes().CountStarted(static_cast<size_t>(RpcMethod::kHealth));
  metrics.outcomes().NoteExport(1700000000);
  const std::string text = metrics.Render();
  for (const char* line : {"weightbroker_registrations_total{result=\"hit\"} 1\n",
                           "weightbroker_registrations_total{result=\"joined\"} 0\n",
                           "weightbroker_fingerprint_checks_total{result=\"mismatch\"} 1\n",
                           "weightbroker_fingerprint_checks_total{result=\"match\"} 0\n",
                           "weightbroker_export_refusals_total{reason=\"NOT_RESIDENT\"} 1\n",
                           "weightbroker_export_refusals_total{reason=\"LEASED\"} 0\n",
                           "weightbroker_load_failures_total{reason=\"OTHER\"} 1\n",
                           "weightbroker_load_failures_total{reason=\"LOADER_FAILED\"} 0\n",
                           "weightbroker_rpcs_started_total{method=\"Health\"} 1\n",
                           "weightbroker_rpcs_started_total{method=\"Export\"} 0\n",
                           "weightbroker_rpcs_total{code=\"OK\",method=\"Export\"} 0\n",
                           "weightbroker_refusals_total{reason=\"LEASED\"} 0\n",
                           "weightbroker_fingerprint_mismatches_total{field=\"spec.dtype\"} 0\n",
                           "weightbroker_last_export_timestamp_seconds 1700000000\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(Metrics, SayWhatALoadsTimeWentInto) {
  Metrics metrics("1.2.3", SomeGauges);
  metrics.outcomes().ObserveLoad(1000);
  metrics.outcomes().ObserveLoadPhases({.plan_seconds = 0.25, .read_seconds = 4, .digest_seconds = -1});
  const std::string text = metrics.Render();
  EXPECT_THAT(text, HasSubstr("weightbroker_load_read_bytes_total 1000\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_load_phase_seconds_sum{phase=\"plan\"} 0.25\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_load_phase_seconds_sum{phase=\"read\"} 4\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_load_phase_seconds_sum{phase=\"digest\"} 0\n"));
}

TEST(Metrics, SayWhenTheirProcessStarted) {
  const std::string text = Metrics("1.2.3", SomeGauges).Render();
  const std::string name = "\nprocess_start_time_seconds ";
  const size_t at = text.find(name);
  ASSERT_NE(at, std::string::npos);
  const double started = std::stod(text.substr(at + name.size()));
  EXPECT_GT(started, 1.5e9);
  EXPECT_LE(started, static_cast<double>(time(nullptr)) + 2);
}

TEST(Metrics, AreNotServedAnyMoreOnceTheyHaveBeenStopped) {
  Metrics metrics("1.2.3", SomeGauges);
  const auto port = metrics.Serve(0);
  ASSERT_THAT(port, IsOk());
  metrics.StopServing();
  metrics.StopServing();
  EXPECT_THAT(Metrics("1.2.3", SomeGauges).Serve(*port), IsOk());
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

TEST(Metrics, HaveASeriesForEveryReasonAndForWhatIsNoneFromTheStart) {
  const std::string text = Metrics("1.2.3", SomeGauges).Render();
  for (const char* const family : {"refusals", "desired_failures", "load_failures", "export_refusals"}) {
    for (const char* const reason : {"INVALID_ARGUMENT", "SYSTEM_ERROR", "OTHER"}) {
      EXPECT_THAT(text, HasSubstr(absl::StrCat("weightbroker_", family, "_total{reason=\"", reason, "\"} 0\n")));
    }
  }
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
  EXPECT_THAT(second.Serve(*port),
              StatusIs(Reason::kSystemError,
                       AllOf(HasSubstr("another program has the port, maybe another service"),
                             HasSubstr("--metrics_address=127.0.0.1:PORT"), Not(HasSubstr("CivetServer")))));
  EXPECT_THAT(second.Serve(*port), HasMetadata("flag", "metrics_address"));
  EXPECT_THAT(second.Serve(*port), HasMetadata("errno", "EADDRINUSE"));
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
