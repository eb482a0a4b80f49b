#include "client/tool/mkcheckpoint_command.h"

#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/tool/format.h"
#include "client/tool/progress.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/synthetic/checkpoint_draft.h"
#include "common/synthetic/faults.h"

namespace weightbroker::tool {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<const CheckpointFault*> FaultNamed(const std::string& name) {
  if (name.empty()) return nullptr;
  if (const CheckpointFault* const fault = FindFault(name)) return fault;
  return MakeError(
      Reason::kInvalidArgument,
      absl::StrCat("there is no fault ", Quote(name), "; mkcheckpoint --list_faults shows those there are"),
      {{"field", "fault"}, {"fault", Printable(name)}});
}

absl::Status Write(const CheckpointDraft& draft, const MakeCheckpointFlags& flags) {
  ProgressPrinter progress;
  WriteOptions options{.seed = flags.seed, .sparse = flags.sparse};
  options.on_progress = [&, total = draft.total_bytes()](int64_t done_bytes) {
    progress.Show({"WRITING", done_bytes, total, 0});
  };
  return WriteCheckpoint(draft, flags.folder, options);
}

// What was written, and what is wrong with it.
Json Describe(const CheckpointDraft& draft, const CheckpointFault* fault, const MakeCheckpointFlags& flags) {
  Json json = {{"ok", true},
               {"folder", flags.folder},
               {"architecture", draft.config["architectures"][0]},
               {"quantization", flags.model.fp8 ? "fp8" : "none"},
               {"files", draft.shards.size()},
               {"tensors", draft.tensor_count()},
               {"bytes", draft.total_bytes()},
               {"sparse", flags.sparse},
               {"seed", flags.seed},
               {"fault", nullptr}};
  if (fault != nullptr) {
    json["fault"] = {{"name", fault->name}, {"reason", std::string(ReasonName(fault->reason))}, {"what", fault->what}};
  }
  return json;
}

void PrintSummary(const Json& summary) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [key, value] : summary.items()) {
    if (key == "ok" || key == "fault") continue;
    rows.push_back({key, value.is_string() ? Printable(value.get<std::string>()) : value.dump()});
  }
  if (const Json& fault = summary["fault"]; fault.is_object()) {
    rows.push_back({"fault", absl::StrCat(fault["name"].get<std::string>(), ": ", fault["what"].get<std::string>(),
                                          " (", fault["reason"].get<std::string>(), ")")});
  }
  printf("%s", FormatTable(rows).c_str());
}

absl::StatusOr<Json> MakeCheckpoint(MakeCheckpointFlags flags) {
  ASSIGN_OR_RETURN(const CheckpointFault* const fault, FaultNamed(flags.fault));
  if (fault != nullptr) flags.model = fault->Prepare(flags.model);
  ASSIGN_OR_RETURN(CheckpointDraft draft, DraftModel(flags.model));
  const Json summary = Describe(draft, fault, flags);
  if (fault != nullptr) fault->plant(draft);
  RETURN_IF_ERROR(Write(draft, flags));
  return summary;
}

void PrintRows(const std::vector<std::vector<std::string>>& rows, const std::vector<const char*>& keys, bool json) {
  if (!json) {
    printf("%s", FormatTable(rows).c_str());
    return;
  }
  Json list = Json::array();
  for (size_t row = 1; row < rows.size(); ++row) {
    Json entry;
    for (size_t i = 0; i < keys.size(); ++i) entry[keys[i]] = rows[row][i];
    list.push_back(std::move(entry));
  }
  printf("%s\n", list.dump().c_str());
}

}  // namespace

ExitCode RunMakeCheckpoint(const MakeCheckpointFlags& flags) {
  // Whoever reads the progress may leave: half a checkpoint is of use to nobody.
  std::signal(SIGPIPE, SIG_IGN);
  const absl::StatusOr<Json> summary = MakeCheckpoint(flags);
  if (!summary.ok()) return PrintError(summary.status(), flags.json);
  if (flags.json) {
    printf("%s\n", summary->dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  } else {
    PrintSummary(*summary);
  }
  return kDone;
}

ExitCode RunListFaults(bool json) {
  std::vector<std::vector<std::string>> rows = {{"FAULT", "REFUSED WITH", "WHAT"}};
  for (const CheckpointFault& fault : CheckpointFaults()) {
    rows.push_back({fault.name, std::string(ReasonName(fault.reason)), fault.what});
  }
  PrintRows(rows, {"name", "reason", "what"}, json);
  return kDone;
}

ExitCode RunListModels(bool json) {
  std::vector<std::vector<std::string>> rows = {{"MODEL", "ARCHITECTURE", "PUBLISHED NUMBERS OF"}};
  for (const ModelName& model : ListModels()) rows.push_back({model.label, model.architecture, model.published});
  PrintRows(rows, {"name", "architecture", "published"}, json);
  return kDone;
}

}  // namespace weightbroker::tool
