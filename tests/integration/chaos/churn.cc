#include "tests/integration/chaos/churn.h"

#include <algorithm>
#include <utility>

namespace weightbroker::testing {

Churn::Churn(const Service& service, ChurnPlan plan)
    : service_(service), plan_(std::move(plan)), random_(plan_.seed), thread_([this] { Run(); }) {}

void Churn::Stop() {
  stopped_ = true;
  if (thread_.joinable()) thread_.join();
}

void Churn::Run() {
  while (!stopped_) {
    LoadExported();
    LoadOne();
    ReleasePublished(/*all=*/false);
  }
}

void Churn::LoadOne() {
  const std::string& model = plan_.models[random_() % plan_.models.size()];
  const char* const on_gpu = random_() % 2 == 0 ? "CUDA_IPC" : "CUDA_VMM_FD";
  const nlohmann::json set = Load(model, plan_.gpu_uuid.empty() ? "HOST_MEMFD" : on_gpu);
  if (set.is_null()) return;
  ++loaded_;
  Release(set["fingerprint"], /*force=*/true);
}

// One that is there is left as it is.
void Churn::LoadExported() {
  if (!plan_.exported_model.empty()) Load(plan_.exported_model, "CUDA_IPC");
}

nlohmann::json Churn::Load(const std::string& model, const std::string& handle_kind) {
  std::vector<std::string> flags = {model, "--torch_version", "any", "--handle_kinds", handle_kind};
  if (!plan_.gpu_uuid.empty()) flags.insert(flags.end(), {"--devices", plan_.gpu_uuid});
  return Call("register", flags);
}

void Churn::ReleasePublished(bool all) {
  const nlohmann::json sets = List();
  if (!sets.is_array()) return;
  for (const nlohmann::json& set : sets) {
    const std::string fingerprint = set["fingerprint"];
    if (std::find(plan_.kept.begin(), plan_.kept.end(), fingerprint) != plan_.kept.end()) continue;
    // Of one whose exporter has gone nobody has any use, though engines go on with what they have mapped.
    const bool is_dead = !set["shards"].empty() && !set["shards"][0].value("export_refusal", "").empty();
    const bool is_used = set["spec"]["model"] == plan_.exported_folder && !is_dead;
    if (all || is_dead || (!is_used && random_() % 4 == 0)) Release(fingerprint, /*force=*/is_dead);
  }
}

int Churn::ReleaseAll() {
  ReleasePublished(/*all=*/true);
  const nlohmann::json sets = List();
  return sets.is_array() ? static_cast<int>(sets.size() - plan_.kept.size()) : -1;
}

bool Churn::Release(const std::string& fingerprint, bool force) {
  std::vector<std::string> flags = {fingerprint};
  if (force) flags.push_back("--force");
  if (Call("unregister", flags).is_null()) return false;
  ++released_;
  return true;
}

nlohmann::json Churn::List() {
  const nlohmann::json answer = Call("list", {});
  return answer.is_object() ? answer.value("weight_sets", nlohmann::json::array()) : answer;
}

nlohmann::json Churn::Call(const std::string& command, const std::vector<std::string>& flags) {
  std::vector<std::string> arguments = service_.ToolFlags(command, flags);
  arguments.push_back("--json");
  const Finished tool = RunProgram("weightbroker", arguments);
  if (!tool.json.is_null() && tool.exit.success()) return tool.json;
  const std::string reason = tool.json.is_object() ? tool.json.value("reason", "") : "";
  if (reason.empty()) {
    complaints_.push_back("the tool's " + command + " ended with " + tool.exit.ToString() +
                          " and no reason: " + tool.output + tool.errors);
  }
  ++refusals_[command + " " + reason];
  return nullptr;
}

}  // namespace weightbroker::testing
