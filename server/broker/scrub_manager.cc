#include "server/broker/scrub_manager.h"

#include <algorithm>
#include <optional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/thread.h"
#include "server/broker/quarantine.h"

namespace weightbroker {
namespace {

// Where a tensor lies, for people: "slab 0, bytes 4096 to 8191".
std::string DescribePlace(const v1::DamagedTensor& tensor) {
  return absl::StrCat("slab ", tensor.slab(), ", bytes ", tensor.offset_bytes(), " to ",
                      tensor.offset_bytes() + std::max<int64_t>(tensor.size_bytes(), 1) - 1);
}

std::string DescribeDamage(const v1::ScrubbedShard& shard) {
  const v1::DamagedTensor& first = shard.damaged(0);
  return absl::StrCat(
      "tensor ", Quote(first.name()), " (", DescribePlace(first), ") has the digest ",
      absl::BytesToHexString(first.found_digest()), " where its manifest says ",
      absl::BytesToHexString(first.expected_digest()),
      shard.damaged_size() > 1 ? absl::StrCat(", and ", shard.damaged_size() - 1, " others differ") : "");
}

void LogDamage(const v1::ScrubbedShard& shard) {
  for (const v1::DamagedTensor& tensor : shard.damaged()) {
    Log(LogLevel::kError, "integrity.damaged",
        {{"fingerprint", shard.fingerprint()},
         {"rank", absl::StrCat(shard.rank())},
         {"tensor", Printable(tensor.name())},
         {"slab", absl::StrCat(tensor.slab())},
         {"first_byte", absl::StrCat(tensor.offset_bytes())},
         {"bytes", absl::StrCat(tensor.size_bytes())},
         {"expected_digest", absl::BytesToHexString(tensor.expected_digest())},
         {"found_digest", absl::BytesToHexString(tensor.found_digest())}});
  }
}

void LogResult(const v1::ScrubbedShard& shard) {
  if (shard.result() == v1::ScrubbedShard::RESULT_NOT_CHECKED) {
    Log(LogLevel::kWarning, "scrub.not_checked",
        {{"fingerprint", shard.fingerprint()},
         {"rank", absl::StrCat(shard.rank())},
         {"reason", shard.failure().reason()},
         {"message", shard.failure().message()}});
    return;
  }
  LogDamage(shard);
  const bool intact = shard.result() == v1::ScrubbedShard::RESULT_INTACT;
  Log(intact ? LogLevel::kInfo : LogLevel::kError, intact ? "scrub.intact" : "scrub.damaged",
      {{"fingerprint", shard.fingerprint()},
       {"rank", absl::StrCat(shard.rank())},
       {"tensors", absl::StrCat(shard.tensor_count())},
       {"bytes", absl::StrCat(shard.checked_bytes())},
       {"seconds", absl::StrCat(shard.seconds())}});
}

}  // namespace

ScrubManager::ScrubManager(ScrubManagerOptions options) : options_(std::move(options)) {
  asked_ = StartThreadOrExit("scrubs", [this] { RunAsked(); });
  if (options_.interval.count() > 0) {
    schedule_ = StartThreadOrExit("scheduled scrubs", [this] { RunSchedule(); });
  }
}

ScrubManager::~ScrubManager() { Shutdown(); }

void ScrubManager::Shutdown() {
  std::deque<Job> dropped;
  {
    MutexLock lock(mutex_);
    shut_down_ = true;
    dropped = std::exchange(waiting_, {});
    for (const auto& run : running_) run->Cancel();
    changed_.NotifyAll();
  }
  if (asked_.joinable()) asked_.join();
  if (schedule_.joinable()) schedule_.join();
  for (const Job& job : dropped) {
    if (job.observer.on_done) job.observer.on_done();
  }
}

absl::Status ScrubManager::Scrub(std::vector<ShardRef> shards, int64_t bytes_per_second, ScrubObserver observer) {
  MutexLock lock(mutex_);
  if (shut_down_) return MakeError(Reason::kDraining, "the service is shutting down; scrub again when it is back");
  if (waiting_.size() >= options_.max_waiting) {
    return MakeError(Reason::kTooManyRequests,
                     absl::StrCat(waiting_.size(), " scrubs wait, the most that may: try again later"),
                     {{"limit", absl::StrCat(options_.max_waiting)}});
  }
  waiting_.push_back(
      {std::move(shards), bytes_per_second > 0 ? bytes_per_second : options_.bytes_per_second, std::move(observer)});
  changed_.NotifyAll();
  return absl::OkStatus();
}

bool ScrubManager::Report(const ShardRef& shard) {
  const auto now = std::chrono::steady_clock::now();
  const std::string key =
      absl::StrCat(shard.set->fingerprint().hash, "/", options_.registry->View(shard.set).generation, "/", shard.rank);
  {
    MutexLock lock(mutex_);
    std::erase_if(reported_, [&](const auto& entry) { return now - entry.second >= options_.report_interval; });
    if (!reported_.emplace(key, now).second) return false;
  }
  if (Scrub({shard}, 0, {}).ok()) return true;
  MutexLock lock(mutex_);
  reported_.erase(key);
  return false;
}

void ScrubManager::RunAsked() {
  while (true) {
    std::optional<Job> job;
    {
      MutexLock lock(mutex_);
      while (!shut_down_ && waiting_.empty()) changed_.Wait(mutex_);
      if (shut_down_) return;
      job = std::move(waiting_.front());
      waiting_.pop_front();
    }
    RunJob(*job);
  }
}

void ScrubManager::RunSchedule() {
  while (true) {
    {
      const auto next = std::chrono::steady_clock::now() + options_.interval;
      MutexLock lock(mutex_);
      while (!shut_down_ && std::chrono::steady_clock::now() < next) changed_.WaitUntil(mutex_, next);
      if (shut_down_) return;
    }
    Job job;
    for (const Registry::PlacedShard& shard : options_.registry->HealthyShards()) {
      job.shards.push_back({shard.set, shard.shard->rank});
    }
    job.bytes_per_second = options_.bytes_per_second;
    RunJob(job);
  }
}

void ScrubManager::RunJob(const Job& job) {
  v1::ScrubProgress progress;
  for (const ShardRef& ref : job.shards) {
    const auto shard = options_.registry->Look(ref.set, ref.rank, {});
    if (shard.ok()) progress.set_total_bytes(progress.total_bytes() + (*shard)->size_bytes);
  }
  for (const ShardRef& ref : job.shards) {
    const v1::ScrubbedShard result = ScrubShard(job, ref, &progress);
    if (options_.on_shard) options_.on_shard(result);
    if (job.observer.on_shard) job.observer.on_shard(result);
  }
  if (job.observer.on_done) job.observer.on_done();
}

v1::ScrubbedShard ScrubManager::ScrubShard(const Job& job, const ShardRef& ref, v1::ScrubProgress* progress) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t done_before = progress->done_bytes();
  progress->set_fingerprint(ref.set->fingerprint().hash);
  progress->set_rank(ref.rank);
  const auto tell = [&](int64_t done_bytes) {
    progress->set_done_bytes(done_before + done_bytes);
    if (job.observer.on_progress) job.observer.on_progress(*progress);
  };
  tell(0);
  absl::StatusOr<internal::v1::ScrubResult> result;
  auto shard = options_.registry->Look(ref.set, ref.rank, {});
  if (shard.ok()) {
    const int64_t size_bytes = (*shard)->size_bytes;
    const auto run = Begin({ref.set, std::exchange(*shard, nullptr)}, job.bytes_per_second);
    result = run->Run(*options_.spawner, tell);
    End(run);
    tell(size_bytes);
  } else {
    result = shard.status();
  }
  v1::ScrubbedShard scrubbed = Conclude(ref, result);
  scrubbed.set_seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  LogResult(scrubbed);
  if (scrubbed.result() == v1::ScrubbedShard::RESULT_DAMAGED) {
    QuarantineShard(*options_.registry, ref.set, ref.rank, DescribeDamage(scrubbed));
  }
  return scrubbed;
}

v1::ScrubbedShard ScrubManager::Conclude(const ShardRef& ref,
                                         const absl::StatusOr<internal::v1::ScrubResult>& result) const {
  v1::ScrubbedShard shard;
  shard.set_fingerprint(ref.set->fingerprint().hash);
  shard.set_rank(ref.rank);
  if (!result.ok()) {
    shard.set_result(v1::ScrubbedShard::RESULT_NOT_CHECKED);
    shard.mutable_failure()->set_reason(GetErrorDetails(result.status()).reason);
    shard.mutable_failure()->set_message(std::string(result.status().message()));
    return shard;
  }
  shard.set_result(result->damaged().empty() ? v1::ScrubbedShard::RESULT_INTACT : v1::ScrubbedShard::RESULT_DAMAGED);
  shard.set_checked_bytes(result->checked_bytes());
  shard.set_tensor_count(result->tensor_count());
  for (const v1::DamagedTensor& tensor : result->damaged()) {
    v1::DamagedTensor& damaged = *shard.add_damaged();
    damaged = tensor;
    damaged.set_rank(ref.rank);
  }
  return shard;
}

std::shared_ptr<ScrubRun> ScrubManager::Begin(Registry::PlacedShard shard, int64_t bytes_per_second) {
  const auto run = std::make_shared<ScrubRun>(
      options_.registry, std::move(shard),
      ScrubLimits{.bytes_per_second = bytes_per_second, .stall_timeout = options_.stall_timeout});
  MutexLock lock(mutex_);
  if (shut_down_) run->Cancel();
  running_.push_back(run);
  return run;
}

void ScrubManager::End(const std::shared_ptr<ScrubRun>& run) {
  MutexLock lock(mutex_);
  running_.erase(std::remove(running_.begin(), running_.end(), run), running_.end());
}

}  // namespace weightbroker
