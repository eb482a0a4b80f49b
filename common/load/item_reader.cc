#include "common/load/item_reader.h"

#include <utility>

#include "common/base/status_macros.h"

namespace weightbroker {

void ItemReader::Start(const ReadItem& item, std::span<std::byte> buffer) {
  Pending& pending = pending_.emplace_back(Pending{.item = &item, .buffer = buffer, .tag = next_tag_++});
  ShardFile& file = *files_[static_cast<size_t>(item.file_index)];
  pending.is_queued = queue_ != nullptr && file.Start(*queue_, item.begin_bytes, item.end_bytes, buffer, pending.tag);
}

absl::StatusOr<ItemReader::Result> ItemReader::Finish() {
  if (pending_.front().is_queued) WaitFor(pending_.front());
  const Pending done = std::move(pending_.front());
  pending_.pop_front();
  ShardFile& file = *files_[static_cast<size_t>(done.item->file_index)];
  const ReadItem& item = *done.item;
  Result result{.item = &item, .bytes = {}};
  if (done.completion.has_value()) {
    ASSIGN_OR_RETURN(result.bytes, file.Finish(*done.completion, item.begin_bytes, item.end_bytes, done.buffer));
  } else {
    ASSIGN_OR_RETURN(result.bytes, file.Read(item.begin_bytes, item.end_bytes, done.buffer));
  }
  return result;
}

// What ends before is kept.
void ItemReader::WaitFor(const Pending& wanted) {
  while (!wanted.completion.has_value()) {
    const ReadQueue::Completion done = queue_->Wait();
    pending_[static_cast<size_t>(done.tag - pending_.front().tag)].completion = done;
  }
}

}  // namespace weightbroker
