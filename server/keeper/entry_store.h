// The entries that brokers wrote down: a key, a short value and some descriptors each. What they mean is the brokers'.
//
//   auto put = store.AddPart(packet.message, std::move(packet.fds));
//   if (!put.ok()) return put.status();          // PROTOCOL_ERROR: the parts are out of order; drop the connection
//   if (put->state == PutState::kRefused) ...    // at a limit; nothing has changed
//
// An entry is replaced whole, when its last part is there. One that brokers die of is dropped in the end. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/unique_fd.h"
#include "common/keeper/protocol.h"

namespace weightbroker {

struct StoredEntry {
  std::string key;
  std::string value;
  std::vector<UniqueFd> fds;
};

// Shared with packets that are still to be sent to a broker.
using SharedEntry = std::shared_ptr<const StoredEntry>;

struct EntryLimits {
  size_t max_entries = 4096;
  size_t max_value_bytes = 4 * 1024 * 1024;  // of all entries together: they are in the keeper's own memory
  size_t max_fds = 512;                      // of all entries together, a half one included
  int max_attempts = 5;                      // brokers in a row that end while they take an entry up
};

enum class PutState {
  kPartial,  // more parts are to come
  kStored,
  kRefused,  // the last part of an entry that is over a limit
};

struct PutResult {
  PutState state = PutState::kPartial;
  SharedEntry stored = nullptr;    // kStored
  SharedEntry replaced = nullptr;  // kStored: what was there before, if anything
  std::string refusal = {};        // kRefused: which limit, what it is, what would be needed
};

class EntryStore {
 public:
  explicit EntryStore(EntryLimits limits) : limits_(limits) {}

  // Takes a kPut packet. PROTOCOL_ERROR if it is not the part that has to come next, or has no key.
  absl::StatusOr<PutResult> AddPart(const KeeperMessage& part, std::vector<UniqueFd> fds);
  // Whether an entry is half there.
  bool has_partial() const { return partial_.has_value(); }
  // Forgets it: its broker has gone.
  void DropPartial() { partial_.reset(); }

  // Puts a whole entry there without asking for the limits: it was within them before.
  SharedEntry Restore(StoredEntry entry);

  // Returns what was there, or nothing.
  SharedEntry Drop(const std::string& key);

  // The broker is about to make sense of the entry with this key; empty for none.
  void TakingUp(const std::string& key) { taking_up_ = key; }
  // The broker has ended. Returns the entry that it was taking up if it was the last that may do so; it is not there
  // any more.
  SharedEntry OnBrokerEnded();
  // A broker has made sense of all there is.
  void OnBrokerReady();

  // What must outlive a replacement of this program.
  struct Attempts {
    std::string taking_up;
    std::map<std::string, int> ended;  // brokers, by the key that they were taking up
    int dropped = 0;                   // entries, since a broker was last ready
  };
  Attempts attempts() const { return {taking_up_, attempts_, dropped_}; }
  void Resume(Attempts attempts);
  int dropped() const { return dropped_; }

  // Sorted by key.
  std::vector<SharedEntry> entries() const;
  size_t size() const { return entries_.size(); }
  size_t fd_count() const { return fd_count_; }
  size_t value_bytes() const { return value_bytes_; }

 private:
  struct Partial {
    int64_t request_id = 0;
    int32_t next_part = 0;
    int32_t parts = 0;
    std::string key;
    StoredEntry entry;
    std::string refusal;  // its further parts are taken and thrown away
  };

  absl::Status CheckSequence(const KeeperMessage& part) const;
  // Which limit the entry that is half there is over; an empty string if none.
  std::string FindRefusal() const;
  SharedEntry Insert(SharedEntry entry);

  const EntryLimits limits_;
  std::map<std::string, SharedEntry> entries_;
  std::optional<Partial> partial_;
  size_t fd_count_ = 0;     // of entries_
  size_t value_bytes_ = 0;  // of entries_, keys included
  std::string taking_up_;
  std::map<std::string, int> attempts_;
  int dropped_ = 0;
};

}  // namespace weightbroker
