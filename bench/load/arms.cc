#include "bench/load/arms.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "bench/bench_process.h"
#include "bench/bench_support.h"
#include "bench/load/loader_arm.h"
#include "bench/load/task.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

// What a rival's arm does, for people.
constexpr std::pair<const char*, const char*> kWhat[] = {
    {"safetensors_mapped", "load_file: views of the mapped files; no byte is the process's own"},
    {"safetensors_resident", "load_file, and a clone of each tensor: bytes of the process's own"},
    {"safetensors", "load_file of each file to the GPU"},
    {"safetensors_pread", "load_file of each file, told to read instead of mapping"},
    {"fastsafetensors", "SafeTensorsFileLoader of all files, with its defaults"},
    {"fastsafetensors_nogds", "SafeTensorsFileLoader of all files, without GPUDirect Storage"},
    {"fastsafetensors_buffered", "SafeTensorsFileLoader of all files, through the page cache"},
    {"instanttensor", "safe_open of all files, with its defaults"},
    {"instanttensor_buffered", "safe_open of all files, through the page cache"},
    {"runai_streamer", "SafetensorsStreamer of all files, with its defaults"},
    {"runai_streamer_buffered", "SafetensorsStreamer of all files, through the page cache"}};

// What reads past the page cache by itself, told not to: only where the files are in it. On a file system without
// storage loaders see that themselves.
bool SuitsState(const std::string& name, CacheState state) {
  return state == CacheState::kWarm || !absl::EndsWith(name, "_buffered");
}

// "name=value"; false if there is no such flag, or it cannot have that value.
bool SetFlag(const std::string& flag, LoaderTask* task) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(flag, absl::MaxSplits('=', 1));
  const auto& [name, value] = parts;
  const auto set = [&value = value](auto* to) { return absl::SimpleAtoi(value, to) && *to > 0; };
  if (name == "reader_threads") return set(&task->reader_threads);
  if (name == "reads_per_thread") return set(&task->reads_per_thread);
  if (name == "read_chunk") return set(&task->chunk_bytes);
  task->read_method = value;
  return name == "read_method" && (value == "io_uring" || value == "pread");
}

class Maker {
 public:
  Maker(const LoadSetup& setup, const ModelFolder& model, CacheState state, CheckpointIdentity identity)
      : setup_(setup),
        model_(model),
        state_(state),
        identity_(std::move(identity)),
        read_ceiling_(state == CacheState::kCold ? "read_direct" : "read_cached") {}

  absl::StatusOr<std::vector<Arm>> Run() {
    AddOurs("ours", "weightbroker-loader", 1, {});
    AddOurs("ours_io_uring", "the same, told to read with io_uring", 1, {.read_method = "io_uring"});
    AddOurs("ours_pread", "the same, told to read with pread", 1, {.read_method = "pread"});
    if (!setup_.quantization.empty()) {
      AddOurs(absl::StrCat("ours_", setup_.quantization), "the same, quantizing on the way", 1,
              {.quantization = setup_.quantization});
    }
    if (setup_.tensor_parallel > 1) {
      AddOurs(absl::StrCat("ours_tp", setup_.tensor_parallel), "the same, split over several devices",
              setup_.tensor_parallel, {});
    }
    for (const std::string& name : setup_.arms) {
      if (absl::StrContains(name, ':')) RETURN_IF_ERROR(AddTold(name));
    }
    AddPlainRead();
    for (const auto& [name, found] : setup_.probed.at("arms").items()) {
      if (found.contains("version") && SuitsState(name, state_)) AddRival(name, found.at("version"));
    }
    return Chosen();
  }

 private:
  void AddOurs(const std::string& name, const std::string& what, int ranks, LoaderTask task) {
    const bool is_host = setup_.gpus.empty();
    task.loader = setup_.loader;
    task.identity = identity_;
    task.devices.clear();
    for (int i = 0; i < ranks; ++i) task.devices.push_back(is_host ? "host" : setup_.gpus[static_cast<size_t>(i)]);
    arms_.push_back({.name = name,
                     .what = what,
                     .version = WEIGHTBROKER_VERSION,
                     .same_bytes = ranks == 1 && task.quantization.empty(),
                     .ceilings = {read_ceiling_, is_host      ? "fill"
                                                 : ranks == 1 ? "pinned_copy"
                                                              : "pinned_copy_all"},
                     .take = [task](bool verify) { return RunLoader(task, verify); }});
  }

  // "ours:reader_threads=8:read_chunk=1048576", or "ours_tp2:reader_threads=8": the loader with flags other than its
  // defaults.
  absl::Status AddTold(const std::string& name) {
    LoaderTask task;
    const std::vector<std::string> parts = absl::StrSplit(name, ':');
    const bool is_split = setup_.tensor_parallel > 1 && parts[0] == absl::StrCat("ours_tp", setup_.tensor_parallel);
    if (!is_split && parts[0] != "ours") {
      return MakeError(Reason::kInvalidArgument,
                       absl::StrCat("arm \"", name, "\": found \"", parts[0],
                                    "\" before its flags, allowed are ours and, with --tp N, ours_tpN"));
    }
    for (size_t i = 1; i < parts.size(); ++i) {
      if (SetFlag(parts[i], &task)) continue;
      return MakeError(Reason::kInvalidArgument,
                       absl::StrCat("arm \"", name, "\": found \"", parts[i],
                                    "\", allowed are reader_threads=N, reads_per_thread=N, read_chunk=BYTES, each at "
                                    "least 1, and read_method=io_uring|pread"));
    }
    AddOurs(name, "the same, with these flags", is_split ? setup_.tensor_parallel : 1, task);
    return absl::OkStatus();
  }

  void AddPlainRead() {
    arms_.push_back({.name = "read",
                     .what = "read() of each file into memory of its own, in host memory whatever the device",
                     .version = "",
                     .same_bytes = true,
                     .ceilings = {read_ceiling_},
                     .take = [this_model = model_](bool verify) { return TakePlainRead(this_model, verify); }});
  }

  static absl::StatusOr<Sample> TakePlainRead(const ModelFolder& model, bool verify) {
    const SocketFolder scratch;
    Task task{.kind = "plain_read", .files = model.files, .folder = model.path};
    if (verify) task.digests = scratch / "digests.json";
    task.started_at = NowSeconds();
    Sample sample;
    ASSIGN_OR_RETURN(sample.figures, RunTaskInFreshProcess(task));
    sample.load_seconds = sample.figures.at("load_seconds");
    sample.exec_seconds = sample.figures.at("exec_seconds");
    if (verify) {
      ASSIGN_OR_RETURN(sample.digests, ReadDigestsFile(task.digests));
    }
    return sample;
  }

  void AddRival(const std::string& name, const std::string& version) {
    const auto what = std::find_if(std::begin(kWhat), std::end(kWhat), [&](const auto& w) { return w.first == name; });
    arms_.push_back({.name = name,
                     .what = what == std::end(kWhat) ? "" : what->second,
                     .version = version,
                     .same_bytes = true,
                     .ceilings = {read_ceiling_, setup_.gpus.empty() ? "fill" : "pinned_copy"},
                     .take = [rivals = setup_.rivals, name, folder = model_.path](bool verify) {
                       return RunRival(rivals, name, folder, verify);
                     }});
  }

  // Those that are asked for; else all but two that only show how ours reads.
  absl::StatusOr<std::vector<Arm>> Chosen() {
    if (setup_.arms.empty()) {
      std::erase_if(arms_, [](const Arm& arm) { return arm.name == "ours_io_uring" || arm.name == "ours_pread"; });
      return std::move(arms_);
    }
    std::vector<Arm> chosen;
    for (const std::string& name : setup_.arms) {
      if (!SuitsState(name, state_)) continue;
      const auto found = std::find_if(arms_.begin(), arms_.end(), [&](const Arm& arm) { return arm.name == name; });
      if (found == arms_.end()) {
        return MakeError(Reason::kInvalidArgument,
                         absl::StrCat("there is no arm \"", name, "\" here; there are: ",
                                      absl::StrJoin(arms_, ", ", [](std::string* out, const Arm& arm) {
                                        absl::StrAppend(out, arm.name);
                                      })));
      }
      chosen.push_back(*found);
    }
    return chosen;
  }

  const LoadSetup& setup_;
  const ModelFolder& model_;
  const CacheState state_;
  const CheckpointIdentity identity_;
  const std::string read_ceiling_;
  std::vector<Arm> arms_;
};

}  // namespace

absl::StatusOr<std::vector<Arm>> MakeArms(const LoadSetup& setup, const ModelFolder& model, CacheState state) {
  ASSIGN_OR_RETURN(CheckpointIdentity identity, ReadCheckpointIdentity(RealFileSystem(), model.path));
  return Maker(setup, model, state, std::move(identity)).Run();
}

}  // namespace weightbroker::bench
