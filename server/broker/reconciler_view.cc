// How far what is wanted is, for whoever asks.

#include <algorithm>

#include "common/base/error.h"
#include "server/broker/reconciler.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
Reconciler::Trouble::Trouble(const absl::Status& why)
    : reason(GetErrorDetails(why).reason), message(std::string(why.message())) {}

void Reconciler::Trouble::Write(v1::Failure* failure) const {
  failure->set_reason(reason);
  failure->set_message(message);
}

Reconciler::Desired Reconciler::Copy() const {
  MutexLock lock(mutex_);
  return desired_;
}

absl::Status Reconciler::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

bool Reconciler::was_read() const {
  MutexLock lock(mutex_);
  return was_read_;
}

bool Reconciler::IsSatisfied() const {
  if (options_.file.empty()) return true;
  if (!was_read()) return false;
  const Desired desired = Copy();
  return weightbroker::IsSatisfied(Want(desired), Look(desired));
}

std::vector<v1::DesiredSet> Reconciler::DescribeSets() const {
  std::vector<v1::DesiredSet> described;
  for (const Set& set : Copy().sets) described.push_back(Describe(set));
  return described;
}

v1::DesiredSet Reconciler::Describe(const Set& set) const {
  v1::DesiredSet proto;
  proto.set_name(set.name);
  proto.set_model(set.request.spec().model());
  proto.set_fingerprint(set.fingerprint);
  proto.set_failed_attempts(set.failed_attempts);
  *proto.mutable_may_prove_to_be() = {set.may_prove_to_be.begin(), set.may_prove_to_be.end()};
  if (set.failure.has_value()) set.failure->Write(proto.mutable_failure());
  DescribeState(set, &proto);
  if (proto.state() == v1::DesiredSet::STATE_FAILED) {
    const auto left = std::max(set.retry_at - options_.clock->SteadyNow(), TimePoint::duration::zero());
    SetTimestamp(options_.clock->WallNow() + std::chrono::duration_cast<std::chrono::system_clock::duration>(left),
                 proto.mutable_retry_time());
  }
  return proto;
}

void Reconciler::DescribeState(const Set& set, v1::DesiredSet* proto) const {
  const std::optional<ActualSet> actual = LookAt(set.fingerprint);
  if (const absl::Status held = CheckHeld(set); !held.ok()) {
    proto->set_state(v1::DesiredSet::STATE_FAILED);
    Trouble(held).Write(proto->mutable_failure());
  } else if (!actual.has_value()) {
    proto->set_state(set.failed_attempts > 0 ? v1::DesiredSet::STATE_FAILED : v1::DesiredSet::STATE_WAITING);
  } else if (actual->phase == ActualSet::Phase::kDraining) {
    proto->set_state(v1::DesiredSet::STATE_DRAINING);
  } else if (actual->phase == ActualSet::Phase::kLoading) {
    proto->set_state(v1::DesiredSet::STATE_LOADING);
    const WeightSetRef found = options_.registry->Find(set.fingerprint);
    if (found == nullptr) return;
    const v1::WeightSet there = options_.registry->Describe(found);
    if (there.has_progress()) *proto->mutable_progress() = there.progress();
  } else {
    proto->set_state(actual->quarantined ? v1::DesiredSet::STATE_QUARANTINED : v1::DesiredSet::STATE_RESIDENT);
  }
}

std::vector<v1::DesiredAlias> Reconciler::DescribeAliases() const {
  const Desired desired = Copy();
  const ActualState actual = Look(desired);
  const WantedState wanted = Want(desired);
  Troubles troubles;
  {
    MutexLock lock(mutex_);
    troubles = troubles_;
  }
  std::vector<v1::DesiredAlias> described;
  for (const auto& [name, index] : desired.aliases) {
    const Set& set = desired.sets[index];
    v1::DesiredAlias& alias = described.emplace_back();
    alias.set_name(name);
    alias.set_set(set.name);
    const auto now = actual.aliases.find(name);
    if (now != actual.aliases.end()) alias.set_fingerprint(now->second);
    alias.set_in_place(weightbroker::IsSatisfied({.sets = {wanted.sets[index]}, .aliases = {{name, 0}}}, actual));
    const auto trouble = troubles.find(name);
    if (!alias.in_place() && trouble != troubles.end()) trouble->second.Write(alias.mutable_failure());
  }
  return described;
}

}  // namespace weightbroker
