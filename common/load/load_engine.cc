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
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
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

// Memory that O_DIRECT can read into, on huge pages where there are any: with base pages the kernel must split a read
// into many requests, and reading took twice as long (2 GiB in 1.6 s and in 0.75 s on a virtual disk).
class HeapBuffers : public BufferSource {
 public:
  absl::StatusOr<std::span<std::byte>> Allocate(int64_t size_bytes) override {
    const std::align_val_t alignment{
        static_cast<size_t>(size_bytes >= kHugePageBytes ? kHugePageBytes : kDirectAlignmentBytes)};
    const auto size = static_cast<size_t>(size_bytes);
    auto* const data = static_cast<std::byte*>(::operator new(size, alignment, std::nothrow));
    if (data == nullptr) {
      return MakeError(Reason::kMemoryExhausted, absl::StrCat("no memory for a read buffer of ", size_bytes, " bytes"),
                       {{"need_bytes", absl::StrCat(size_bytes)}});
    }
    if (size_bytes >= kHugePageBytes) madvise(data, size, MADV_HUGEPAGE);  // a wish
    MutexLock lock(mutex_);
    buffers_.emplace_back(data, Deleter{alignment});
    return std::span(data, size);
  }

 private:
  struct Deleter {
    std::align_val_t alignment;
    void operator()(std::byte* data) const { ::operator delete(data, alignment); }
  };

  Mutex mutex_;
  std::vector<std::unique_ptr<std::byte, Deleter>> buffers_ ABSL_GUARDED_BY(mutex_);
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

using Destinations = std::span<const std::unique_ptr<Destination>>;

// A reader thread's buffers, used in turn.
class BufferRing {
 public:
  BufferRing(BufferSource& source, int64_t buffer_bytes, Destinations destinations)
      : source_(source), buffer_bytes_(buffer_bytes), destinations_(destinations) {}

  // A buffer that no destination needs any more.
  absl::StatusOr<std::span<std::byte>> Next() {
    if (buffers_.size() < static_cast<size_t>(source_.chunks_per_thread())) {
      ASSIGN_OR_RETURN(buffers_.emplace_back(), source_.Allocate(buffer_bytes_));
      return buffers_.back();
    }
    std::rotate(buffers_.begin(), buffers_.begin() + 1, buffers_.end());
    RETURN_IF_ERROR(Release(buffers_.back()));
    return buffers_.back();
  }

  // Waits until no destination needs any of them. Call before the ring goes, whatever has failed.
  absl::Status ReleaseAll() {
    absl::Status first;
    for (const auto buffer : buffers_) first.Update(Release(buffer));
    return first;
  }

 private:
  absl::Status Release(std::span<const std::byte> buffer) {
    absl::Status first;
    for (const auto& destination : destinations_) first.Update(destination->Release(buffer));
    return first;
  }

  BufferSource& source_;
  const int64_t buffer_bytes_;
  const Destinations destinations_;
  std::vector<std::span<std::byte>> buffers_;  // the one used last at the end
};

// What the reader threads share: the items to do, and the first error.
class LoadRun {
 public:
  LoadRun(const LoadSource& source, Destinations destinations, const ShardFiles& files, const LoadOptions& options)
      : destinations_(destinations),
        files_(files),
        options_(options),
        reads_(source.checkpoint, source.plan, options.chunk_bytes) {}

  // Runs the readers to their end, reporting from this thread meanwhile; where no thread is to be had, this one reads.
  absl::Status Run(const LoadProgressCallback& progress) {
    const int item_count = static_cast<int>(std::min<size_t>(reads_.items().size(), 1 << 20));
    const int thread_count = std::min(ChooseReaderThreads(options_.reader_threads), item_count);
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

 private:
  // As many as the system allows.
  std::vector<std::thread> StartReaders(int count) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) {
      CountReader();
      auto thread = StartThread("reading a checkpoint", [this] { ReadUntilDone(); });
      if (!thread.ok()) {
        DiscountReader();
        break;
      }
      threads.push_back(*std::move(thread));
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
    BufferRing buffers(options_.buffers != nullptr ? *options_.buffers : heap_, reads_.buffer_bytes(), destinations_);
    while (!stop_) {
      const size_t next = next_item_++;
      if (next >= reads_.items().size()) break;
      if (absl::Status status = ReadAndStore(reads_.items()[next], buffers); !status.ok()) Fail(std::move(status));
    }
    if (absl::Status status = buffers.ReleaseAll(); !status.ok()) Fail(std::move(status));
    DiscountReader();
  }

  absl::Status ReadAndStore(const ReadItem& item, BufferRing& buffers) {
    ASSIGN_OR_RETURN(const auto buffer, buffers.Next());
    ShardFile& file = *files_[static_cast<size_t>(item.file_index)];
    ASSIGN_OR_RETURN(const auto bytes, file.Read(item.begin_bytes, item.end_bytes, buffer));
    for (size_t shard = 0; shard < destinations_.size(); ++shard) {
      const std::vector<Transfer> transfers = reads_.TransfersOf(item, shard);
      if (!transfers.empty()) RETURN_IF_ERROR(destinations_[shard]->Store(bytes, transfers));
    }
    done_bytes_ += item.end_bytes - item.begin_bytes;
    return absl::OkStatus();
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

  const Destinations destinations_;  // different threads fill different bytes
  const ShardFiles& files_;
  const LoadOptions options_;
  const ReadPlan reads_;
  HeapBuffers heap_;

  std::atomic<size_t> next_item_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> done_bytes_{0};

  Mutex mutex_;
  CondVar ended_;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // readers that have not ended
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::vector<std::vector<Digest>>> LoadNode(const LoadSource& source, Destinations destinations,
                                                          const LoadOptions& options,
                                                          const LoadProgressCallback& progress) {
  ASSIGN_OR_RETURN(const ShardFiles files, OpenFiles(source));
  LoadRun run(source, destinations, files, options);
  RETURN_IF_ERROR(run.Run(progress));
  std::vector<std::vector<Digest>> digests;
  for (const auto& destination : destinations) {
    ASSIGN_OR_RETURN(digests.emplace_back(), destination->Finish());
  }
  return digests;
}

}  // namespace weightbroker
