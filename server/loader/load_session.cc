#include "server/loader/load_session.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/read_fd.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/plan/architecture.h"
#include "common/plan/manifest.h"
#include "common/quant/gate.h"
#include "server/loader/hand_over.h"
#include "server/loader/load_memory.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;

constexpr int64_t kMaxRequestBytes = 256 << 20;
constexpr int64_t kMaxChunkBytes = 256 << 20;

constexpr std::pair<std::string_view, ReadMethod> kReadMethods[] = {
    {"", ReadMethod::kAuto}, {"io_uring", ReadMethod::kIoUring}, {"pread", ReadMethod::kPread}};

// `options` with what the request says.
absl::StatusOr<LoadOptions> WithWishesOf(const pb::LoadRequest& request, LoadOptions options) {
  const auto method = std::find_if(std::begin(kReadMethods), std::end(kReadMethods),
                                   [&](const auto& known) { return known.first == request.read_method(); });
  const int64_t chunk = request.chunk_bytes();
  if (method == std::end(kReadMethods) || chunk % kDirectAlignmentBytes != 0 || chunk < 0 || chunk > kMaxChunkBytes ||
      (chunk > 0 && chunk < 2 * kDirectAlignmentBytes)) {
    return MakeError(Reason::kProtocolError, absl::StrCat("no way to read: method ", Quote(request.read_method()),
                                                          ", chunks of ", chunk, " bytes"));
  }
  if (method->second != ReadMethod::kAuto) options.read_method = method->second;
  if (chunk > 0) options.chunk_bytes = chunk;
  if (request.reader_threads() > 0) options.reader_threads = request.reader_threads();
  if (request.reads_per_thread() > 0) options.reads_per_thread = request.reads_per_thread();
  return options;
}

std::string MethodName(const LoadReport& report) {
  if (report.direct_bytes == 0) return "buffered";
  return report.read_method == ReadMethod::kIoUring ? "io_uring" : "pread";
}

int64_t Sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

// The checkpoint's files must be the request's, one by one: a file that appeared since then could change its meaning.
absl::Status CheckFilesAreThoseOf(const CheckpointIdentity& identity, const CheckpointFiles& files) {
  std::vector<std::string> found = files.side_names;
  found.push_back(files.config_name);
  if (!files.index_name.empty()) found.push_back(files.index_name);
  found.insert(found.end(), files.shard_names.begin(), files.shard_names.end());
  std::sort(found.begin(), found.end());
  std::vector<std::string> known;
  for (const FileIdentity& file : identity.files) known.push_back(file.name);
  std::sort(known.begin(), known.end());
  std::vector<std::string> differing;
  std::set_symmetric_difference(found.begin(), found.end(), known.begin(), known.end(), std::back_inserter(differing));
  if (differing.empty()) return absl::OkStatus();
  const bool is_new = std::binary_search(found.begin(), found.end(), differing.front());
  return MakeError(Reason::kCheckpointChanged,
                   absl::StrCat(Printable(differing.front()), ": the file ", is_new ? "was not" : "was only",
                                " part of the checkpoint when it was fingerprinted; register the model again"),
                   {{"file", Printable(differing.front())}, {"changed", is_new ? "new" : "gone"}});
}

std::vector<int32_t> RanksOf(const pb::LoadRequest& request) {
  std::vector<int32_t> ranks;
  for (const pb::RankPlacement& placed : request.ranks()) ranks.push_back(placed.rank());
  return ranks;
}

pb::LoadEvent DescribePlan(const NodePlan& plan) {
  pb::LoadEvent event;
  pb::LoadPlanned& planned = *event.mutable_planned();
  planned.set_read_bytes(plan.read_bytes);
  for (const ShardPlan& shard : plan.shards) {
    pb::PlannedShard& described = *planned.add_shards();
    described.set_rank(shard.rank);
    described.set_slab_bytes(Sum(shard.slab_bytes));
    described.set_tensor_count(static_cast<int64_t>(shard.tensors.size()));
    planned.set_slab_bytes(planned.slab_bytes() + described.slab_bytes());
    planned.set_tensor_count(planned.tensor_count() + described.tensor_count());
  }
  return event;
}

class Session {
 public:
  Session(FileSystem& file_system, const pb::LoadRequest& request, int control_fd, const LoadOptions& options,
          const std::function<void()>& before_hand_over, const CudaOpener& open_cuda)
      : file_system_(file_system),
        request_(request),
        identity_(FromProto(request)),
        control_fd_(control_fd),
        options_(options),
        before_hand_over_(before_hand_over),
        open_cuda_(open_cuda) {
    report_.set_started_ns(SteadyNanoseconds());
  }

  absl::Status Run() {
    RETURN_IF_ERROR(Plan());
    report_.set_planned_ns(SteadyNanoseconds());
    RETURN_IF_ERROR(AskToProceed());
    RETURN_IF_ERROR(Allocate());
    RETURN_IF_ERROR(Load());
    RETURN_IF_ERROR(Verify());
    RETURN_IF_ERROR(FinishAndHandOver());
    if (!memory_->needs_exporter()) return absl::OkStatus();
    memory_->FreeWorkingMemory();
    WaitForTheEnd(control_fd_);
    return absl::OkStatus();
  }

  void Report(const absl::Status& error) {
    pb::LoadEvent event;
    event.mutable_failed()->ParseFromString(SerializeRpcStatus(error));
    // The broker may have gone; then it knows already.
    Send(event).IgnoreError();
  }

 private:
  absl::Status Plan() {
    ASSIGN_OR_RETURN(checkpoint_, OpenCheckpoint(file_system_, request_.spec().model()));
    ASSIGN_OR_RETURN(const Quantization quantization, CheckQuantization(checkpoint_));
    ASSIGN_OR_RETURN(const ArchitectureSet architectures,
                     ArchitectureSet::WithFiles({request_.architectures().begin(), request_.architectures().end()}));
    ASSIGN_OR_RETURN(plan_, PlanNode({.checkpoint = checkpoint_,
                                      .spec = request_.spec(),
                                      .quantization = quantization,
                                      .architectures = architectures,
                                      .ranks = RanksOf(request_),
                                      .max_slabs = IsForHost(request_) ? kMaxHostSlabs : 1}));
    RETURN_IF_ERROR(CheckFilesAreThoseOf(identity_, checkpoint_.files));
    return CheckUnchanged(file_system_, identity_);
  }

  absl::Status AskToProceed() {
    RETURN_IF_ERROR(Send(DescribePlan(plan_)));
    ASSIGN_OR_RETURN(const SocketMessage answer, ReceiveMessage(control_fd_));
    pb::LoadCommand command;
    if (answer.closed || !command.ParseFromString(answer.bytes) || !command.proceed()) {
      return MakeError(Reason::kCancelled, "the broker ended the load before any memory was taken");
    }
    return absl::OkStatus();
  }

  absl::Status Allocate() {
    memory_ = LoadMemory::Make(request_, open_cuda_);
    LoadOptions options = memory_->Tune(options_);
    options.report = &read_report_;
    ASSIGN_OR_RETURN(load_, PreparedLoad::Create({file_system_, checkpoint_, identity_, plan_}, options));
    const int64_t start_ns = SteadyNanoseconds();
    RETURN_IF_ERROR(memory_->Allocate(plan_, *load_));
    report_.set_allocated_ns(SteadyNanoseconds());
    report_.set_context_ns(memory_->contexts_ns());
    if (memory_->contexts_ns() > 0) report_.set_context_wait_ns(memory_->contexts_ns() - start_ns);
    return absl::OkStatus();
  }

  absl::Status Load() {
    RETURN_IF_ERROR(SendProgress(v1::WEIGHT_SET_STATE_LOADING, 0));
    ASSIGN_OR_RETURN(digests_, load_->Run(memory_->destinations(), [this](int64_t done_bytes) {
      return SendProgress(v1::WEIGHT_SET_STATE_LOADING, done_bytes);
    }));
    Describe(read_report_);
    return absl::OkStatus();
  }

  void Describe(const LoadReport& report) {
    report_.set_digested_ns(SteadyNanoseconds());
    report_.set_loaded_ns(report_.digested_ns() - report.digest_time.count());
    report_.set_peak_pinned_bytes(memory_->pinned_bytes());
    report_.set_unpinned_bytes(memory_->unpinned_bytes());
    report_.set_read_method(MethodName(report));
    report_.set_chunk_bytes(report.buffer_bytes);
    report_.set_reader_threads(report.reader_threads);
    report_.set_reads_per_thread(report.reads_per_thread);
    report_.set_storage_reads(report.storage_reads);
    report_.set_buffers_bytes(report.buffers_bytes);
    const double seconds = std::chrono::duration<double>(report.read_time).count();
    Log(LogLevel::kInfo, "load.read",
        {{"bytes", absl::StrCat(plan_.read_bytes)},
         {"seconds", absl::StrCat(seconds)},
         {"gb_per_second", absl::StrCat(static_cast<double>(plan_.read_bytes) / 1e9 / std::max(seconds, 1e-9))},
         {"method", report_.read_method()},
         {"past_page_cache_bytes", absl::StrCat(report.direct_bytes)},
         {"storage_reads", absl::StrCat(report.storage_reads)},
         {"threads", absl::StrCat(report.reader_threads)},
         {"reads_per_thread", absl::StrCat(report.reads_per_thread)},
         {"chunk_bytes", absl::StrCat(report.buffer_bytes)},
         {"pinned_bytes", absl::StrCat(memory_->pinned_bytes())}});
  }

  absl::Status Verify() {
    RETURN_IF_ERROR(SendProgress(v1::WEIGHT_SET_STATE_VERIFYING, plan_.read_bytes));
    return CheckUnchanged(file_system_, identity_);
  }

  // Everything is finished before the first shard is sent: a set of which a part cannot be is never half there.
  absl::Status FinishAndHandOver() {
    std::vector<std::vector<FinishedSlab>> finished;
    std::vector<std::string> manifests;
    for (size_t i = 0; i < plan_.shards.size(); ++i) {
      ASSIGN_OR_RETURN(finished.emplace_back(), memory_->Finish(i));
      ASSIGN_OR_RETURN(manifests.emplace_back(), SerializeManifest(plan_.shards[i], digests_[i]));
    }
    for (size_t i = 0; i < finished.size(); ++i) {
      const ShardPlan& shard = plan_.shards[i];
      if (i + 1 == finished.size()) before_hand_over_();
      RETURN_IF_ERROR(SendShard(control_fd_,
                                {.rank = shard.rank,
                                 .tensor_count = static_cast<int64_t>(shard.tensors.size()),
                                 .read_bytes = plan_.read_bytes,
                                 .report = &report_},
                                finished[i], manifests[i]));
    }
    return absl::OkStatus();
  }

  absl::Status SendProgress(v1::WeightSetState phase, int64_t done_bytes) {
    pb::LoadEvent event;
    event.mutable_progress()->set_phase(phase);
    event.mutable_progress()->set_done_bytes(done_bytes);
    return Send(event);
  }

  absl::Status Send(const pb::LoadEvent& event) { return SendMessage(control_fd_, event.SerializeAsString()); }

  FileSystem& file_system_;
  const pb::LoadRequest& request_;
  const CheckpointIdentity identity_;
  const int control_fd_;
  const LoadOptions options_;
  const std::function<void()>& before_hand_over_;
  const CudaOpener& open_cuda_;

  Checkpoint checkpoint_;
  NodePlan plan_;
  std::unique_ptr<LoadMemory> memory_;
  LoadReport read_report_;
  std::unique_ptr<PreparedLoad> load_;
  NodeDigests digests_;
  pb::LoadReport report_;
};

}  // namespace

absl::Status RunLoadSession(FileSystem& file_system, const pb::LoadRequest& request, int control_fd,
                            LoadOptions options, const std::function<void()>& before_hand_over,
                            const CudaOpener& open_cuda) {
  const auto wishes = WithWishesOf(request, options);
  Session session(file_system, request, control_fd, wishes.ok() ? *wishes : options, before_hand_over, open_cuda);
  absl::Status status = wishes.ok() ? session.Run() : wishes.status();
  if (!status.ok()) session.Report(status);
  return status;
}

absl::StatusOr<pb::LoadRequest> ReadLoadRequest(int request_fd) {
  struct stat status {};
  if (fstat(request_fd, &status) != 0) return SystemError("fstat of the request", errno);
  RETURN_IF_ERROR(CheckSealedMemfd(request_fd, status.st_size));
  if (status.st_size > kMaxRequestBytes) {
    return MakeError(Reason::kProtocolError, absl::StrCat("the request has ", status.st_size, " bytes, and at most ",
                                                          kMaxRequestBytes, " are allowed"));
  }
  const auto size_bytes = static_cast<size_t>(status.st_size);
  ASSIGN_OR_RETURN(const std::string bytes, ReadFd(request_fd, size_bytes, "read the request"));
  if (bytes.size() < size_bytes) return SystemError("read the request", EIO);
  pb::LoadRequest request;
  if (!request.ParseFromString(bytes)) return MakeError(Reason::kProtocolError, "the request is no LoadRequest");
  return request;
}

}  // namespace weightbroker
