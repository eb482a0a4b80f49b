#include "bench/load/loader_arm.h"

#include <sys/mman.h>
#include <unistd.h>

#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/bench_support.h"
#include "bench/load/gpu_verify.h"
#include "bench/load/parallel.h"
#include "bench/load/usage.h"
#include "common/base/error.h"
#include "common/base/read_fd.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/memory/digest.h"
#include "common/memory/host_slab.h"
#include "common/plan/manifest.h"
#include "common/plan/plan.h"
#include "common/process/loader_program.h"
#include "weightbroker/internal/v1/loader.pb.h"

namespace weightbroker::bench {
namespace {

namespace pb = ::weightbroker::internal::v1;

constexpr double kNanosecond = 1e-9;

// One rank's result.
struct Shard {
  pb::LoadSealed sealed;
  std::vector<UniqueFd> slabs;
  UniqueFd manifest;
  std::vector<v1::Tensor> rows;
};

// When what happened, in seconds on the monotonic clock.
struct Moments {
  double exec = 0;
  double planned = 0;
  std::optional<double> allocated;  // the first progress, of no bytes
  double sealed = 0;
};

absl::StatusOr<pb::LoadRequest> RequestOf(const LoaderTask& task) {
  pb::LoadRequest request;
  v1::WeightSpec spec;
  spec.set_quantization(task.quantization);
  spec.set_tensor_parallel_size(static_cast<int32_t>(task.devices.size()));
  ASSIGN_OR_RETURN(*request.mutable_spec(), CompleteSpec(spec));
  ToProto(task.identity, &request);
  request.set_reader_threads(task.reader_threads);
  request.set_reads_per_thread(task.reads_per_thread);
  request.set_chunk_bytes(task.chunk_bytes);
  request.set_read_method(task.read_method);
  for (size_t i = 0; i < task.devices.size(); ++i) {
    pb::RankPlacement& rank = *request.add_ranks();
    rank.set_rank(static_cast<int32_t>(i));
    rank.set_device(task.devices[i]);
  }
  const bool is_host = task.devices.front() == "host";
  request.set_handle_kind(is_host ? v1::HANDLE_KIND_HOST_MEMFD : v1::HANDLE_KIND_CUDA_VMM_FD);
  return request;
}

absl::StatusOr<Shard> ReceiveShard(pb::LoadSealed sealed, std::vector<UniqueFd> fds) {
  if (fds.size() != static_cast<size_t>(sealed.slabs_size()) + 1) {
    return absl::InternalError("the loader has not sent a descriptor for each slab and the manifest");
  }
  ASSIGN_OR_RETURN(const std::string manifest,
                   ReadFd(fds.back().get(), static_cast<size_t>(sealed.manifest_bytes()), "reading the manifest"));
  ASSIGN_OR_RETURN(std::vector<v1::Tensor> rows, ParseManifest(manifest));
  UniqueFd manifest_fd = std::move(fds.back());
  fds.pop_back();
  return Shard{std::move(sealed), std::move(fds), std::move(manifest_fd), std::move(rows)};
}

// Plays the broker until every rank's slabs have been handed over.
class Conversation {
 public:
  Conversation(int socket, size_t ranks, Moments* moments) : socket_(socket), ranks_(ranks), moments_(*moments) {}

  absl::StatusOr<std::vector<Shard>> Run() {
    while (sealed_.size() < ranks_) RETURN_IF_ERROR(Follow());
    moments_.sealed = NowSeconds();
    std::vector<Shard> shards;
    for (auto& [sealed, fds] : sealed_) {
      ASSIGN_OR_RETURN(shards.emplace_back(), ReceiveShard(std::move(sealed), std::move(fds)));
    }
    return shards;
  }

 private:
  absl::Status Follow() {
    ASSIGN_OR_RETURN(SocketMessage message, ReceiveMessage(socket_));
    pb::LoadEvent event;
    if (message.closed || !event.ParseFromString(message.bytes)) return absl::InternalError("the loader has died");
    if (event.has_failed()) return ParseRpcStatus(event.failed().SerializeAsString());
    if (event.has_planned()) return Proceed();
    if (event.has_progress() && !moments_.allocated.has_value()) moments_.allocated = NowSeconds();
    if (event.has_sealed()) sealed_.emplace_back(event.sealed(), std::move(message.fds));
    return absl::OkStatus();
  }

  absl::Status Proceed() {
    moments_.planned = NowSeconds();
    pb::LoadCommand command;
    command.set_proceed(true);
    return SendMessage(socket_, command.SerializeAsString());
  }

  const int socket_;
  const size_t ranks_;
  Moments& moments_;
  std::vector<std::pair<pb::LoadSealed, std::vector<UniqueFd>>> sealed_;
};

struct Finished {
  Moments moments;
  std::vector<Shard> shards;
  Usage usage;
};

absl::StatusOr<Finished> Load(const LoaderTask& task) {
  ASSIGN_OR_RETURN(const pb::LoadRequest request, RequestOf(task));
  const std::string bytes = request.SerializeAsString();
  ASSIGN_OR_RETURN(const UniqueFd memfd, CreateSealedMemfd("request", std::as_bytes(std::span(bytes))));
  ASSIGN_OR_RETURN(SocketPair pair, CreateSeqpacketPair());
  const UniqueFd log(memfd_create("log", MFD_CLOEXEC));  // what goes wrong comes as an event
  SpawnOptions program = LoaderProgram(task.loader, memfd.get(), pair.second.get());
  program.fds.push_back({log.get(), STDERR_FILENO});
  Finished finished;
  finished.moments.exec = NowSeconds();
  ASSIGN_OR_RETURN(ChildProcess child, Spawn(program));
  pair.second.reset();
  ChildUsage watch(child.pid());
  ASSIGN_OR_RETURN(finished.shards, Conversation(pair.first.get(), task.devices.size(), &finished.moments).Run());
  finished.usage = watch.Finish();
  ASSIGN_OR_RETURN(const ExitStatus exit, child.Wait());
  if (!exit.success()) return absl::InternalError(absl::StrCat(task.loader, ": ", exit.ToString()));
  return finished;
}

nlohmann::ordered_json DescribeReport(const pb::LoadReport& report, double exec) {
  const auto since_exec = [&](int64_t moment_ns) { return static_cast<double>(moment_ns) * kNanosecond - exec; };
  return {{"started", since_exec(report.started_ns())},
          {"planned", since_exec(report.planned_ns())},
          {"context", report.context_ns() == 0 ? 0 : since_exec(report.context_ns())},
          {"context_wait", static_cast<double>(report.context_wait_ns()) * kNanosecond},
          {"allocated", since_exec(report.allocated_ns())},
          {"loaded", since_exec(report.loaded_ns())},
          {"digested", since_exec(report.digested_ns())}};
}

Sample Describe(const Finished& finished) {
  const Moments& moments = finished.moments;
  const pb::LoadSealed& first = finished.shards.front().sealed;
  Sample sample;
  sample.figures = finished.usage;
  sample.exec_seconds = moments.sealed - moments.exec;
  sample.figures["planned_seconds"] = moments.planned - moments.exec;
  sample.figures["read_bytes"] = first.read_bytes();
  int64_t handed_over = 0;
  for (const Shard& shard : finished.shards) {
    for (const v1::Slab& slab : shard.sealed.slabs()) handed_over += slab.size_bytes();
  }
  sample.figures["handed_over_bytes"] = handed_over;
  if (first.has_report()) {
    const pb::LoadReport& report = first.report();
    const double started = static_cast<double>(report.started_ns()) * kNanosecond;
    sample.load_seconds = moments.sealed - started - static_cast<double>(report.context_wait_ns()) * kNanosecond;
    sample.figures["load_clock"] = "report";
    sample.figures["seconds_since_exec"] = DescribeReport(report, moments.exec);
    sample.figures["peak_pinned_bytes"] = report.peak_pinned_bytes();
    sample.figures["read_method"] = report.read_method();
    sample.figures["chunk_bytes"] = report.chunk_bytes();
    sample.figures["reader_threads"] = report.reader_threads();
    sample.figures["storage_reads"] = report.storage_reads();
  } else {
    const double waiting = moments.allocated.value_or(moments.planned) - moments.planned;
    sample.load_seconds = sample.exec_seconds - waiting;
    sample.figures["load_clock"] = "events";
    sample.figures["context_and_allocation_seconds"] = waiting;
  }
  return sample;
}

// A slab of host memory, mapped.
class SlabMapping {
 public:
  static absl::StatusOr<SlabMapping> Map(int fd, int64_t size_bytes) {
    void* const data = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return SystemError("mapping a slab", errno);
    return SlabMapping(static_cast<const std::byte*>(data), static_cast<size_t>(size_bytes));
  }
  SlabMapping(SlabMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  SlabMapping& operator=(SlabMapping&&) = delete;
  ~SlabMapping() {
    if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  SlabMapping(const std::byte* data, size_t size) : bytes_(data, size) {}

  std::span<const std::byte> bytes_;
};

absl::Status VerifyHostShard(const Shard& shard) {
  std::vector<SlabMapping> slabs;
  for (size_t i = 0; i < shard.slabs.size(); ++i) {
    ASSIGN_OR_RETURN(SlabMapping slab,
                     SlabMapping::Map(shard.slabs[i].get(), shard.sealed.slabs(static_cast<int>(i)).size_bytes()));
    slabs.push_back(std::move(slab));
  }
  const Buffers none({.count = CoreCount(), .size_bytes = 1});
  return ForEachInParallel(
      static_cast<int64_t>(shard.rows.size()), none, [&](int64_t i, std::span<std::byte>) -> absl::Status {
        const v1::Tensor& row = shard.rows[static_cast<size_t>(i)];
        const auto bytes = slabs[static_cast<size_t>(row.slab())].bytes().subspan(
            static_cast<size_t>(row.offset_bytes()), static_cast<size_t>(row.size_bytes()));
        const Digest digest = ComputeDigest(bytes);
        if (row.digest() == std::string(reinterpret_cast<const char*>(digest.data()), digest.size())) {
          return absl::OkStatus();
        }
        return MakeError(Reason::kDigestMismatch,
                         absl::StrCat(row.name(), " in memory is not what its manifest says: ", DigestHex(digest)));
      });
}

absl::Status VerifyGpuShard(const Shard& shard, const std::string& device) {
  GpuShardView view{.device = device,
                    .manifest_fd = shard.manifest.get(),
                    .manifest_bytes = shard.sealed.manifest_bytes(),
                    .slabs = shard.slabs,
                    .slab_bytes = {}};
  for (const v1::Slab& slab : shard.sealed.slabs()) view.slab_bytes.push_back(slab.size_bytes());
  return VerifyInFreshProcess(view);
}

std::string HexOf(const std::string& bytes) {
  Digest digest{};
  std::copy_n(reinterpret_cast<const std::byte*>(bytes.data()), std::min(bytes.size(), digest.size()), digest.begin());
  return DigestHex(digest);
}

}  // namespace

absl::StatusOr<Sample> RunLoader(const LoaderTask& task, bool verify) {
  ASSIGN_OR_RETURN(const Finished finished, Load(task));
  Sample sample = Describe(finished);
  sample.figures["load_seconds"] = sample.load_seconds;
  sample.figures["exec_seconds"] = sample.exec_seconds;
  if (!verify) return sample;
  for (const Shard& shard : finished.shards) {
    const std::string& device = task.devices[static_cast<size_t>(shard.sealed.rank())];
    RETURN_IF_ERROR(device == "host" ? VerifyHostShard(shard) : VerifyGpuShard(shard, device));
  }
  if (task.devices.size() > 1 || !task.quantization.empty()) return sample;
  for (const v1::Tensor& row : finished.shards.front().rows) sample.digests[row.name()] = HexOf(row.digest());
  return sample;
}

}  // namespace weightbroker::bench
