// Reads the items of a read plan for one thread: several under way at once where the system has io_uring, and one after
// the other where it has not, or where the page cache has what is wanted.
//
//   ItemReader reader(files, gate, buffers, std::move(queue));     // null: without io_uring
//   gate.Enter();                                                       // one turn for each item
//   RETURN_IF_ERROR(reader.Start(item));                                // as many as the queue is deep
//   ASSIGN_OR_RETURN(const ItemReader::Result read, reader.Finish());   // of the item that was started first
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/read_queue.h"
#include "common/load/read_buffers.h"
#include "common/load/read_gate.h"
#include "common/load/read_plan.h"
#include "common/load/shard_file.h"

namespace weightbroker {

class ItemReader {
 public:
  struct Result {
    const ReadItem* item = nullptr;
    std::span<const std::byte> bytes;  // in the buffer
    std::span<std::byte> buffer;       // the caller's now, to be Stored or Unused
    bool is_direct = false;            // it went past the page cache
  };

  // `files`, `gate` and `buffers` outlive the reader.
  ItemReader(const std::vector<std::unique_ptr<ShardFile>>& files, ReadGate& gate, ReadBuffers& buffers,
             std::unique_ptr<ReadQueue> queue)
      : files_(files), gate_(gate), buffers_(buffers), queue_(std::move(queue)) {}
  ~ItemReader();
  ItemReader(const ItemReader&) = delete;
  ItemReader& operator=(const ItemReader&) = delete;

  // Begins to read the item, which stays until it has been finished, or the reader has gone. The caller has entered the
  // gate, which all threads share, for it; the reader leaves it when the read has ended, or at once if nothing of it
  // goes to storage. Fails as ReadBuffers::Take does.
  absl::Status Start(const ReadItem& item);

  // Ends the item that was started first; there is one. Fails as ShardFile::Read and ReadBuffers::Take do; after an
  // error, also of Start, the reader can only go, and gives back all buffers and turns that it has.
  absl::StatusOr<Result> Finish();

  size_t under_way() const { return pending_.size(); }

 private:
  struct Pending {
    const ReadItem* item = nullptr;
    std::span<std::byte> buffer = {};  // none until it is read
    uint64_t tag = 0;
    ShardFile::Way way = ShardFile::Way::kCached;
    bool has_turn = false;   // at the gate
    bool is_queued = false;  // the queue has it
    std::optional<ReadQueue::Completion> completion = std::nullopt;
  };

  ShardFile& FileOf(const Pending& pending) const { return *files_[static_cast<size_t>(pending.item->file_index)]; }
  void GiveUpTurn(Pending& pending, int64_t bytes);
  absl::StatusOr<std::span<const std::byte>> Read(Pending& pending);
  void WaitFor(const Pending& wanted);

  const std::vector<std::unique_ptr<ShardFile>>& files_;
  ReadGate& gate_;
  ReadBuffers& buffers_;
  std::deque<Pending> pending_;  // in the order of their start
  uint64_t next_tag_ = 0;
  std::unique_ptr<ReadQueue> queue_;  // goes first: it waits for what is under way
};

}  // namespace weightbroker
