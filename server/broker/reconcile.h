// What is to be done next so that a node holds what it should: a pure function of what is wanted and what is there. It
// decides, and reconciler.h does it.
//
//   for (const ReconcileAction& action : Reconcile(wanted, actual)) Perform(action);     // then look again
//
// Nobody is disturbed: a set is never released while an engine holds it, and of one that is not wanted any more the pin
// goes and nothing else. Thread-safe: a pure function.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace weightbroker {

struct WantedState {
  struct Set {
    std::string fingerprint;  // empty while it is not known
    bool may_try = true;      // false while it pauses after a failure
    bool misplaced = false;   // what is there with its fingerprint has other ranks, or is on other devices
    std::set<std::string> may_prove_to_be = {};  // of the sets here, while its fingerprint is not known
  };
  std::vector<Set> sets;                  // in the order in which they are to be loaded
  std::map<std::string, size_t> aliases;  // by name, to the index of a set
};

// What of a weight set the decision goes by.
struct ActualSet {
  enum class Phase { kLoading, kResident, kDraining };  // one that failed is as good as not there

  Phase phase = Phase::kResident;
  bool pinned = false;  // for the desired state, this one or an earlier one
  bool quarantined = false;
  int leases = 0;
};

struct ActualState {
  std::map<std::string, ActualSet> sets;       // by fingerprint; those that are wanted or pinned, at least
  std::map<std::string, std::string> aliases;  // by name, to the fingerprint that it names
};

struct ReconcileAction {
  enum class Kind {
    kUnpin,    // `fingerprint`
    kRelease,  // set `set`, which is in quarantine and held by nobody, with its wanted aliases
    kLoad,     // set `set`
    kPin,      // `fingerprint`
    kAlias,    // `alias` is to name `fingerprint`
  };

  Kind kind = Kind::kLoad;
  size_t set = 0;
  std::string fingerprint = {};
  std::string alias = {};

  bool operator==(const ReconcileAction&) const = default;
};

// In the order in which they are to be done; nothing if all is as wanted, or time must pass first. At most one set is
// loaded at a time, the first of those that may: the disk is the same for all of them, and the first is ready soonest.
std::vector<ReconcileAction> Reconcile(const WantedState& wanted, const ActualState& actual);

// Whether everything wanted is there: each set resident and whole, each alias naming it.
bool IsSatisfied(const WantedState& wanted, const ActualState& actual);

}  // namespace weightbroker
