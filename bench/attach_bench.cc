// How long an engine waits for its weights' addresses: attaching to the service, beside mapping and beside reading the
// same safetensors files in the same run; and the first touch of every page apart.
//
//   attach_bench [--json] [--folder F] [--bytes N] [--tensors N] [--shards N] [--rounds N] [--bin_dir D]
//
// Each sample is taken in a process of its own, and the arms are interleaved, so that a slow minute of the machine hits
// all alike. The files are in the page cache, which is what mapping and reading them would like best. Attaching is
// timed from a connected channel to every tensor's address; mapping and reading from before open() to the same.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/bench_checkpoint.h"
#include "bench/bench_support.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/status_macros.h"
#include "common/base/unique_fd.h"
#include "common/checkpoint/safetensors.h"
#include "common/process/spawn.h"
#include "weightbroker/client.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace weightbroker::bench {
namespace {

struct Flags {
  std::string folder = WEIGHTBROKER_BENCH_DATA "/attach";
  std::string bin_dir = WEIGHTBROKER_BIN_DIR;
  BenchCheckpoint checkpoint{.total_bytes = int64_t{2} << 30, .tensor_count = 6000, .shard_count = 2};
  int rounds = 15;
  bool json = false;
  // Of one sample, in the process that takes it.
  std::string sample;
  std::string socket;
};

// What one sample measures, in seconds by name.
using Times = std::map<std::string, double>;

// A stretch of memory that holds weights.
struct Range {
  const std::byte* data = nullptr;
  size_t size = 0;
};

void TouchEveryPage(const std::vector<Range>& ranges) {
  constexpr size_t kPageBytes = 4096;
  for (const Range& range : ranges) {
    for (size_t i = 0; i < range.size; i += kPageBytes) {
      [[maybe_unused]] const volatile std::byte byte = *static_cast<const volatile std::byte*>(range.data + i);
    }
  }
}

void Populate(const std::vector<Range>& ranges) {
  constexpr uintptr_t kPageMask = ~uintptr_t{4095};
  for (const Range& range : ranges) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(range.data) & kPageMask;
    const uintptr_t end = reinterpret_cast<uintptr_t>(range.data) + range.size;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
  }
}

// Measures how long the first touch takes, the way the sample's name asks for: plain, or by one system call a range.
void MeasureFirstTouch(const std::string& sample, const std::vector<Range>& ranges, Times* times) {
  const double start = NowSeconds();
  if (sample.find("_populate") != std::string::npos) {
    Populate(ranges);
    (*times)["populate"] = NowSeconds() - start;
  } else {
    TouchEveryPage(ranges);
    (*times)["touch"] = NowSeconds() - start;
  }
}

absl::Status ToAbsl(const Status& status) {
  return status.ok() ? absl::OkStatus() : MakeError(Reason::kSystemError, status.ToString());
}

// One mapping that holds all tensors of an attached shard, from the first to the last.
Range Enclose(const std::vector<Tensor>& tensors) {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  for (const Tensor& tensor : tensors) {
    if (tensor.size_bytes == 0) continue;
    if (begin == nullptr || tensor.data < begin) begin = tensor.data;
    if (tensor.data + tensor.size_bytes > end) end = tensor.data + tensor.size_bytes;
  }
  return {begin, static_cast<size_t>(end - begin)};
}

absl::StatusOr<Times> SampleAttach(const Flags& flags) {
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = flags.socket;
  const Result<Client> client = Client::Create(options);
  if (!client.ok()) return ToAbsl(client.status());
  RETURN_IF_ERROR(ToAbsl(client->WaitUntilConnected(std::chrono::seconds(10))));
  WeightSpec spec;
  spec.model = flags.folder;
  AttachOptions attach;
  attach.fallback = Fallback::kFail;

  Times times;
  const double start = NowSeconds();
  const auto weights = client->Attach(spec, attach);
  times["addresses"] = NowSeconds() - start;
  if (!weights.ok()) return ToAbsl(weights.status());
  if (static_cast<int64_t>(weights->tensors().size()) != flags.checkpoint.tensor_count) {
    return MakeError(Reason::kProtocolError, "another number of tensors than was written");
  }
  MeasureFirstTouch(flags.sample, {Enclose(weights->tensors())}, &times);
  return times;
}

// Where each tensor of one file lies, once the file's bytes lie at `data`.
absl::StatusOr<std::vector<const std::byte*>> FindTensors(const std::string& path, const std::byte* data) {
  ASSIGN_OR_RETURN(const std::unique_ptr<File> file, RealFileSystem().Open(path, ReadMode::kBuffered));
  ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(*file, path));
  std::vector<const std::byte*> addresses;
  for (const SafetensorsTensor& tensor : header.tensors) {
    addresses.push_back(data + header.data_offset_bytes + tensor.begin_bytes);
  }
  return addresses;
}

absl::StatusOr<Range> MapFile(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return SystemError(path, errno);
  const size_t size = std::filesystem::file_size(path);
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return SystemError(path, errno);
  return Range{static_cast<const std::byte*>(data), size};
}

absl::StatusOr<Range> ReadFile(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return SystemError(path, errno);
  const size_t size = std::filesystem::file_size(path);
  auto* data = static_cast<std::byte*>(malloc(size));  // not zeroed; the process ends before it would be freed
  for (size_t done = 0; done < size;) {
    const ssize_t count = read(fd.get(), data + done, size - done);
    if (count <= 0) return SystemError(path, count < 0 ? errno : EIO);
    done += static_cast<size_t>(count);
  }
  return Range{data, size};
}

absl::StatusOr<Times> SampleFiles(const Flags& flags, absl::StatusOr<Range> (*bring)(const std::string&)) {
  Times times;
  std::vector<Range> ranges;
  size_t tensor_count = 0;
  const double start = NowSeconds();
  for (int64_t i = 0; i < flags.checkpoint.shard_count; ++i) {
    const std::string path = BenchShardPath(flags.folder, flags.checkpoint, i);
    ASSIGN_OR_RETURN(const Range range, bring(path));
    ranges.push_back(range);
    ASSIGN_OR_RETURN(const auto addresses, FindTensors(path, range.data));
    tensor_count += addresses.size();
  }
  times["addresses"] = NowSeconds() - start;
  if (static_cast<int64_t>(tensor_count) != flags.checkpoint.tensor_count) {
    return MakeError(Reason::kProtocolError, "another number of tensors than was written");
  }
  MeasureFirstTouch(flags.sample, ranges, &times);
  return times;
}

absl::StatusOr<Times> TakeSample(const Flags& flags) {
  if (flags.sample.rfind("attach", 0) == 0) return SampleAttach(flags);
  if (flags.sample.rfind("mmap", 0) == 0) return SampleFiles(flags, MapFile);
  if (flags.sample.rfind("read", 0) == 0) return SampleFiles(flags, ReadFile);
  return MakeError(Reason::kInvalidArgument, absl::StrCat("unknown sample ", flags.sample));
}

int PrintSample(const Flags& flags) {
  const absl::StatusOr<Times> times = TakeSample(flags);
  if (!times.ok()) {
    std::cerr << times.status().message() << "\n";
    return 1;
  }
  std::cout << nlohmann::json(*times).dump() << std::endl;
  return 0;
}

// The arms in the order in which each round takes them. Two ways of first touch need two processes.
constexpr const char* kArms[] = {"attach_touch", "mmap_touch", "read_touch", "attach_populate", "mmap_populate"};

class Bench {
 public:
  explicit Bench(const Flags& flags)
      : flags_(flags), socket_(flags.folder + ".socket"), output_(flags.folder + ".out") {}

  absl::StatusOr<nlohmann::json> Run() {
    RETURN_IF_ERROR(WriteBenchCheckpoint(flags_.folder, flags_.checkpoint));
    ASSIGN_OR_RETURN(const ChildProcess service, StartService());
    ASSIGN_OR_RETURN(const Result<MappedWeights> held, MakeResident());
    for (const char* arm : kArms) RETURN_IF_ERROR(TakeOne(arm));  // warms the page cache
    series_.clear();
    for (int round = 0; round < flags_.rounds; ++round) {
      for (const char* arm : kArms) RETURN_IF_ERROR(TakeOne(arm));
    }
    return Report();
  }

 private:
  absl::StatusOr<ChildProcess> StartService() {
    return Spawn({.path = flags_.bin_dir + "/weightbrokerd",
                  .arguments = {"--socket", socket_, "--model_roots", "bench=" + flags_.folder, "--metrics_address",
                                "127.0.0.1:0", "--log_level", "warning"}});
  }

  // The service's set stays resident without it; attached, it also shows that the sum of leases costs nothing.
  absl::StatusOr<Result<MappedWeights>> MakeResident() {
    ClientOptions options;
    options.mode = Mode::kClient;
    options.torch_version = "any";
    options.socket_path = socket_;
    const Result<Client> client = Client::Create(options);
    if (!client.ok()) return ToAbsl(client.status());
    RETURN_IF_ERROR(ToAbsl(client->WaitUntilConnected(std::chrono::seconds(30))));
    WeightSpec spec;
    spec.model = flags_.folder;
    AttachOptions attach;
    attach.fallback = Fallback::kFail;
    attach.register_if_missing = true;
    Result<MappedWeights> weights = client->Attach(spec, attach);
    if (!weights.ok()) return ToAbsl(weights.status());
    return weights;
  }

  absl::Status TakeOne(const std::string& arm) {
    const UniqueFd output(open(output_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    ASSIGN_OR_RETURN(ChildProcess child,
                     Spawn({.path = "/proc/self/exe",
                            .arguments = {"--sample", arm, "--socket", socket_, "--folder", flags_.folder, "--tensors",
                                          absl::StrCat(flags_.checkpoint.tensor_count), "--shards",
                                          absl::StrCat(flags_.checkpoint.shard_count), "--bytes",
                                          absl::StrCat(flags_.checkpoint.total_bytes)},
                            .fds = {{output.get(), 1}}}));
    ASSIGN_OR_RETURN(const ExitStatus exit, child.Wait());
    if (!exit.success()) return MakeError(Reason::kSystemError, absl::StrCat("sample ", arm, ": ", exit.ToString()));
    std::ifstream file(output_);
    const nlohmann::json times = nlohmann::json::parse(file);
    const std::string how = arm.substr(0, arm.find('_'));
    for (const auto& [name, seconds] : times.items()) series_[how][name].push_back(seconds.get<double>());
    return absl::OkStatus();
  }

  nlohmann::json Report() const {
    nlohmann::json report = {{"benchmark", "attach"},
                             {"tensors", flags_.checkpoint.tensor_count},
                             {"bytes", flags_.checkpoint.total_bytes},
                             {"files", flags_.checkpoint.shard_count},
                             {"rounds", flags_.rounds},
                             {"page_cache", "warm"},
                             {"machine", DescribeMachine()}};
    for (const auto& [how, times] : series_) {
      for (const auto& [name, samples] : times) {
        report["seconds"][how][name] = ToJson(Summarize(samples));
      }
    }
    return report;
  }

  const Flags& flags_;
  const std::string socket_;
  const std::string output_;
  std::map<std::string, std::map<std::string, std::vector<double>>> series_;  // "attach" -> "addresses" -> seconds
};

void PrintTable(const nlohmann::json& report) {
  printf("%-8s %-10s %12s %12s %12s\n", "how", "what", "p50 ms", "p90 ms", "least ms");
  for (const auto& [how, times] : report["seconds"].items()) {
    for (const auto& [name, summary] : times.items()) {
      printf("%-8s %-10s %12.3f %12.3f %12.3f\n", how.c_str(), name.c_str(), summary["median"].get<double>() * 1e3,
             summary["p90"].get<double>() * 1e3, summary["least"].get<double>() * 1e3);
    }
  }
}

int RunBench(const Flags& flags) {
  const absl::StatusOr<nlohmann::json> report = Bench(flags).Run();
  if (!report.ok()) {
    std::cerr << report.status().message() << "\n";
    return 1;
  }
  if (flags.json) {
    std::cout << report->dump(2) << "\n";
  } else {
    PrintTable(*report);
  }
  return 0;
}

}  // namespace
}  // namespace weightbroker::bench

int main(int argc, char** argv) {
  weightbroker::bench::Flags flags;
  CLI::App app("Measures attaching to a resident weight set beside mapping and reading the same files.");
  app.add_option("--folder", flags.folder, "Where the model is, or is to be written");
  app.add_option("--bin_dir", flags.bin_dir, "Where weightbrokerd is");
  app.add_option("--bytes", flags.checkpoint.total_bytes, "Of all tensors together");
  app.add_option("--tensors", flags.checkpoint.tensor_count, "How many");
  app.add_option("--shards", flags.checkpoint.shard_count, "How many files");
  app.add_option("--rounds", flags.rounds, "Samples of each arm");
  app.add_flag("--json", flags.json, "Print JSON with every sample instead of a table");
  app.add_option("--sample", flags.sample, "Take one sample only")->group("");
  app.add_option("--socket", flags.socket, "Of the service, for a sample")->group("");
  CLI11_PARSE(app, argc, argv);
  return flags.sample.empty() ? weightbroker::bench::RunBench(flags) : weightbroker::bench::PrintSample(flags);
}
