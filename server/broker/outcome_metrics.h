// How registrations, fingerprint checks, exports and loads end, in more detail than their totals say.
//
//   metrics.outcomes().CountRegistration(Registration::kHit);
//   metrics.outcomes().CountLoadFailure("LOADER_FAILED");      // what is no reason of ours is counted as OTHER
//
// Every series is there from the start, at 0: one that first shows up at 1 hides that event from rate(). Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
template <typename T>
class Family;
}  // namespace prometheus

namespace weightbroker {

// What a call of Register found: the set resident, or being loaded or published for somebody else, or neither, so that
// it was begun for this call; or it was refused.
enum class Registration { kHit, kJoined, kStarted, kRefused };

// Whether what an Export wants is what is resident: the same, another, nothing of the model, files that are gone, or
// files that cannot be looked at.
enum class FingerprintCheck { kMatch, kMismatch, kAbsent, kUnverified, kFailed };

// How an attach ended, as the client says.
enum class AttachOutcome { kAttached, kDisk, kFailed };

// What a load's time went into.
struct LoadPhases {
  double plan_seconds = 0;      // headers, checks, the plan
  double allocate_seconds = 0;  // until the slabs are there
  double read_seconds = 0;      // reading, copying, transforming
  double digest_seconds = 0;    // what of the digests was not taken meanwhile
};

class OutcomeMetrics {
 public:
  // `methods` are the names of all calls.
  OutcomeMetrics(prometheus::Registry& registry, const std::string_view* methods, size_t method_count);

  void CountRegistration(Registration result);
  void CountCheck(FingerprintCheck result);
  void CountExportRefusal(const std::string& reason);
  void NoteExport(double unix_seconds);  // one that was granted
  void CountLoadFailure(const std::string& reason);
  void ObserveLoad(int64_t read_bytes);
  void ObserveLoadPhases(const LoadPhases& phases);
  void CountStarted(size_t method);
  void CountAttach(AttachOutcome outcome, const std::string& reason);  // the reason of all but kAttached
  void ObserveAttach(double seconds);

 private:
  static constexpr size_t kMaxMethods = 64;

  std::array<prometheus::Counter*, 4> registrations_ = {};
  std::array<prometheus::Counter*, 5> checks_ = {};
  std::array<prometheus::Histogram*, 4> phases_ = {};
  std::array<prometheus::Counter*, kMaxMethods> started_ = {};
  prometheus::Family<prometheus::Counter>& export_refusals_;
  prometheus::Family<prometheus::Counter>& load_failures_;
  std::array<prometheus::Counter*, 3> attaches_ = {};
  prometheus::Family<prometheus::Counter>& client_fallbacks_;
  prometheus::Histogram& attach_seconds_;
  prometheus::Counter& load_read_bytes_;
  prometheus::Gauge& last_export_;
};

}  // namespace weightbroker
