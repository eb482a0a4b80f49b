// The reconciler with a registry and without loaders, for its tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/error.h"
#include "common/base/mutex.h"
#include "server/broker/reconciler.h"
#include "tests/support/resident_set.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {

// How often `part` stands in `text`.
inline int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// A registry without loaders: a load is over as soon as it has begun, or when the test says so.
class ReconcilerTest : public ::testing::Test {
 protected:
  ReconcilerTest() : file_(folder_ / "sets.json") {}

  // Sets by name, each of a model of its own name.
  void Write(const std::vector<std::string>& names, const std::map<std::string, std::string>& aliases = {}) const {
    nlohmann::json sets = nlohmann::json::array();
    for (const std::string& name : names) {
      sets.push_back({{"name", name}, {"model", "models:" + name}, {"torch_version", torch_version_}});
    }
    WriteFile(file_, nlohmann::json({{"version", 1}, {"sets", sets}, {"aliases", aliases}}).dump());
  }

  void Make() {
    reconciler_ = std::make_unique<Reconciler>(ReconcilerOptions{
        .registry = registry_,
        .file = file_,
        .find_fingerprint = [this](const v1::RegisterRequest& request) { return FindFingerprint(request); },
        .load = [this](const v1::RegisterRequest& request) { return Load(request); },
        .may_prove_to_be = [](const v1::RegisterRequest& request,
                              const WeightSetEntry& set) { return request.spec().model() == set.spec().model(); },
        .look_interval = std::chrono::milliseconds(5),
        .min_pause = min_pause_,
        .max_pause = 4 * min_pause_,
        .trusted_after = trusted_after_,
        .on_look =
            [this] {
              MutexLock lock(mutex_);
              ++looks_;
            },
        .on_failure =
            [this](const std::string& reason) {
              if (on_failure_) on_failure_(reason);
              MutexLock lock(mutex_);
              ++failures_[reason];
            },
        .on_read =
            [this](bool taken) {
              MutexLock lock(mutex_);
              ++reads_[taken];
            }});
  }

  void Start() {
    Make();
    ASSERT_THAT(reconciler_->ReadFile(), IsOk());
    reconciler_->Start();
  }

  bool Eventually(const std::function<bool()>& condition) const {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  bool IsReached() const {
    return Eventually([this] { return reconciler_->IsSatisfied(); });
  }

  // A model's name is its fingerprint's beginning, unless the test says otherwise.
  absl::StatusOr<std::string> FindFingerprint(const v1::RegisterRequest& request) {
    MutexLock lock(mutex_);
    const std::string name = request.spec().model().substr(7);
    if (broken_models_.count(name) > 0) return MakeError(Reason::kModelNotFound, "there is no " + name);
    return Hash(renamed_.count(name) > 0 ? renamed_.at(name) : name);
  }

  absl::StatusOr<WeightSetRef> Load(const v1::RegisterRequest& request) {
    auto fingerprint = FindFingerprint(request);
    if (!fingerprint.ok()) return fingerprint.status();
    NewWeightSet wanted;
    wanted.spec = request.spec();
    wanted.environment = request.environment();
    wanted.fingerprint.hash = *fingerprint;
    wanted.pins.by_desired_state = true;
    auto begun = registry_->Begin(std::move(wanted));
    if (!begun.ok()) return begun.status();
    MutexLock lock(mutex_);
    loads_.push_back(request.spec().model().substr(7));
    if (!loads_wait_) FinishLoad(*registry_, begun->set, 4096);
    return begun->set;
  }

  // As an earlier broker or a caller has left it.
  void BeginAs(const std::string& name, Pins pins) const {
    NewWeightSet there;
    there.spec.set_model("models:" + name);
    there.fingerprint.hash = Hash(name);
    there.pins = pins;
    FinishLoad(*registry_, registry_->Begin(std::move(there)).value().set, 4096);
  }

  // As somebody has registered it who wants the second of its two ranks only.
  void BeginWithoutRankZero(const std::string& name, Pins pins = {}) const {
    NewWeightSet partial;
    partial.spec.set_model("models:" + name);
    partial.fingerprint.hash = Hash(name);
    partial.placement = {.ranks = {{1}}, .world_size = 2};
    partial.pins = pins;
    FinishLoad(*registry_, registry_->Begin(std::move(partial)).value().set, 4096);
  }

  WeightSetRef Find(const std::string& name) const { return registry_->Find(Hash(name)); }
  int looks() {
    MutexLock lock(mutex_);
    return looks_;
  }
  std::vector<std::string> loads() {
    MutexLock lock(mutex_);
    return loads_;
  }
  std::string AliasNames(const std::string& alias) const {
    const auto set = registry_->FindByAlias(alias);
    return set.ok() ? (*set)->fingerprint().hash : "";
  }
  v1::DesiredSet::State StateOf(size_t index) const { return reconciler_->DescribeSets()[index].state(); }

  const TemporaryFolder folder_;
  const std::string file_;
  const std::shared_ptr<Registry> registry_ = Registry::Create({.max_aliases = 2});
  std::string torch_version_ = "any";
  std::chrono::milliseconds min_pause_{1};
  std::chrono::milliseconds trusted_after_{0};
  std::function<void(const std::string& reason)> on_failure_;  // called by the reconciler's thread; set before Start

  Mutex mutex_;
  std::set<std::string> broken_models_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> renamed_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> loads_ ABSL_GUARDED_BY(mutex_);
  bool loads_wait_ ABSL_GUARDED_BY(mutex_) = false;
  int looks_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int> failures_ ABSL_GUARDED_BY(mutex_);
  std::map<bool, int> reads_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Reconciler> reconciler_;  // first to go
};

}  // namespace weightbroker::testing
