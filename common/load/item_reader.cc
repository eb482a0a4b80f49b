#include "common/load/item_reader.h"

#include <utility>

namespace weightbroker {

ItemReader::~ItemReader() {
  queue_.reset();  // waits for what is under way
  for (Pending& pending : pending_) GiveUpTurn(pending, 0);
}

void ItemReader::Start(const ReadItem& item, std::span<std::byte> buffer) {
  Pending& pending = pending_.emplace_back(Pending{.item = &item, .buffer = buffer, .tag = next_tag_++});
  pending.way = FileOf(pending).WayTo(item.begin_bytes, item.end_bytes);
  if (pending.way == ShardFile::Way::kDirect) pending.turn = Turn::kToCome;
  StartThoseThatMay();
}

// In their order: whoever waits at the gate then has no turn that it could be waiting for itself.
void ItemReader::StartThoseThatMay() {
  for (Pending& pending : pending_) {
    if (pending.turn != Turn::kToCome) continue;
    if (!gate_.TryEnter()) return;
    Begin(pending);
  }
}

// At its turn.
void ItemReader::Begin(Pending& pending) {
  const ReadItem& item = *pending.item;
  pending.turn = Turn::kNow;
  pending.is_queued = queue_ != nullptr &&
                      FileOf(pending).Start(*queue_, item.begin_bytes, item.end_bytes, pending.buffer, pending.tag);
}

void ItemReader::GiveUpTurn(Pending& pending, int64_t bytes) {
  if (std::exchange(pending.turn, Turn::kNone) == Turn::kNow) gate_.Leave(bytes);
}

absl::StatusOr<ItemReader::Result> ItemReader::Finish() {
  Pending& first = pending_.front();
  if (first.turn == Turn::kToCome) {
    gate_.Enter();
    Begin(first);
  }
  if (first.is_queued) WaitFor(first);
  Result result{.item = first.item, .bytes = {}};
  auto bytes = Read(first);
  GiveUpTurn(first, bytes.ok() ? static_cast<int64_t>(bytes->size()) : 0);
  pending_.pop_front();
  StartThoseThatMay();
  if (!bytes.ok()) return bytes.status();
  result.bytes = *bytes;
  return result;
}

absl::StatusOr<std::span<const std::byte>> ItemReader::Read(Pending& pending) {
  const ReadItem& item = *pending.item;
  ShardFile& file = FileOf(pending);
  if (pending.is_queued) return file.Finish(*pending.completion, item.begin_bytes, item.end_bytes, pending.buffer);
  if (pending.way == ShardFile::Way::kCached) {
    return file.ReadCached(item.begin_bytes, item.end_bytes, pending.buffer);
  }
  return file.Read(item.begin_bytes, item.end_bytes, pending.buffer);
}

// What ends before is kept, and its turn is over.
void ItemReader::WaitFor(const Pending& wanted) {
  while (!wanted.completion.has_value()) {
    const ReadQueue::Completion done = queue_->Wait();
    Pending& pending = pending_[static_cast<size_t>(done.tag - pending_.front().tag)];
    pending.completion = done;
    GiveUpTurn(pending, done.count);
  }
}

}  // namespace weightbroker
