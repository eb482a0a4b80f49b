#include "server/keeper/entry_store.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

size_t BytesOf(const StoredEntry& entry) { return entry.key.size() + entry.value.size(); }

std::string OverLimit(const std::string& what, size_t needed, size_t limit) {
  return absl::StrCat("with this entry the keeper would hold ", needed, " ", what, "; its limit is ", limit);
}

}  // namespace

absl::StatusOr<PutResult> EntryStore::AddPart(const KeeperMessage& part, std::vector<UniqueFd> fds) {
  RETURN_IF_ERROR(CheckSequence(part));
  if (!partial_.has_value()) {
    partial_ = Partial{.request_id = part.request_id,
                       .next_part = 0,
                       .parts = part.parts,
                       .key = part.key,
                       .entry = {.key = part.key, .value = "", .fds = {}},
                       .refusal = ""};
  }
  if (partial_->refusal.empty()) {
    partial_->entry.value += part.value;
    for (UniqueFd& fd : fds) partial_->entry.fds.push_back(std::move(fd));
    partial_->refusal = FindRefusal();
  }
  if (!partial_->refusal.empty()) partial_->entry = {};  // gives back what it took
  if (++partial_->next_part < partial_->parts) return PutResult{};

  Partial whole = *std::exchange(partial_, std::nullopt);
  if (!whole.refusal.empty()) return PutResult{.state = PutState::kRefused, .refusal = std::move(whole.refusal)};
  PutResult result = {.state = PutState::kStored};
  result.stored = std::make_shared<const StoredEntry>(std::move(whole.entry));
  result.replaced = Insert(result.stored);
  return result;
}

absl::Status EntryStore::CheckSequence(const KeeperMessage& part) const {
  const bool in_turn = partial_.has_value() ? part.request_id == partial_->request_id && part.key == partial_->key &&
                                                  part.parts == partial_->parts && part.part == partial_->next_part
                                            : part.part == 0;
  if (in_turn && !part.key.empty()) return absl::OkStatus();
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("part ", part.part, " of ", part.parts, " of request ", part.request_id,
                                " with a key of ", part.key.size(), " bytes is out of turn"));
}

std::string EntryStore::FindRefusal() const {
  const StoredEntry& entry = partial_->entry;
  const auto old = entries_.find(entry.key);
  const size_t entries = entries_.size() + (old == entries_.end() ? 1 : 0);
  if (entries > limits_.max_entries) return OverLimit("entries", entries, limits_.max_entries);
  // The old entry stands until the new one is whole, so its descriptors count as well.
  const size_t fds = fd_count_ + entry.fds.size();
  if (fds > limits_.max_fds) return OverLimit("file descriptors", fds, limits_.max_fds);
  const size_t bytes = value_bytes_ + BytesOf(entry) - (old == entries_.end() ? 0 : BytesOf(*old->second));
  if (bytes > limits_.max_value_bytes) return OverLimit("bytes of values", bytes, limits_.max_value_bytes);
  return "";
}

SharedEntry EntryStore::Restore(StoredEntry entry) {
  auto shared = std::make_shared<const StoredEntry>(std::move(entry));
  Insert(shared);
  return shared;
}

SharedEntry EntryStore::Insert(SharedEntry entry) {
  SharedEntry replaced = Drop(entry->key);
  fd_count_ += entry->fds.size();
  value_bytes_ += BytesOf(*entry);
  entries_[entry->key] = std::move(entry);
  return replaced;
}

SharedEntry EntryStore::Drop(const std::string& key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return nullptr;
  SharedEntry dropped = std::move(it->second);
  entries_.erase(it);
  attempts_.erase(key);
  fd_count_ -= dropped->fds.size();
  value_bytes_ -= BytesOf(*dropped);
  return dropped;
}

SharedEntry EntryStore::OnBrokerEnded() {
  const std::string key = std::exchange(taking_up_, "");
  if (entries_.count(key) == 0 || ++attempts_[key] < limits_.max_attempts) return nullptr;
  ++dropped_;
  return Drop(key);
}

void EntryStore::OnBrokerReady() {
  taking_up_.clear();
  attempts_.clear();
  dropped_ = 0;
}

void EntryStore::Resume(Attempts attempts) {
  taking_up_ = std::move(attempts.taking_up);
  attempts_ = std::move(attempts.ended);
  dropped_ = attempts.dropped;
}

std::vector<SharedEntry> EntryStore::entries() const {
  std::vector<SharedEntry> all;
  for (const auto& [key, entry] : entries_) all.push_back(entry);
  return all;
}

}  // namespace weightbroker
