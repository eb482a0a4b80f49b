#include "bench/load/task.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/bench_process.h"
#include "bench/load/ceilings.h"
#include "bench/load/gpu_verify.h"
#include "bench/load/pinned_copy.h"
#include "bench/load/plain_read.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"

namespace weightbroker::bench {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr size_t kErrorTailBytes = 2000;

Task FromJson(const std::string& text) {
  const OrderedJson json = OrderedJson::parse(text);
  return {.kind = json["kind"],
          .files = json["files"].get<std::vector<std::string>>(),
          .folder = json["folder"],
          .digests = json["digests"],
          .bytes = json["bytes"],
          .threads = json["threads"],
          .depth = json["depth"],
          .chunk_bytes = json["chunk_bytes"],
          .direct = json["direct"],
          .huge_pages = json["huge_pages"],
          .devices = json["devices"].get<std::vector<std::string>>(),
          .started_at = json["started_at"],
          .slab_bytes = json["slab_bytes"].get<std::vector<int64_t>>()};
}

std::string ReadAll(const UniqueFd& fd) {
  std::string text(static_cast<size_t>(lseek(fd.get(), 0, SEEK_END)), '\0');
  const ssize_t got = pread(fd.get(), text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text;
}

std::string LastLine(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  if (end == std::string::npos) return "";
  const size_t newline = text.rfind('\n', end);
  return text.substr(newline == std::string::npos ? 0 : newline + 1, end - newline);
}

}  // namespace

OrderedJson ToJson(const Task& task) {
  return {{"kind", task.kind},
          {"files", task.files},
          {"folder", task.folder},
          {"digests", task.digests},
          {"bytes", task.bytes},
          {"threads", task.threads},
          {"depth", task.depth},
          {"chunk_bytes", task.chunk_bytes},
          {"direct", task.direct},
          {"huge_pages", task.huge_pages},
          {"devices", task.devices},
          {"started_at", task.started_at},
          {"slab_bytes", task.slab_bytes}};
}

OrderedJson DescribeMethod(const Task& task) {
  OrderedJson json = {{"kind", task.kind}, {"threads", task.threads}, {"chunk_bytes", task.chunk_bytes}};
  if (task.kind == "read_uring") json["depth"] = task.depth;
  if (!task.files.empty()) json["direct"] = task.direct;
  if (!task.devices.empty()) json["devices"] = task.devices;
  json["huge_pages"] = task.huge_pages;
  return json;
}

absl::StatusOr<OrderedJson> RunTask(const std::string& json) {
  using Function = absl::StatusOr<OrderedJson> (*)(const Task&);
  static constexpr std::pair<const char*, Function> kFunctions[] = {
      {"read_pread", ReadWithPread}, {"read_uring", ReadWithUring},  {"copy", CopyFromMapping},
      {"fill", FillMapping},         {"write", WriteMemfds},         {"plain_read", PlainRead},
      {"pinned_copy", CopyToGpus},   {"verify_gpu", VerifyGpuMemory}};
  const Task task = FromJson(json);
  for (const auto& [kind, function] : kFunctions) {
    if (kind == task.kind) return function(task);
  }
  return MakeError(Reason::kInvalidArgument, absl::StrCat("there is no task \"", task.kind, "\""));
}

absl::StatusOr<OrderedJson> RunTaskInFreshProcess(const Task& task, std::vector<FdMapping> fds) {
  return RunForJson({.path = OwnPath(), .arguments = {"--task", ToJson(task).dump()}, .fds = std::move(fds)});
}

absl::StatusOr<OrderedJson> RunForJson(SpawnOptions program) {
  const UniqueFd errors(memfd_create("errors", MFD_CLOEXEC));
  if (!errors.valid()) return SystemError("memfd_create", errno);
  program.fds.push_back({errors.get(), STDERR_FILENO});
  const absl::StatusOr<std::string> output = RunAndRead(program);
  if (!output.ok()) {
    const std::string said = ReadAll(errors);
    const size_t begin = said.size() > kErrorTailBytes ? said.size() - kErrorTailBytes : 0;
    return absl::InternalError(absl::StrCat(output.status().message(), ": ", said.substr(begin)));
  }
  OrderedJson json = OrderedJson::parse(LastLine(*output), nullptr, /*allow_exceptions=*/false);
  if (json.is_object()) return json;
  return absl::InternalError(absl::StrCat(program.path, " printed no JSON: ", LastLine(*output)));
}

}  // namespace weightbroker::bench
