// Dies by SIGKILL at a chosen message between broker and keeper, so that tests can show that no moment loses an entry.
//
//   WEIGHTBROKER_TEST_CRASH_AT=keeper_message:put:after:3     the third kPut packet has been sent
//   WEIGHTBROKER_TEST_CRASH_AT=kept_entry:shard/              an entry is taken up whose key begins so
//   WEIGHTBROKER_TEST_CRASH_TOKEN=/tmp/token                  only if this file is there, which is removed: one crash
//
// Nothing happens unless the first variable is set. Thread-safe.
#pragma once

#include <atomic>
#include <string>

#include "common/keeper/protocol.h"

namespace weightbroker {

class CrashPoint {
 public:
  // What the broker sends: before and after it is sent, and when its answer has come. What the keeper sends: before and
  // after the broker has acted on it.
  enum class Moment { kBefore, kAfter, kAcked };

  // Reads the environment. A value that is not of the form above is logged and crashes nothing.
  static const CrashPoint& FromEnvironment();

  // A point described by `text` as above; `token` may be empty.
  CrashPoint(const std::string& text, const std::string& token);

  // Counts an occurrence, and ends the process if it is the one.
  void Reached(KeeperMessageType type, Moment moment) const;

  // An entry is about to be taken up. Ends the process if it is one of those.
  void ReachedEntry(const std::string& key) const;

  // Whether that occurrence is the one. Reached without the end.
  bool IsHit(KeeperMessageType type, Moment moment) const;
  bool IsHit(const std::string& key) const;

 private:
  std::string type_;
  std::string moment_;
  int occurrence_ = 0;  // counted from 1; 0 never
  std::string entry_;   // how its key begins; empty never
  std::string token_;
  mutable std::atomic<int> seen_{0};
};

}  // namespace weightbroker
