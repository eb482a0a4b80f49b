// Sees to it that a node holds what the file of --desired says: loads what is missing, one set after the other, pins
// it, has the aliases name it, and starts anew when something is lost. What is to be done next is decided in
// reconcile.h.
//
//   Reconciler reconciler({.registry = registry, .find_fingerprint = ..., .load = ..., .may_prove_to_be = ...});
//   RETURN_IF_ERROR(reconciler.ReadFile());                  // CONFIGURATION_INVALID: file, pointer, found, allowed
//   ...
//   if (!reconciler.IsSatisfied()) ...                       // not ready yet
//
// A thread of its own does the work, since looking at a model's files takes its time. Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/file.h"
#include "common/base/mutex.h"
#include "server/broker/clock.h"
#include "server/broker/reconcile.h"
#include "server/broker/registry.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker {

struct DesiredState;

struct ReconcilerOptions {
  std::shared_ptr<Registry> registry;
  std::string file;                       // of --desired; empty: nothing is wanted, and there is no thread
  FileSystem* files = &RealFileSystem();  // must outlive the reconciler, as what stands below
  const Clock* clock = &RealClock();
  // What is to be said of the file beyond its form, as that its models lie under no root of this service; may be empty.
  std::function<absl::Status(const DesiredState& state)> check = {};
  // The fingerprint that a request has, and its load begun or joined: see wanted_set.h. Both may block. Needed, as the
  // next, where there is a file.
  std::function<absl::StatusOr<std::string>(const v1::RegisterRequest& request)> find_fingerprint = {};
  std::function<absl::StatusOr<WeightSetRef>(const v1::RegisterRequest& request)> load = {};
  // Whether a set that is there may be what a request stands for of which there is no fingerprint. May block, too.
  std::function<bool(const v1::RegisterRequest& request, const WeightSetEntry& set)> may_prove_to_be = {};
  std::chrono::milliseconds look_interval{1'000};  // for what nobody tells of: aliases and pins that somebody changed
  std::chrono::milliseconds min_pause{1'000};      // after a set's first failure; it doubles with each
  std::chrono::milliseconds max_pause{60'000};
  // For so long a set that was found damaged must have been whole, before that counts as a failure no more.
  std::chrono::milliseconds trusted_after{600'000};
  // Each may be empty. Called without a lock held.
  std::function<void()> on_look = {};                                 // after each look, and what was done about it
  std::function<void(const std::string& reason)> on_failure = {};     // of one attempt to get a set
  std::function<void(bool taken)> on_read = {};                       // of the file
  std::function<void(const std::string& what)> on_alias_change = {};  // "set" or "deleted"
};

class Reconciler {
 public:
  explicit Reconciler(ReconcilerOptions options);
  ~Reconciler();  // stops, and waits for what the thread is at
  Reconciler(const Reconciler&) = delete;
  Reconciler& operator=(const Reconciler&) = delete;

  // Reads the file, and takes what it says for what is wanted from now on. CONFIGURATION_INVALID if it is wrong: then
  // what was wanted stays so, and failure() says why. Ok if there is no file.
  absl::Status ReadFile();

  // Has the thread begin; what it would do must not be done before. Where there is no file, what was pinned for one is
  // unpinned, and that is all.
  void Start();
  // Begins nothing more. What the thread is at may go on until the reconciler is destroyed.
  void Stop();

  // Whether everything wanted is there at this moment. False also if the file has not been read without a fault yet.
  bool IsSatisfied() const;

  // How far each set and alias is.
  std::vector<v1::DesiredSet> DescribeSets() const;
  std::vector<v1::DesiredAlias> DescribeAliases() const;
  // Why the file could not be taken when it was last read; ok if it was.
  absl::Status failure() const;

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  // Why something could not be done. Not a Status, whose copies share what they hold: these go from thread to thread.
  struct Trouble {
    explicit Trouble(const absl::Status& why);
    bool operator==(const Trouble& other) const = default;
    void Write(v1::Failure* failure) const;

    std::string reason;
    std::string message;
  };

  struct Set {
    std::string name;
    v1::RegisterRequest request;
    std::string fingerprint;        // empty while it is not known
    bool fingerprint_stale = true;  // it is to be found anew, and goes on counting meanwhile
    WeightSetRef load = nullptr;    // begun here, and not known to have ended
    int failed_attempts = 0;
    std::optional<Trouble> failure = std::nullopt;  // of the last of them
    TimePoint retry_at = {};
    std::set<std::string> may_prove_to_be = {};  // of what stays pinned for that; while its fingerprint is not known
    bool was_misplaced = false;                  // when it was last looked at
    bool was_damaged = false;                    // at one of them
    std::optional<TimePoint> whole_since = std::nullopt;  // as far as was seen since one of them
  };

  // What the thread waits for. The registry may come to it late.
  struct Waker {
    void Wake();

    Mutex mutex;
    CondVar changed;
    bool woken ABSL_GUARDED_BY(mutex) = true;
    bool stopped ABSL_GUARDED_BY(mutex) = false;
  };

  // What is wanted, with what is known of it. Copied by the thread while it works, and put back: of what was read anew
  // meanwhile, into the entries that have stayed the same.
  struct Desired {
    int64_t version = 0;  // of reading
    std::vector<Set> sets;
    std::map<std::string, size_t> aliases;
  };

  // What could not be done at the last look, and is tried again at the next: an alias by its name, a pin by the
  // fingerprint.
  using Troubles = std::map<std::string, Trouble>;

  // The thread's.
  void Run();
  bool WaitForWork();
  void Pass();
  void Settle(Set* set);
  bool MustFindFingerprint(const Set& set) const;
  void FindFingerprint(Set* set);
  void FindWhatItMayProveToBe(const Desired& desired, Set* set) const;
  void NoteFailure(Set* set, const absl::Status& why);
  void NoteMisplaced(Set* set, const absl::Status& why);
  static void Forgive(Set* set);
  void PutBack(const Desired& desired);
  void TellIfChanged();

  // reconcile.h's.
  WantedState Want(const Desired& desired) const;
  ActualState Look(const Desired& desired) const;
  absl::Status CheckHeld(const Set& set) const;  // that what is there with its fingerprint is held as wanted
  std::optional<ActualSet> LookAt(const std::string& fingerprint) const;  // nothing of a set that has ended
  void Perform(const ReconcileAction& action, Desired* desired, Troubles* troubles);
  absl::Status Load(Set* set);
  void ReleaseForReload(const ReconcileAction& action, Desired* desired);
  absl::Status Release(const WeightSetRef& set, const Desired& desired);
  absl::Status PointAlias(const ReconcileAction& action);
  absl::Status ChangePin(const ReconcileAction& action);
  void NoteTroubles(const Troubles& troubles);
  void UnpinAll();

  absl::StatusOr<Desired> Parse() const;
  static void TakeOver(const Desired& before, Desired* now);
  v1::DesiredSet Describe(const Set& set) const;
  void DescribeState(const Set& set, v1::DesiredSet* proto) const;
  Desired Copy() const;
  bool stopped() const;
  bool was_read() const;

  const ReconcilerOptions options_;
  const std::shared_ptr<Waker> waker_ = std::make_shared<Waker>();

  mutable Mutex mutex_;  // never held over a call to the registry
  bool was_read_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  Desired desired_ ABSL_GUARDED_BY(mutex_);
  Troubles troubles_ ABSL_GUARDED_BY(mutex_);

  bool was_satisfied_ = false;  // the thread's own
  std::thread thread_;
  Subscription subscription_;
};

}  // namespace weightbroker
