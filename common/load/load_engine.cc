#include "common/load/load_engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/mutex.h"
#include "common/base/start_thread.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/quote.h"
#include "common/load/read_plan.h"
#include "common/load/shard_file.h"

namespace weightbroker {
namespace {

// Most threads wait for the disk while a few copy: enough of them keep the disk busy all the time.
int ChooseReaderThreads(int wanted) {
  if (wanted > 0) return wanted;
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::clamp(8 * cores, 8, 32);
}

// A buffer that O_DIRECT can read into, on huge pages where there are any: with base pages the kernel must split a read
// into many requests, and reading took twice as long (2 GiB in 1.6 s and in 0.75 s on a virtual disk).
class ReadBuffer {
 public:
  explicit ReadBuffer(int64_t size_bytes)
      : size_(static_cast<size_t>(size_bytes)),
        alignment_{static_cast<size_t>(size_bytes >= kHugePageBytes ? kHugePageBytes : kDirectAlignmentBytes)},
        data_(static_cast<std::byte*>(::operator new(size_, alignment_))) {
    if (size_bytes >= kHugePageBytes) madvise(data_, size_, MADV_HUGEPAGE);  // a wish
  }
  ~ReadBuffer() { ::operator delete(data_, alignment_); }
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  std::span<std::byte> bytes() const { return {data_, size_}; }

 private:
  const size_t size_;
  const std::align_val_t alignment_;
  std::byte* const data_;
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
  LoadRun(const ShardPlan& plan, std::span<HostSlab> slabs, const ShardFiles& files, const LoadOptions& options)
      : plan_(plan),
        slabs_(slabs),
        files_(files),
        options_(options),
        items_(PlanReads(plan, options.chunk_bytes)),
        sums_(plan.tensors.size()) {}

  // Runs the readers to their end, reporting from this thread meanwhile; where no thread is to be had, this one reads.
  absl::Status Run(const LoadProgressCallback& progress) {
    const int thread_count = std::min(ChooseReaderThreads(options_.reader_threads), static_cast<int>(items_.size()));
    std::vector<std::thread> threads = StartReaders(thread_count);
    if (threads.empty()) ReadUntilDone();
    while (WaitForEnd(options_.progress_interval)) {
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
  // As many as the system allows.
  std::vector<std::thread> StartReaders(int count) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) {
      CountReader();
      std::thread thread;
      if (!TryStartThread(&thread, [this] { ReadUntilDone(); })) {
        DiscountReader();
        break;
      }
      threads.push_back(std::move(thread));
    }
    if (threads.empty()) CountReader();  // the caller
    return threads;
  }

  void CountReader() {
    MutexLock lock(mutex_);
    ++running_;
  }

  void DiscountReader() {
    MutexLock lock(mutex_);
    if (--running_ == 0) ended_.NotifyAll();
  }

  void ReadUntilDone() {
    const ReadBuffer buffer(options_.chunk_bytes);
    while (!stop_) {
      const size_t next = next_item_++;
      if (next >= items_.size()) break;
      if (absl::Status status = ReadItemInto(items_[next], buffer.bytes()); !status.ok()) Fail(std::move(status));
    }
    DiscountReader();
  }

  absl::Status ReadItemInto(const ReadItem& item, std::span<std::byte> buffer) {
    ShardFile& file = *files_[static_cast<size_t>(item.file_index)];
    ASSIGN_OR_RETURN(const auto bytes, file.Read(item.begin_bytes, item.end_bytes, buffer));
    std::vector<DigestAccumulator> sums(item.segments.size());
    RETURN_IF_ERROR(WritesTo(SlabOf(item)) ? DigestAndWrite(item, bytes, sums) : CopyAndDigestAll(item, bytes, sums));
    MutexLock lock(mutex_);
    for (size_t i = 0; i < sums.size(); ++i) sums_[static_cast<size_t>(item.segments[i].tensor)].Merge(sums[i]);
    done_bytes_ += item.end_bytes - item.begin_bytes;
    return absl::OkStatus();
  }

  bool WritesTo(const HostSlab& slab) const {
    if (options_.fill_method == FillMethod::kBest) return slab.PrefersWrite();
    return options_.fill_method == FillMethod::kWrite;
  }

  // Segments that are neighbours in the file are neighbours in the slab, with less than kTensorAlignmentBytes between
  // two.
  absl::Status DigestAndWrite(const ReadItem& item, std::span<const std::byte> bytes,
                              std::vector<DigestAccumulator>& sums) {
    static constexpr std::byte kGap[kTensorAlignmentBytes] = {};
    std::vector<std::span<const std::byte>> parts;
    int64_t end = PlaceOf(item.segments.front());
    for (size_t i = 0; i < sums.size(); ++i) {
      const ReadSegment& segment = item.segments[i];
      const auto from = BytesOf(segment, item, bytes);
      sums[i].Add(segment.tensor_offset_bytes, from);
      parts.push_back(std::span(kGap).first(static_cast<size_t>(PlaceOf(segment) - end)));
      parts.push_back(from);
      end = PlaceOf(segment) + segment.size_bytes;
    }
    return SlabOf(item).Write(PlaceOf(item.segments.front()), parts);
  }

  absl::Status CopyAndDigestAll(const ReadItem& item, std::span<const std::byte> bytes,
                                std::vector<DigestAccumulator>& sums) {
    const int64_t begin = PlaceOf(item.segments.front());
    const int64_t end = PlaceOf(item.segments.back()) + item.segments.back().size_bytes;
    HostSlab& slab = SlabOf(item);
    RETURN_IF_ERROR(slab.Populate(begin, end - begin));
    for (size_t i = 0; i < sums.size(); ++i) {
      const ReadSegment& segment = item.segments[i];
      std::byte* const to = slab.writable_bytes().data() + PlaceOf(segment);
      CopyAndDigest(segment.tensor_offset_bytes, BytesOf(segment, item, bytes), to, sums[i]);
    }
    return absl::OkStatus();
  }

  static std::span<const std::byte> BytesOf(const ReadSegment& segment, const ReadItem& item,
                                            std::span<const std::byte> bytes) {
    return bytes.subspan(static_cast<size_t>(segment.file_offset_bytes - item.begin_bytes),
                         static_cast<size_t>(segment.size_bytes));
  }

  // All of an item's segments are in one slab.
  HostSlab& SlabOf(const ReadItem& item) const {
    return slabs_[static_cast<size_t>(PlacementOf(item.segments.front()).slab)];
  }

  // Where a segment lies in its slab.
  int64_t PlaceOf(const ReadSegment& segment) const {
    return PlacementOf(segment).slab_offset_bytes + segment.tensor_offset_bytes;
  }

  const TensorPlacement& PlacementOf(const ReadSegment& segment) const {
    return plan_.tensors[static_cast<size_t>(segment.tensor)];
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
  const LoadOptions options_;
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
  LoadRun run(source.plan, slabs, files, options);
  RETURN_IF_ERROR(run.Run(progress));
  return FinishDigests(source.plan, run.sums());
}

}  // namespace weightbroker
