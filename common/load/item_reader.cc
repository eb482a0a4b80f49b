#include "common/load/item_reader.h"

#include <utility>

#include "common/base/status_macros.h"

namespace weightbroker {

ItemReader::~ItemReader() {
  queue_.reset();  // waits for what is under way
  for (Pending& pending : pending_) {
    GiveUpTurn(pending, 0);
    if (!pending.buffer.empty()) buffers_.Unused(pending.buffer);
  }
}

absl::Status ItemReader::Start(const ReadItem& item) {
  Pending& pending = pending_.emplace_back(Pending{.item = &item, .tag = next_tag_++, .has_turn = true});
  ShardFile& file = FileOf(pending);
  pending.way = file.WayTo(item.begin_bytes, item.end_bytes);
  if (pending.way != ShardFile::Way::kDirect) {
    GiveUpTurn(pending, 0);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(pending.buffer, buffers_.Take());
  pending.is_queued =
      queue_ != nullptr && file.Start(*queue_, item.begin_bytes, item.end_bytes, pending.buffer, pending.tag);
  return absl::OkStatus();
}

void ItemReader::GiveUpTurn(Pending& pending, int64_t bytes) {
  if (std::exchange(pending.has_turn, false)) gate_.Leave(bytes);
}

absl::StatusOr<ItemReader::Result> ItemReader::Finish() {
  Pending& first = pending_.front();
  if (first.is_queued) WaitFor(first);
  if (first.buffer.empty()) {
    ASSIGN_OR_RETURN(first.buffer, buffers_.Take());
  }
  ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, Read(first));
  GiveUpTurn(first, static_cast<int64_t>(bytes.size()));
  const Result result = {first.item, bytes, first.buffer, first.way == ShardFile::Way::kDirect};
  pending_.pop_front();
  return result;
}

absl::StatusOr<std::span<const std::byte>> ItemReader::Read(Pending& pending) {
  const ReadItem& item = *pending.item;
  ShardFile& file = FileOf(pending);
  if (pending.is_queued) return file.Finish(*pending.completion, item.begin_bytes, item.end_bytes, pending.buffer);
  if (pending.way == ShardFile::Way::kDirect) return file.Read(item.begin_bytes, item.end_bytes, pending.buffer);
  return file.ReadCached(item.begin_bytes, item.end_bytes, pending.buffer);
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
