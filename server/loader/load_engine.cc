#include "server/loader/load_engine.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/quote.h"
#include "server/loader/read_plan.h"
#include "server/loader/shard_file.h"

namespace weightbroker {
namespace {

// Most threads wait for the disk while a few allocate pages and copy: enough of them keep the disk busy all the time.
int ChooseReaderThreads(int wanted) {
  if (wanted > 0) return wanted;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::clamp(4 * cores, 8, 32);
}

// A buffer that O_DIRECT can read into.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(int64_t size_bytes)
      : data_(static_cast<std::byte*>(::operator new(static_cast<size_t>(size_bytes), kAlignment))),
        size_(static_cast<size_t>(size_bytes)) {}
  ~AlignedBuffer() { ::operator delete(data_, kAlignment); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  static constexpr std::align_val_t kAlignment{kDirectAlignmentBytes};
  std::byte* const data_;
  const size_t size_;
};

using ShardFiles = std::vector<std::unique_ptr<ShardFile>>;

absl::StatusOr<ShardFiles> OpenFiles(const LoadSource& source) {
  std::map<std::string, const FileIdentity*> identities;
  for (const FileIdentity& file : source.identity.files) identities[file.name] = &file;
  ShardFiles files;
  for (const std::string& name : source.checkpoint.files.shard_names) {
    const auto identity = identities.find(name);
    if (identity == identities.end()) {
      return MakeError(Reason::kCheckpointChanged,
                       absl::StrCat(Printable(name), ": the file was not there when the model was fingerprinted"),
                       {{"file", Printable(name)}, {"changed", "new"}});
    }
    ASSIGN_OR_RETURN(auto file, ShardFile::Open(source.file_system, source.checkpoint.files.folder, *identity->second));
    files.push_back(std::move(file));
  }
  return files;
}

// What the reader threads share: the items to do, the digests so far, and the first error.
class LoadRun {
 public:
  LoadRun(const ShardPlan& plan, std::span<HostSlab> slabs, const ShardFiles& files, int64_t chunk_bytes)
      : plan_(plan),
        slabs_(slabs),
        files_(files),
        chunk_bytes_(chunk_bytes),
        items_(PlanReads(plan, chunk_bytes)),
        sums_(plan.tensors.size()) {}

  // Runs `thread_count` readers to their end, reporting from this thread meanwhile.
  absl::Status Run(int thread_count, std::chrono::milliseconds interval, const LoadProgressCallback& progress) {
    thread_count = std::min<int>(thread_count, static_cast<int>(items_.size()));
    {
      MutexLock lock(mutex_);
      running_ = thread_count;
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < thread_count; ++i) threads.emplace_back([this] { ReadUntilDone(); });
    while (WaitForEnd(interval)) {
      if (absl::Status status = progress(done_bytes_); !status.ok()) Fail(std::move(status));
    }
    for (std::thread& thread : threads) thread.join();
    MutexLock lock(mutex_);
    RETURN_IF_ERROR(error_);
    return progress(done_bytes_);
  }

  // Of each tensor, aliases left empty. Call after Run.
  const std::vector<DigestAccumulator>& sums() const { return sums_; }

 private:
  void ReadUntilDone() {
    const AlignedBuffer buffer(chunk_bytes_);
    while (!stop_) {
      const size_t next = next_item_++;
      if (next >= items_.size()) break;
      if (absl::Status status = ReadItemInto(items_[next], buffer.bytes()); !status.ok()) Fail(std::move(status));
    }
    MutexLock lock(mutex_);
    if (--running_ == 0) ended_.NotifyAll();
  }

  absl::Status ReadItemInto(const ReadItem& item, std::span<std::byte> buffer) {
    RETURN_IF_ERROR(PopulateFor(item));
    ShardFile& file = *files_[static_cast<size_t>(item.file_index)];
    ASSIGN_OR_RETURN(const auto bytes, file.Read(item.begin_bytes, item.end_bytes, buffer));
    std::vector<DigestAccumulator> sums(item.segments.size());
    for (size_t i = 0; i < item.segments.size(); ++i) {
      const ReadSegment& segment = item.segments[i];
      const auto from = bytes.subspan(static_cast<size_t>(segment.file_offset_bytes - item.begin_bytes),
                                      static_cast<size_t>(segment.size_bytes));
      CopyAndDigest(segment.tensor_offset_bytes, from, DestinationOf(segment), sums[i]);
    }
    MutexLock lock(mutex_);
    for (size_t i = 0; i < sums.size(); ++i) sums_[static_cast<size_t>(item.segments[i].tensor)].Merge(sums[i]);
    done_bytes_ += item.end_bytes - item.begin_bytes;
    return absl::OkStatus();
  }

  // Allocates the pages that `item` will be copied to, so that the copy does not stop for each of them. Segments that
  // are neighbours in the file are neighbours in the slab.
  absl::Status PopulateFor(const ReadItem& item) {
    const ReadSegment& first = item.segments.front();
    const ReadSegment& last = item.segments.back();
    const int64_t begin = PlacementOf(first).slab_offset_bytes + first.tensor_offset_bytes;
    const int64_t end = PlacementOf(last).slab_offset_bytes + last.tensor_offset_bytes + last.size_bytes;
    return slabs_[static_cast<size_t>(PlacementOf(first).slab)].Populate(begin, end - begin);
  }

  const TensorPlacement& PlacementOf(const ReadSegment& segment) const {
    return plan_.tensors[static_cast<size_t>(segment.tensor)];
  }

  std::byte* DestinationOf(const ReadSegment& segment) const {
    const TensorPlacement& placement = PlacementOf(segment);
    const auto offset = static_cast<size_t>(placement.slab_offset_bytes + segment.tensor_offset_bytes);
    return slabs_[static_cast<size_t>(placement.slab)].writable_bytes().subspan(offset).data();
  }

  void Fail(absl::Status status) {
    stop_ = true;
    MutexLock lock(mutex_);
    if (error_.ok()) error_ = std::move(status);
  }

  // Returns whether there is still a reader after `interval`.
  bool WaitForEnd(std::chrono::milliseconds interval) {
    const auto deadline = std::chrono::steady_clock::now() + interval;
    MutexLock lock(mutex_);
    while (running_ > 0) {
      if (!ended_.WaitUntil(mutex_, deadline)) break;
    }
    return running_ > 0;
  }

  const ShardPlan& plan_;            // constant while running, as are the next four
  const std::span<HostSlab> slabs_;  // different threads fill different bytes
  const ShardFiles& files_;
  const int64_t chunk_bytes_;
  const std::vector<ReadItem> items_;

  std::atomic<size_t> next_item_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> done_bytes_{0};

  Mutex mutex_;
  CondVar ended_;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // readers that have not ended
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  std::vector<DigestAccumulator> sums_;  // guarded by mutex_ while running, constant after
};

std::vector<Digest> FinishDigests(const ShardPlan& plan, const std::vector<DigestAccumulator>& sums) {
  std::vector<Digest> digests(plan.tensors.size());
  std::map<std::string_view, size_t> by_name;
  for (size_t i = 0; i < digests.size(); ++i) {
    digests[i] = sums[i].Finish(plan.tensors[i].size_bytes);
    by_name[plan.tensors[i].name] = i;
  }
  for (size_t i = 0; i < digests.size(); ++i) {
    const std::string& target = plan.tensors[i].alias_of;
    if (!target.empty()) digests[i] = digests[by_name.at(target)];
  }
  return digests;
}

}  // namespace

absl::StatusOr<std::vector<Digest>> LoadShard(const LoadSource& source, std::span<HostSlab> slabs,
                                              const LoadOptions& options, const LoadProgressCallback& progress) {
  ASSIGN_OR_RETURN(const ShardFiles files, OpenFiles(source));
  LoadRun run(source.plan, slabs, files, options.chunk_bytes);
  RETURN_IF_ERROR(run.Run(ChooseReaderThreads(options.reader_threads), options.progress_interval, progress));
  return FinishDigests(source.plan, run.sums());
}

}  // namespace weightbroker
