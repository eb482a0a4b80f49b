// How fast the loader makes a checkpoint resident, beside what the machine allows: reading the same files with O_DIRECT
// and nothing else, and filling a memfd of the same size from a buffer in cache and nothing else. The loader does both
// at once, so the lower of the two is its ceiling.
//
//   load_bench [--json] [--folder F] [--bytes N] [--shards N] [--rounds N] [--loader PATH]
//
// Each ceiling is measured in the ways that are tried first, and the best is taken. Reading is measured twice: into
// ordinary buffers, as any program would (`ratio`), and into buffers on huge pages, which is what the loader uses and
// can be a good deal faster (`strict_ratio`). Samples are interleaved, each in a process of its own with the files
// evicted from the page cache (proven by mincore), so that a slow minute of the machine hits all alike.
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_checkpoint.h"
#include "bench/bench_support.h"
#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/identity/fingerprint.h"
#include "common/memory/host_slab.h"
#include "common/plan/plan.h"
#include "weightbroker/internal/v1/loader.pb.h"

extern char** environ;

namespace weightbroker::bench {
namespace {

namespace pb = ::weightbroker::internal::v1;

struct Flags {
  std::string folder = WEIGHTBROKER_BENCH_DATA "/load";
  std::string loader;
  BenchCheckpoint checkpoint;
  int rounds = 5;
  int loader_threads = 0;
  bool json = false;
  // Of one sample, in the child process that takes it.
  std::string sample;
  int threads = 1;
  int64_t chunk_bytes = 0;
  bool huge_buffers = false;
};

// How a ceiling is measured: whatever is best on this machine.
struct Method {
  std::string sample;
  int threads = 1;
  int64_t chunk_bytes = 0;
  bool huge_buffers = false;
};

// A buffer for each thread, touched before any time is taken.
class Buffers {
 public:
  explicit Buffers(const Flags& flags) {
    constexpr std::align_val_t kAlignment{kHugePageBytes};
    const auto size = static_cast<size_t>(flags.chunk_bytes);
    for (int i = 0; i < flags.threads; ++i) {
      auto* const buffer = static_cast<std::byte*>(::operator new(size, kAlignment));  // ends with the process
      madvise(buffer, size, flags.huge_buffers ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
      std::memset(buffer, 0x5A, size);
      buffers_.push_back(buffer);
    }
  }
  const std::vector<std::byte*>& all() const { return buffers_; }

 private:
  std::vector<std::byte*> buffers_;
};

// Runs `body(i, buffer)` for i in [0, count), with one thread for each buffer. Returns the first error.
absl::Status ForEachInParallel(int64_t count, const Buffers& buffers,
                               const std::function<absl::Status(int64_t, std::byte*)>& body) {
  std::atomic<int64_t> next{0};
  std::vector<absl::Status> results(buffers.all().size());
  std::vector<std::thread> workers;
  for (size_t w = 0; w < results.size(); ++w) {
    workers.emplace_back([&, w] {
      for (int64_t i = next++; i < count && results[w].ok(); i = next++) results[w] = body(i, buffers.all()[w]);
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

struct Run {
  int fd;
  int64_t offset_bytes;
};

// Reads every shard with O_DIRECT into small buffers.
absl::StatusOr<double> SampleRead(const Flags& flags) {
  std::vector<UniqueFd> files;
  std::vector<Run> runs;
  for (int64_t s = 0; s < flags.checkpoint.shard_count; ++s) {
    const std::string path = BenchShardPath(flags.folder, flags.checkpoint, s);
    files.emplace_back(open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    if (!files.back().valid()) return SystemError(absl::StrCat("open with O_DIRECT ", path), errno);
    const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
    for (int64_t at = 0; at < size; at += flags.chunk_bytes) runs.push_back({files.back().get(), at});
  }
  const Buffers buffers(flags);
  const double start = NowSeconds();
  const auto read_run = [&](int64_t i, std::byte* buffer) -> absl::Status {
    const Run& run = runs[static_cast<size_t>(i)];
    const ssize_t count = pread(run.fd, buffer, static_cast<size_t>(flags.chunk_bytes), run.offset_bytes);
    return count < 0 ? SystemError("pread", errno) : absl::OkStatus();
  };
  RETURN_IF_ERROR(ForEachInParallel(static_cast<int64_t>(runs.size()), buffers, read_run));
  return NowSeconds() - start;
}

// Fills a slab from a buffer in cache: the pages are allocated in one call for each chunk, then written.
absl::StatusOr<double> SampleFill(const Flags& flags) {
  const Buffers buffers(flags);
  const double start = NowSeconds();
  const int64_t size = flags.checkpoint.total_bytes;
  ASSIGN_OR_RETURN(HostSlab slab, HostSlab::Create(size));
  const int64_t chunks = (size + flags.chunk_bytes - 1) / flags.chunk_bytes;
  const auto fill_chunk = [&](int64_t i, std::byte* buffer) -> absl::Status {
    const int64_t at = i * flags.chunk_bytes;
    const int64_t length = std::min(flags.chunk_bytes, size - at);
    RETURN_IF_ERROR(slab.Populate(at, length));
    std::memcpy(slab.writable_bytes().data() + at, buffer, static_cast<size_t>(length));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(ForEachInParallel(chunks, buffers, fill_chunk));
  return NowSeconds() - start;
}

// The same with write(), for which the kernel need not clear the pages first.
absl::StatusOr<double> SampleWrite(const Flags& flags) {
  const Buffers buffers(flags);
  const double start = NowSeconds();
  const int64_t size = flags.checkpoint.total_bytes;
  const UniqueFd fd(memfd_create("bench", MFD_CLOEXEC));
  if (!fd.valid() || ftruncate(fd.get(), size) != 0) return SystemError("memfd_create", errno);
  const int64_t chunks = (size + flags.chunk_bytes - 1) / flags.chunk_bytes;
  const auto write_chunk = [&](int64_t i, std::byte* buffer) -> absl::Status {
    const int64_t at = i * flags.chunk_bytes;
    const auto length = static_cast<size_t>(std::min(flags.chunk_bytes, size - at));
    const ssize_t written = pwrite(fd.get(), buffer, length, at);
    return written == static_cast<ssize_t>(length) ? absl::OkStatus() : SystemError("pwrite", errno);
  };
  RETURN_IF_ERROR(ForEachInParallel(chunks, buffers, write_chunk));
  return NowSeconds() - start;
}

absl::StatusOr<pid_t> SpawnLoader(const std::string& path, int request_fd, int control_fd) {
  const std::string request_flag = absl::StrCat("--request_fd=", request_fd);
  const std::string control_flag = absl::StrCat("--control_fd=", control_fd);
  const char* const arguments[] = {path.c_str(), request_flag.c_str(), control_flag.c_str(), nullptr};
  pid_t child = -1;
  const int error = posix_spawn(&child, path.c_str(), nullptr, nullptr, const_cast<char* const*>(arguments), environ);
  if (error != 0) return SystemError(absl::StrCat("spawn ", path), error);
  return child;
}

// Without close-on-exec, for a child.
absl::StatusOr<UniqueFd> Inheritable(const UniqueFd& fd) {
  UniqueFd copy(dup(fd.get()));
  if (!copy.valid()) return SystemError("dup", errno);
  return copy;
}

// Plays the broker until the loader has handed over its slabs. The time runs from its start to then.
absl::StatusOr<double> TalkToLoader(const Flags& flags, const pb::LoadRequest& request) {
  const std::string bytes = request.SerializeAsString();
  ASSIGN_OR_RETURN(const UniqueFd memfd, CreateSealedMemfd("request", std::as_bytes(std::span(bytes))));
  ASSIGN_OR_RETURN(SocketPair pair, CreateSeqpacketPair());
  const double start = NowSeconds();
  pid_t child = -1;
  {
    ASSIGN_OR_RETURN(const UniqueFd request_fd, Inheritable(memfd));
    ASSIGN_OR_RETURN(const UniqueFd control_fd, Inheritable(pair.second));
    ASSIGN_OR_RETURN(child, SpawnLoader(flags.loader, request_fd.get(), control_fd.get()));
  }
  pair.second.reset();
  double seconds = 0;
  while (seconds == 0) {
    ASSIGN_OR_RETURN(const SocketMessage message, ReceiveMessage(pair.first.get()));
    pb::LoadEvent event;
    if (message.closed || !event.ParseFromString(message.bytes)) return absl::InternalError("the loader has died");
    if (event.has_failed()) return ParseRpcStatus(event.failed().SerializeAsString());
    if (event.has_sealed()) seconds = NowSeconds() - start;
    if (event.has_planned()) {
      pb::LoadCommand command;
      command.set_proceed(true);
      RETURN_IF_ERROR(SendMessage(pair.first.get(), command.SerializeAsString()));
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) return absl::InternalError(absl::StrCat("the loader ended with status ", status));
  return seconds;
}

absl::StatusOr<double> SampleLoad(const Flags& flags) {
  ASSIGN_OR_RETURN(const CheckpointIdentity identity, ReadCheckpointIdentity(RealFileSystem(), flags.folder));
  pb::LoadRequest request;
  ASSIGN_OR_RETURN(*request.mutable_spec(), CompleteSpec({}));
  ToProto(identity, &request);
  request.set_reader_threads(flags.loader_threads);
  pb::RankPlacement& rank = *request.add_ranks();
  rank.set_rank(0);
  rank.set_device("host");
  request.set_handle_kind(v1::HANDLE_KIND_HOST_MEMFD);
  // Reading the headers has put pages into the cache.
  for (int64_t s = 0; s < flags.checkpoint.shard_count; ++s) {
    RETURN_IF_ERROR(EvictFromPageCache(BenchShardPath(flags.folder, flags.checkpoint, s)));
  }
  return TalkToLoader(flags, request);
}

absl::StatusOr<double> TakeSample(const Flags& flags) {
  if (flags.sample == "read") return SampleRead(flags);
  if (flags.sample == "fill") return SampleFill(flags);
  if (flags.sample == "write") return SampleWrite(flags);
  if (flags.sample == "load") return SampleLoad(flags);
  return absl::InvalidArgumentError(absl::StrCat("no such sample: ", flags.sample));
}

// Takes one sample in a fresh process, with the shards evicted. Returns bytes a second.
absl::StatusOr<double> RateInFreshProcess(const Flags& flags, const Method& method) {
  for (int64_t s = 0; s < flags.checkpoint.shard_count; ++s) {
    RETURN_IF_ERROR(EvictFromPageCache(BenchShardPath(flags.folder, flags.checkpoint, s)));
  }
  const std::string command = absl::StrCat(
      "/proc/", getpid(), "/exe --sample=", method.sample, " --threads=", method.threads,
      " --chunk_bytes=", method.chunk_bytes, " --folder='", flags.folder, "' --bytes=", flags.checkpoint.total_bytes,
      " --shards=", flags.checkpoint.shard_count, " --tensors=", flags.checkpoint.tensor_count, " --loader='",
      flags.loader, "' --loader_threads=", flags.loader_threads);
  FILE* const pipe = popen(command.c_str(), "re");
  if (pipe == nullptr) return SystemError("popen", errno);
  double seconds = 0;
  const int fields = std::fscanf(pipe, "%lf", &seconds);
  const int status = pclose(pipe);
  if (status != 0 || fields != 1 || seconds <= 0) {
    return absl::InternalError(absl::StrCat("sample ", method.sample, " failed; its message stands above"));
  }
  return static_cast<double>(flags.checkpoint.total_bytes) / seconds;
}

// The fastest of `candidates`, by the better of two samples each.
absl::StatusOr<Method> Best(const Flags& flags, const std::vector<Method>& candidates) {
  Method best;
  double best_rate = 0;
  for (size_t i = 0; i < 2 * candidates.size(); ++i) {
    const Method& method = candidates[i % candidates.size()];
    ASSIGN_OR_RETURN(const double rate, RateInFreshProcess(flags, method));
    if (rate > best_rate) {
      best_rate = rate;
      best = method;
    }
  }
  return best;
}

nlohmann::json ToJson(const Method& method) {
  return {{"sample", method.sample},
          {"threads", method.threads},
          {"chunk_bytes", method.chunk_bytes},
          {"huge_buffers", method.huge_buffers}};
}

std::vector<Method> ReadMethods(bool huge_buffers) {
  constexpr int64_t kMiB = 1 << 20;
  std::vector<Method> methods;
  for (const int threads : {1, 2, 4, 8}) {
    for (const int64_t chunk_bytes : {4 * kMiB, 16 * kMiB})
      methods.push_back({"read", threads, chunk_bytes, huge_buffers});
  }
  return methods;
}

std::vector<Method> FillMethods() {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<Method> methods;
  for (const char* sample : {"fill", "write"}) {
    for (const int threads : {1, cores}) methods.push_back({sample, threads, 4 << 20, true});
  }
  return methods;
}

// A kind of sample, with its rates in bytes a second.
struct Series {
  const char* name;
  Method method;
  std::vector<double> rates = {};

  double Median() const { return Summarize(rates).median; }
};

absl::StatusOr<nlohmann::json> Measure(const Flags& flags) {
  RETURN_IF_ERROR(WriteBenchCheckpoint(flags.folder, flags.checkpoint));
  ASSIGN_OR_RETURN(Method read_method, Best(flags, ReadMethods(/*huge_buffers=*/false)));
  ASSIGN_OR_RETURN(Method huge_method, Best(flags, ReadMethods(/*huge_buffers=*/true)));
  ASSIGN_OR_RETURN(Method fill_method, Best(flags, FillMethods()));
  Series read{"read", read_method};
  Series read_huge{"read_huge_buffers", huge_method};
  Series fill{"fill", fill_method};
  Series load{"load", {"load"}};
  for (int round = 0; round < flags.rounds; ++round) {
    for (Series* series : {&read, &read_huge, &fill, &load}) {
      ASSIGN_OR_RETURN(const double rate, RateInFreshProcess(flags, series->method));
      series->rates.push_back(rate);
    }
  }
  nlohmann::json result = {
      {"bench", "load"},
      {"bytes", flags.checkpoint.total_bytes},
      {"shards", flags.checkpoint.shard_count},
      {"tensors", flags.checkpoint.tensor_count},
      {"rounds", flags.rounds},
      {"ratio", load.Median() / std::min(read.Median(), fill.Median())},
      {"strict_ratio", load.Median() / std::min(std::max(read.Median(), read_huge.Median()), fill.Median())},
      {"machine", DescribeMachine()}};
  for (const Series* series : {&read, &read_huge, &fill, &load}) {
    result[absl::StrCat(series->name, "_bytes_per_second")] = ToJson(Summarize(series->rates));
    result[absl::StrCat(series->name, "_method")] = ToJson(series->method);
  }
  return result;
}

void PrintTable(const nlohmann::json& result) {
  const auto line = [&](const char* label, const char* key) {
    const nlohmann::json& summary = result[key];
    std::printf("%-28s %7.3f GB/s   (%.3f to %.3f)\n", label, summary["median"].get<double>() / 1e9,
                summary["least"].get<double>() / 1e9, summary["greatest"].get<double>() / 1e9);
  };
  line("O_DIRECT reading alone", "read_bytes_per_second");
  line("the same, huge page buffers", "read_huge_buffers_bytes_per_second");
  line("memfd filling alone", "fill_bytes_per_second");
  line("weightbroker-loader", "load_bytes_per_second");
  std::printf("loader / lower of reading and filling        %.3f\n", result["ratio"].get<double>());
  std::printf("the same, reading with huge page buffers     %.3f\n", result["strict_ratio"].get<double>());
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "load_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

int Main(const Flags& flags) {
  if (!flags.sample.empty()) {
    const auto seconds = TakeSample(flags);
    if (!seconds.ok()) return Fail(seconds.status());
    std::printf("%.9f\n", *seconds);
    return 0;
  }
  const auto result = Measure(flags);
  if (!result.ok()) return Fail(result.status());
  if (flags.json) {
    std::cout << result->dump(2) << "\n";
  } else {
    PrintTable(*result);
  }
  return 0;
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  flags.loader = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "weightbroker-loader";
  CLI::App app("Measures the loader beside the disk's and the memory's own speed.");
  app.add_flag("--json", flags.json, "Print JSON");
  app.add_option("--folder", flags.folder, "Where the checkpoint is written, and left for the next run");
  app.add_option("--bytes", flags.checkpoint.total_bytes, "Size of the checkpoint");
  app.add_option("--shards", flags.checkpoint.shard_count, "Number of its files");
  app.add_option("--tensors", flags.checkpoint.tensor_count, "Number of its tensors");
  app.add_option("--rounds", flags.rounds, "Samples of each kind");
  app.add_option("--loader", flags.loader, "The loader program");
  app.add_option("--loader_threads", flags.loader_threads, "Its reader threads; 0 lets it choose");
  app.add_option("--sample", flags.sample)->group("");  // the rest is for the processes that take one sample
  app.add_option("--threads", flags.threads)->group("");
  app.add_option("--chunk_bytes", flags.chunk_bytes)->group("");
  app.add_flag("--huge_buffers", flags.huge_buffers)->group("");
  CLI11_PARSE(app, argc, argv);
  return weightbroker::bench::Main(flags);
}
