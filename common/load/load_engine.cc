#include "common/load/load_engine.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/mutex.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "common/load/item_reader.h"
#include "common/load/read_buffers.h"
#include "common/load/read_gate.h"
#include "common/load/read_plan.h"
#include "common/load/shard_file.h"

namespace weightbroker {
namespace {

constexpr int kMostReadersByDefault = 16;
constexpr int kReadsUnderWay = 16;  // with io_uring, of all threads together, but some of each
constexpr int kFewestReadsOfThread = 4;

// Until it is known what storage likes, and at least. A virtual disk's host copies into the buffers, and ends many
// reads at once, when others are to begin: so twice this is in use, which should stay in its caches. Those of H200's
// machines gave 1.01 and 0.99 of what they have with 4 MiB under way, and 0.82 to 0.90 with 8. Threads that copy and
// digest themselves come to what has been read later: two cores had 0.92 with 4 MiB, and 0.95 with 8.
constexpr int64_t kFirstBytesUnderWay = 4 << 20;
constexpr int64_t kFirstBytesUnderWayOfBusyThreads = 8 << 20;

int Cores() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

// How many threads read, and how much each has under way.
struct Tuning {
  bool has_queue = false;
  int reader_threads = 1;
  int reads_per_thread = 1;
  int buffers_per_thread = 1;

  int64_t buffers() const { return int64_t{reader_threads} * buffers_per_thread; }
  int reads() const { return reader_threads * reads_per_thread; }
};

// What is known of a load before it is tuned.
struct Circumstances {
  bool has_queue = false;
  bool is_on_storage = false;  // some of the files are; or memory has everything
};

int64_t ChunkBytes(const LoadOptions& options, bool is_on_storage) {
  if (options.chunk_bytes > 0) return options.chunk_bytes;
  return is_on_storage ? kStorageChunkBytes : options.memory_chunk_bytes;
}

// Where reads end that are written to host memory: so that writes fill huge pages, or an even part of one.
int64_t LandingBytes(int64_t chunk_bytes) {
  const bool is_even_part = chunk_bytes < kHugePageBytes && kHugePageBytes % chunk_bytes == 0;
  return is_even_part ? chunk_bytes : kHugePageBytes;
}

// With io_uring the disk is busy while a thread copies, but that thread starts no read: twice as many threads as cores
// loaded 4 GiB from a virtual disk with 0.96 of its speed, as many with 0.89. Without, most threads wait for the disk
// while a few copy. What memory has is copied, not waited for: there each has one read, since each more is a buffer
// more that is reserved and pinned (with a second, 30 GiB from tmpfs to a GPU took 0.82 s, not 0.71).
Tuning Tune(const LoadOptions& options, const Circumstances& circumstances, int chunks_in_flight,
            int64_t buffer_bytes) {
  Tuning tuning{.has_queue = circumstances.has_queue};
  tuning.reader_threads = options.reader_threads > 0 ? options.reader_threads
                          : circumstances.has_queue  ? std::min(2 * Cores(), kMostReadersByDefault)
                                                     : std::clamp(8 * Cores(), 8, 32);
  if (circumstances.has_queue && (circumstances.is_on_storage || options.reads_per_thread > 0)) {
    tuning.reads_per_thread = options.reads_per_thread > 0
                                  ? options.reads_per_thread
                                  : std::max(kFewestReadsOfThread, kReadsUnderWay / tuning.reader_threads);
  }
  const auto count_buffers = [&] { tuning.buffers_per_thread = tuning.reads_per_thread + chunks_in_flight; };
  const auto is_too_much = [&] { return tuning.buffers() * buffer_bytes > options.max_buffers_bytes; };
  for (count_buffers(); is_too_much() && tuning.reads_per_thread > 1; count_buffers()) --tuning.reads_per_thread;
  while (is_too_much() && tuning.reader_threads > 1) --tuning.reader_threads;
  return tuning;
}

// How many reads go to storage before it is known what it likes: two at least, so that it has something to do whenever
// a turn passes. Threads whose chunks are not needed any more once they are stored have done that themselves. Where
// memory has everything none goes there, and nobody need wait for a turn.
int FirstReads(const Tuning& tuning, bool is_on_storage, int64_t buffer_bytes, int chunks_in_flight) {
  if (!is_on_storage) return tuning.reads();
  const int64_t first_bytes = chunks_in_flight == 0 ? kFirstBytesUnderWayOfBusyThreads : kFirstBytesUnderWay;
  const int64_t nearest = (first_bytes + buffer_bytes / 2) / buffer_bytes;
  return static_cast<int>(std::min<int64_t>(std::max<int64_t>(nearest, 2), tuning.reads()));
}

void LogNoQueue(const absl::Status& error) {
  Log(LogLevel::kWarning, "load.io_uring_unavailable", {{"error", std::string(error.message())}});
}

absl::Status WithRemedy(const absl::Status& error) {
  return MakeError(Reason::kSystemError,
                   absl::StrCat(error.message(),
                                ": the read method is io_uring, which this process may not use; with "
                                "auto or pread it is read without"),
                   GetErrorDetails(error).metadata);
}

// Whether to read by io_uring; says so if this process may not. SYSTEM_ERROR if it must and may not.
absl::StatusOr<bool> HasQueue(FileSystem& file_system, ReadMethod wanted) {
  if (wanted == ReadMethod::kPread) return false;
  const auto queue = file_system.NewReadQueue(1);
  if (queue.ok()) return true;
  if (wanted == ReadMethod::kIoUring) return WithRemedy(queue.status());
  LogNoQueue(queue.status());
  return false;
}

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

bool AnyIsOnStorage(const ShardFiles& files) {
  return std::any_of(files.begin(), files.end(), [](const auto& file) { return file->IsOnStorage(); });
}

using Destinations = std::span<const std::unique_ptr<Destination>>;

// What the reader threads share: the items to do, and the first error.
class NodeLoad : public PreparedLoad {
 public:
  NodeLoad(const LoadSource& source, ShardFiles files, const LoadOptions& options, const Circumstances& circumstances)
      : file_system_(source.file_system),
        files_(std::move(files)),
        options_(options),
        reads_(source.checkpoint, source.plan, ChunkBytes(options, circumstances.is_on_storage),
               options.buffers == nullptr ? LandingBytes(ChunkBytes(options, circumstances.is_on_storage)) : 0),
        buffers_(options.buffers != nullptr ? *options.buffers : heap_),
        tuning_(Tune(options, circumstances, buffers_.chunks_in_flight(), reads_.buffer_bytes())),
        pool_(buffers_, reads_.buffer_bytes(), tuning_.buffers()),
        gate_(FirstReads(tuning_, circumstances.is_on_storage, reads_.buffer_bytes(), buffers_.chunks_in_flight()),
              tuning_.reads()) {}

  int buffer_count() const override {
    return static_cast<int>(std::min(tuning_.buffers(), static_cast<int64_t>(reads_.items().size())));
  }
  int64_t buffer_bytes() const override { return reads_.buffer_bytes(); }

  absl::StatusOr<NodeDigests> Run(Destinations destinations, const LoadProgressCallback& progress) override {
    destinations_ = destinations;
    const auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(ReadAll(progress));
    const auto read = std::chrono::steady_clock::now();
    NodeDigests digests;
    for (const auto& destination : destinations_) {
      ASSIGN_OR_RETURN(digests.emplace_back(), destination->Finish());
    }
    if (options_.report != nullptr) {
      *options_.report = Describe();
      options_.report->read_time = read - start;
      options_.report->digest_time = std::chrono::steady_clock::now() - read;
    }
    return digests;
  }

 private:
  // Runs the readers to their end, reporting from this thread meanwhile; where no thread is to be had, this one reads.
  absl::Status ReadAll(const LoadProgressCallback& progress) {
    const size_t thread_count = std::min(static_cast<size_t>(tuning_.reader_threads), reads_.items().size());
    std::vector<std::thread> threads = StartReaders(static_cast<int>(thread_count));
    if (threads.empty()) ReadUntilDone();
    while (WaitForEnd(options_.progress_interval)) {
      if (absl::Status status = progress(done_bytes_); !status.ok()) Fail(std::move(status));
    }
    for (std::thread& thread : threads) thread.join();
    MutexLock lock(mutex_);
    RETURN_IF_ERROR(error_);
    return progress(done_bytes_);
  }

  // All but the times.
  LoadReport Describe() const {
    int64_t direct_bytes = 0;
    for (const auto& file : files_) direct_bytes += file->direct_bytes();
    return {.read_method = tuning_.has_queue && !lacks_queues_ ? ReadMethod::kIoUring : ReadMethod::kPread,
            .reader_threads = tuning_.reader_threads,
            .reads_per_thread = tuning_.reads_per_thread,
            .buffer_bytes = reads_.buffer_bytes(),
            .buffers_bytes = tuning_.buffers() * reads_.buffer_bytes(),
            .direct_bytes = direct_bytes,
            .storage_reads = direct_bytes > 0 ? gate_.settled() : 0};
  }

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
    ReadBuffers buffers(pool_, buffers_.chunks_in_flight(), destinations_);
    absl::Status status = ReadAndStoreAll(buffers);
    if (!status.ok()) Fail(std::move(status));
    status = buffers.ReleaseAll();
    if (!status.ok()) Fail(std::move(status));
    DiscountReader();
  }

  // Null without io_uring. One thread may be refused what another has got: then it is said once.
  absl::StatusOr<std::unique_ptr<ReadQueue>> NewQueue() {
    if (!tuning_.has_queue) return nullptr;
    auto queue = file_system_.NewReadQueue(tuning_.reads_per_thread);
    if (queue.ok()) return queue;
    if (options_.read_method == ReadMethod::kIoUring) return WithRemedy(queue.status());
    if (!lacks_queues_.exchange(true)) LogNoQueue(queue.status());
    return nullptr;
  }

  absl::Status ReadAndStoreAll(ReadBuffers& buffers) {
    ASSIGN_OR_RETURN(auto queue, NewQueue());
    const int most = queue != nullptr ? tuning_.reads_per_thread : 1;
    ItemReader reader(files_, gate_, buffers, std::move(queue));
    while (!stop_) {
      RETURN_IF_ERROR(StartReads(reader, most, /*may_wait=*/true));
      if (reader.under_way() == 0) break;
      ASSIGN_OR_RETURN(const ItemReader::Result read, reader.Finish());
      // Storage has something to do while this is stored.
      absl::Status status = StartReads(reader, most - 1, /*may_wait=*/false);
      if (status.ok()) status = Store(*read.item, read.bytes);
      buffers.Stored(read.buffer);
      RETURN_IF_ERROR(status);
      // Where threads wait for their turn to read anyway, it is better that the same memory is read into again.
      if (read.is_direct && gate_.is_narrow()) RETURN_IF_ERROR(buffers.ReleaseAll());
    }
    return absl::OkStatus();
  }

  // Starts reads until so many are under way, as far as there are turns and items; waits for a turn if it may and no
  // read is under way. An item is chosen at its turn: so storage is asked for them in the plan's order, however many
  // threads there are.
  absl::Status StartReads(ItemReader& reader, int most, bool may_wait) {
    while (reader.under_way() < static_cast<size_t>(most)) {
      if (!TakeTurn(may_wait && reader.under_way() == 0)) break;
      const size_t next = stop_ ? reads_.items().size() : next_item_++;
      if (next >= reads_.items().size()) {
        gate_.Leave(0);
        break;
      }
      RETURN_IF_ERROR(reader.Start(reads_.items()[next]));
    }
    return absl::OkStatus();
  }

  bool TakeTurn(bool may_wait) {
    if (!may_wait) return gate_.TryEnter();
    gate_.Enter();
    return true;
  }

  absl::Status Store(const ReadItem& item, std::span<const std::byte> bytes) {
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

  FileSystem& file_system_;
  Destinations destinations_;  // different threads fill different bytes
  const ShardFiles files_;
  const LoadOptions options_;
  const ReadPlan reads_;
  HeapBuffers heap_;
  BufferSource& buffers_;
  const Tuning tuning_;
  BufferPool pool_;
  ReadGate gate_;  // to storage

  std::atomic<size_t> next_item_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> lacks_queues_{false};  // some thread has none, though there should be
  std::atomic<int64_t> done_bytes_{0};

  Mutex mutex_;
  CondVar ended_;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // readers that have not ended
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreparedLoad>> PreparedLoad::Create(const LoadSource& source,
                                                                   const LoadOptions& options) {
  ASSIGN_OR_RETURN(ShardFiles files, OpenFiles(source));
  Circumstances circumstances = {.is_on_storage = AnyIsOnStorage(files)};
  ASSIGN_OR_RETURN(circumstances.has_queue, HasQueue(source.file_system, options.read_method));
  return std::make_unique<NodeLoad>(source, std::move(files), options, circumstances);
}

absl::StatusOr<NodeDigests> LoadNode(const LoadSource& source, Destinations destinations, const LoadOptions& options,
                                     const LoadProgressCallback& progress) {
  ASSIGN_OR_RETURN(const auto load, PreparedLoad::Create(source, options));
  return load->Run(destinations, progress);
}

}  // namespace weightbroker
