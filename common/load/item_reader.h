// Reads the items of a read plan for one thread: several under way at once where the system has io_uring, and one after
// the other where it has not, or where the page cache has what is wanted.
//
//   ItemReader reader(files, gate, std::move(queue));              // null: without io_uring
//   reader.Start(item, buffer);                                    // as many as the queue is deep
//   ASSIGN_OR_RETURN(const ItemReader::Result read, reader.Finish());   // of the item that was started first
//
// What goes past the page cache waits for its turn at the gate, which all threads share. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/read_queue.h"
#include "common/load/read_gate.h"
#include "common/load/read_plan.h"
#include "common/load/shard_file.h"

namespace weightbroker {

class ItemReader {
 public:
  struct Result {
    const ReadItem* item = nullptr;
    std::span<const std::byte> bytes;  // in the buffer
  };

  // `files` and `gate` outlive the reader.
  ItemReader(const std::vector<std::unique_ptr<ShardFile>>& files, ReadGate& gate, std::unique_ptr<ReadQueue> queue)
      : files_(files), gate_(gate), queue_(std::move(queue)) {}
  ~ItemReader();
  ItemReader(const ItemReader&) = delete;
  ItemReader& operator=(const ItemReader&) = delete;

  // Begins to read the item, as soon as it may. It and the buffer, which must do for ShardFile::Read, stay until it has
  // been finished, or the reader has gone.
  void Start(const ReadItem& item, std::span<std::byte> buffer);

  // Ends the item that was started first; there is one. Fails as ShardFile::Read does.
  absl::StatusOr<Result> Finish();

  size_t under_way() const { return pending_.size(); }

 private:
  // At the gate. Those that are still to come are behind all others.
  enum class Turn { kNone, kToCome, kNow };

  struct Pending {
    const ReadItem* item = nullptr;
    std::span<std::byte> buffer;
    uint64_t tag = 0;
    ShardFile::Way way = ShardFile::Way::kBuffered;
    Turn turn = Turn::kNone;
    bool is_queued = false;  // the queue has it
    std::optional<ReadQueue::Completion> completion = std::nullopt;
  };

  ShardFile& FileOf(const Pending& pending) const { return *files_[static_cast<size_t>(pending.item->file_index)]; }
  void StartThoseThatMay();
  void Begin(Pending& pending);
  void GiveUpTurn(Pending& pending, int64_t bytes);
  absl::StatusOr<std::span<const std::byte>> Read(Pending& pending);
  void WaitFor(const Pending& wanted);

  const std::vector<std::unique_ptr<ShardFile>>& files_;
  ReadGate& gate_;
  std::deque<Pending> pending_;  // in the order of their start
  uint64_t next_tag_ = 0;
  std::unique_ptr<ReadQueue> queue_;  // goes first: it waits for what is under way
};

}  // namespace weightbroker
