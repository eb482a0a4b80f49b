#include "tests/integration/chaos/churn.h"

#include <algorithm>
#include <utility>

namespace weightbroker::testing {

Churn::Churn(const Service& service, std::vector<std::string> models, std::vector<std::string> kept, uint32_t seed)
    : service_(service), models_(std::move(models)), kept_(std::move(kept)), random_(seed), thread_([this] {
        Run();
      }) {}

void Churn::Stop() {
  stopped_ = true;
  if (thread_.joinable()) thread_.join();
}

void Churn::Run() {
  while (!stopped_) {
    LoadOne();
    ReleasePublished(/*all=*/false);
  }
}

void Churn::LoadOne() {
  const std::string& model = models_[random_() % models_.size()];
  const nlohmann::json set = Call("register", {model, "--torch_version", "any"});
  if (set.is_null()) return;
  ++loaded_;
  Release(set["fingerprint"], /*force=*/true);
}

void Churn::ReleasePublished(bool all) {
  const nlohmann::json sets = List();
  if (!sets.is_array()) return;
  for (const nlohmann::json& set : sets) {
    const std::string fingerprint = set["fingerprint"];
    if (std::find(kept_.begin(), kept_.end(), fingerprint) != kept_.end()) continue;
    if (all || random_() % 4 == 0) Release(fingerprint, /*force=*/false);
  }
}

int Churn::ReleaseAll() {
  ReleasePublished(/*all=*/true);
  const nlohmann::json sets = List();
  return sets.is_array() ? static_cast<int>(sets.size() - kept_.size()) : -1;
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
