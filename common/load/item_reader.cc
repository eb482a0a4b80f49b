#include "common/load/item_reader.h"

#include <utility>

#include "common/base/status_macros.h"

namespace weightbroker {

void ItemReader::Start(const ReadItem& item, std::span<std::byte> buffer) {
  Pending& pending = pending_.emplace_back(Pending{.item = &item, .buffer = buffer, .tag = next_tag_++});
  ShardFile& file = *files_[static_cast<size_t>(item.file_index)];
  pending.started = file.Start(queue_.get(), item.begin_bytes, item.end_bytes, buffer, pending.tag);
}

absl::StatusOr<ItemReader::Result> ItemReader::Finish() {
  if (pending_.front().started == ShardFile::Started::kQueued) WaitFor(pending_.front());
  const Pending done = std::move(pending_.front());
  pending_.pop_front();
  Result result{.item = done.item, .bytes = {}};
  ASSIGN_OR_RETURN(result.bytes, Read(done));
  return result;
}

absl::StatusOr<std::span<const std::byte>> ItemReader::Read(const Pending& pending) {
  const ReadItem& item = *pending.item;
  ShardFile& file = *files_[static_cast<size_t>(item.file_index)];
  switch (pending.started) {
    case ShardFile::Started::kQueued:
      return file.Finish(*pending.completion, item.begin_bytes, item.end_bytes, pending.buffer);
    case ShardFile::Started::kCached:
      return file.ReadCached(item.begin_bytes, item.end_bytes, pending.buffer);
    case ShardFile::Started::kNot:
      break;
  }
  return file.Read(item.begin_bytes, item.end_bytes, pending.buffer);
}

// What ends before is kept.
void ItemReader::WaitFor(const Pending& wanted) {
  while (!wanted.completion.has_value()) {
    const ReadQueue::Completion done = queue_->Wait();
    pending_[static_cast<size_t>(done.tag - pending_.front().tag)].completion = done;
  }
}

}  // namespace weightbroker
