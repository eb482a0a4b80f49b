#include "server/broker/load_manager.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "server/broker/load_planner.h"

namespace weightbroker {
namespace {

// For reading headers; whoever asks waits, and so does a worker.
constexpr std::chrono::minutes kPlanTimeout(1);

absl::Status ShuttingDown() {
  return MakeError(Reason::kDraining, "the service is shutting down; register again when it is back");
}

internal::v1::LoadRequest MakeRequest(const WeightSetEntry& set, const LoadManagerOptions& options) {
  internal::v1::LoadRequest request;
  ToProto(set.identity(), &request);
  *request.mutable_spec() = set.spec();
  request.set_fingerprint(set.fingerprint().hash);
  request.set_reader_threads(options.reading.reader_threads);
  request.set_reads_per_thread(options.reading.reads_per_thread);
  request.set_chunk_bytes(options.reading.chunk_bytes);
  request.set_read_method(options.reading.method);
  request.mutable_architectures()->insert(options.architectures.begin(), options.architectures.end());
  for (const RankPlacement& placed : set.placement().ranks) {
    internal::v1::RankPlacement& rank = *request.add_ranks();
    rank.set_rank(placed.rank);
    rank.set_device(placed.device);
  }
  request.set_handle_kind(set.placement().handle_kind);
  return request;
}

void LogEnd(const Registry& registry, const WeightSetRef& set, const absl::Status& result) {
  if (!result.ok()) {
    Log(LogLevel::kError, "load.failed",
        {{"fingerprint", set->fingerprint().hash},
         {"model", set->spec().model()},
         {"reason", GetErrorDetails(result).reason},
         {"message", std::string(result.message())}});
    return;
  }
  const v1::WeightSet described = registry.Describe(set);
  LogFields fields = DescribeForLog(described);
  fields.emplace_back("read_bytes", absl::StrCat(described.read_bytes()));
  fields.emplace_back("seconds", absl::StrCat(described.load_seconds()));
  Log(LogLevel::kInfo, "load.resident", fields);
}

}  // namespace

LoadManager::LoadManager(LoadManagerOptions options) : options_(std::move(options)) {}

LoadManager::~LoadManager() { Shutdown(); }

absl::StatusOr<WeightSetRef> LoadManager::Load(NewWeightSet request) { return Begin(std::move(request), 1); }

absl::StatusOr<WeightSetRef> LoadManager::Resume(Adoption::Load load) {
  const std::string fingerprint = load.request.fingerprint.hash;
  absl::StatusOr<WeightSetRef> set;
  if (load.attempt >= options_.max_attempts) {
    set = MakeError(Reason::kLoaderFailed,
                    absl::StrCat(load.attempt,
                                 " brokers have ended while they ran this load: it is given up; see their "
                                 "log lines, and register again"),
                    {{"attempts", absl::StrCat(load.attempt)}});
  } else {
    set = Begin(std::move(load.request), load.attempt + 1);
  }
  if (!set.ok()) options_.vault->ForgetLoad(fingerprint).IgnoreError();
  return set;
}

absl::StatusOr<WeightSetRef> LoadManager::Begin(NewWeightSet request, int32_t attempt) {
  JoinFinished();
  RETURN_IF_ERROR(CheckRoom(request.fingerprint.hash));
  ASSIGN_OR_RETURN(const Registry::Begun begun, options_.registry->Begin(request));
  if (!begun.is_new) return begun.set;
  auto running = std::make_shared<Running>();
  running->set = begun.set;
  running->request = MakeRequest(*begun.set, options_);
  // Before anybody is told that it is under way.
  absl::Status started = options_.vault->KeepLoad(request, attempt);
  if (started.ok()) started = Start(running);
  if (!started.ok()) {
    ForgetLoad(running, started);
    options_.registry->Fail(begun.set, started);
    return started;
  }
  Log(LogLevel::kInfo, "load.started",
      {{"fingerprint", begun.set->fingerprint().hash},
       {"model", begun.set->spec().model()},
       {"attempt", absl::StrCat(attempt)}});
  return begun.set;
}

absl::StatusOr<MemoryPlan> LoadManager::Plan(const NewWeightSet& request) const {
  return PlanLoad(*options_.registry, *options_.spawner, MakeRequest(WeightSetEntry(request), options_), kPlanTimeout);
}

absl::Status LoadManager::CheckRoom(const std::string& fingerprint) {
  const WeightSetRef known = options_.registry->Find(fingerprint);
  const bool joins = known != nullptr && options_.registry->View(known).state != v1::WEIGHT_SET_STATE_FAILED;
  MutexLock lock(mutex_);
  if (shut_down_) return ShuttingDown();
  const int limit = options_.max_concurrent_loads + options_.max_waiting_loads;
  if (joins || static_cast<int>(running_.size()) < limit) return absl::OkStatus();
  return MakeError(
      Reason::kTooManyRequests,
      absl::StrCat(running_.size(), " loads are under way or wait, the most that there may be: try again later"),
      {{"limit", absl::StrCat(limit)}});
}

absl::Status LoadManager::Start(const RunningRef& running) {
  MutexLock lock(mutex_);
  if (shut_down_) return ShuttingDown();
  ASSIGN_OR_RETURN(running->thread, StartThread("a load", [this, running] { Follow(running); }));
  running_.push_back(running);
  return absl::OkStatus();
}

void LoadManager::Follow(const RunningRef& running) {
  absl::Status result = WaitForTurn(running);
  if (result.ok()) result = RunLoader(running);
  ForgetLoad(running, result);
  if (!result.ok()) options_.registry->Fail(running->set, result);
  LogEnd(*options_.registry, running->set, result);
  if (options_.on_finished) options_.on_finished(running->set, result);
  MutexLock lock(mutex_);
  running->finished = true;
  if (running->loading) --loading_;
  changed_.NotifyAll();
}

// Before anybody is told that it has ended: the next broker must not start it again then. A load that ends because this
// broker does is the next one's.
void LoadManager::ForgetLoad(const RunningRef& running, const absl::Status& result) {
  if (HasReason(result, Reason::kDraining)) return;
  const std::string& fingerprint = running->set->fingerprint().hash;
  const absl::Status forgotten = options_.vault->ForgetLoad(fingerprint);
  if (forgotten.ok()) return;
  Log(LogLevel::kWarning, "load.not_forgotten",
      {{"fingerprint", fingerprint}, {"message", std::string(forgotten.message())}});
}

absl::Status LoadManager::WaitForTurn(const RunningRef& running) {
  while (true) {
    {
      MutexLock lock(mutex_);
      RETURN_IF_ERROR(running->cancelled);
      if (loading_ < options_.max_concurrent_loads) {
        ++loading_;
        running->loading = true;
        return absl::OkStatus();
      }
      changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + options_.heartbeat);
    }
    options_.registry->ReportAlive(running->set);
  }
}

// Spawns from the load's own thread, which lives as long as the loader: a child that asks to die with its parent dies
// with the thread that started it.
absl::Status LoadManager::RunLoader(const RunningRef& running) {
  ASSIGN_OR_RETURN(SpawnedLoader loader, options_.spawner->Spawn(running->request));
  const auto session = std::make_shared<LoadSession>(options_.registry, running->set, std::move(loader),
                                                     options_.heartbeat, options_.stall_timeout, options_.check_gpu_fd);
  {
    MutexLock lock(mutex_);
    if (!running->cancelled.ok()) session->Cancel(running->cancelled);
    running->session = session;
  }
  const absl::Status result = session->Run();
  if (result.ok()) ReportDegraded(*running->set, session->report());
  if (result.ok() && options_.on_report) options_.on_report(session->report());
  MutexLock lock(mutex_);
  running->session = nullptr;
  return result;
}

// The loader's own log has the details.
void LoadManager::ReportDegraded(const WeightSetEntry& set, const internal::v1::LoadReport& report) const {
  if (!options_.on_degraded) return;
  // To a GPU many threads read, and pread loses little: 0.93 of a disk's speed, where io_uring has all of it.
  const bool is_slower =
      set.placement().handle_kind == v1::HANDLE_KIND_HOST_MEMFD || options_.reading.reads_per_thread > 1;
  if (is_slower && report.read_method() == "pread" && options_.reading.method.empty()) {
    options_.on_degraded("no_io_uring");
  }
  if (report.unpinned_bytes() > 0) options_.on_degraded("not_pinned");
}

void LoadManager::RequestCancel(const RunningRef& running, const absl::Status& cause) {
  if (running->cancelled.ok()) running->cancelled = cause;
  changed_.NotifyAll();
  if (running->session != nullptr) running->session->Cancel(cause);
}

void LoadManager::Cancel(const WeightSetRef& set, const absl::Status& cause) {
  {
    MutexLock lock(mutex_);
    const auto it =
        std::find_if(running_.begin(), running_.end(), [&](const RunningRef& running) { return running->set == set; });
    if (it == running_.end()) return;
    const RunningRef running = *it;
    RequestCancel(running, cause);
    while (!running->finished) changed_.Wait(mutex_);
  }
  JoinFinished();
}

void LoadManager::Shutdown() {
  {
    MutexLock lock(mutex_);
    shut_down_ = true;
    for (const RunningRef& running : running_) RequestCancel(running, ShuttingDown());
    while (
        !std::all_of(running_.begin(), running_.end(), [](const RunningRef& running) { return running->finished; })) {
      changed_.Wait(mutex_);
    }
  }
  JoinFinished();
}

void LoadManager::JoinFinished() {
  std::list<RunningRef> finished;
  {
    MutexLock lock(mutex_);
    for (auto it = running_.begin(); it != running_.end();) {
      const auto next = std::next(it);
      if ((*it)->finished) finished.splice(finished.end(), running_, it);
      it = next;
    }
  }
  for (const RunningRef& running : finished) running->thread.join();
}

}  // namespace weightbroker
