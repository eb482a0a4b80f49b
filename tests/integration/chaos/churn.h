// An operator beside the chaos: has a model loaded and released again and again, and releases what engines have
// published when nobody holds it, through the command-line tool. What the tool is refused while loaders and brokers are
// being killed is counted by its reason; every call must end and say one. On a GPU it loads by both kinds of handles,
// and one model again and again whose exporter is being killed.
//
//   Churn churn(service, {.models = {"models:churn-0", "models:churn-1"}, .kept = {fingerprint}});
//   ... chaos ...
//   churn.Stop();
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/integration/service.h"

namespace weightbroker::testing {

struct ChurnPlan {
  std::vector<std::string> models;
  std::vector<std::string> kept;  // fingerprints that are not to be touched
  std::string gpu_uuid;           // where models are loaded; empty: to host memory
  std::string exported_model;     // on the GPU by CUDA IPC, loaded whenever it is not resident; empty: none
  std::string exported_folder;    // where it is, which is how the service names it
  uint32_t seed = 1;
};

class Churn {
 public:
  // Begins.
  Churn(const Service& service, ChurnPlan plan);
  ~Churn() { Stop(); }

  // Returns once the last call has ended.
  void Stop();

  // Has every set but those kept released. How many were refused.
  int ReleaseAll();

  // After Stop.
  int64_t loaded() const { return loaded_; }
  int64_t released() const { return released_; }
  const std::map<std::string, int64_t>& refusals() const { return refusals_; }  // by reason
  const std::vector<std::string>& complaints() const { return complaints_; }

 private:
  void Run();
  void LoadOne();
  void LoadExported();
  nlohmann::json Load(const std::string& model, const std::string& handle_kind);
  void ReleasePublished(bool all);
  bool Release(const std::string& fingerprint, bool force);
  nlohmann::json List();
  // The tool's answer; null where it was refused.
  nlohmann::json Call(const std::string& command, const std::vector<std::string>& flags);

  const Service& service_;
  const ChurnPlan plan_;
  std::mt19937 random_;
  std::atomic<bool> stopped_ = false;
  int64_t loaded_ = 0;
  int64_t released_ = 0;
  std::map<std::string, int64_t> refusals_;
  std::vector<std::string> complaints_;
  std::thread thread_;
};

}  // namespace weightbroker::testing
