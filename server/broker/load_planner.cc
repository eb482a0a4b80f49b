#include "server/broker/load_planner.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/socket.h"
#include "common/base/status_macros.h"
#include "server/broker/sealed_shard.h"

namespace weightbroker {
namespace {

using internal::v1::LoadEvent;

constexpr std::chrono::milliseconds kHeartbeat(100);
constexpr std::chrono::milliseconds kExitGrace(2000);

absl::Status DescribeDeath(LoaderProcess& process) {
  const std::string how = process.WaitForEnd(kExitGrace);
  return MakeError(
      Reason::kLoaderFailed,
      absl::StrCat("the loader ended without a plan (", how.empty() ? "how is not known" : how, "): see its log lines"),
      {{"exit", how}});
}

// `has_said_so` becomes true where the loader itself is the one that gave up, or has ended.
absl::StatusOr<MemoryPlan> AwaitPlan(const Registry& registry, const SpawnedLoader& loader,
                                     const internal::v1::LoadRequest& request, std::chrono::milliseconds timeout,
                                     bool* has_said_so) {
  const auto give_up = std::chrono::steady_clock::now() + timeout;
  absl::StatusOr<SocketMessage> message;
  do {
    RETURN_IF_ERROR(registry.CheckServing());
    if (std::chrono::steady_clock::now() >= give_up) {
      const std::string seconds = absl::StrCat(std::chrono::duration<double>(timeout).count());
      return MakeError(Reason::kLoaderStalled,
                       absl::StrCat("the loader has not planned within ", seconds,
                                    " s, and has been ended: does a disk or a network file system hang?"),
                       {{"seconds", seconds}, {"state", "ALLOCATING"}});
    }
    message = ReceiveMessage(loader.control_socket.get(), kHeartbeat);
  } while (HasReason(message.status(), Reason::kDeadlineExceeded));
  if (!message.ok()) return message.status();
  *has_said_so = message->closed;
  if (message->closed) return DescribeDeath(*loader.process);
  LoadEvent event;
  if (!event.ParseFromString(message->bytes)) return DistrustLoader("sent bytes that are not a LoadEvent");
  if (event.has_failed()) {
    *has_said_so = true;
    const absl::Status failure = ParseRpcStatus(event.failed().SerializeAsString());
    return failure.ok() ? DistrustLoader("said that it failed with code OK") : failure;
  }
  if (!event.has_planned()) return DistrustLoader("began with something else than a plan");
  std::vector<RankPlacement> ranks;
  for (const internal::v1::RankPlacement& rank : request.ranks()) ranks.push_back({rank.rank(), rank.device()});
  return ToMemoryPlan(event.planned(), ranks);
}

}  // namespace

absl::StatusOr<MemoryPlan> PlanLoad(const Registry& registry, LoaderSpawner& spawner,
                                    const internal::v1::LoadRequest& request, std::chrono::milliseconds timeout) {
  ASSIGN_OR_RETURN(const SpawnedLoader loader, spawner.Spawn(request));
  bool has_said_so = false;
  absl::StatusOr<MemoryPlan> plan = AwaitPlan(registry, loader, request, timeout, &has_said_so);
  const std::string cause = plan.ok() ? "its plan is all that was wanted" : std::string(plan.status().message());
  EndLoader(*loader.process, has_said_so, cause, kExitGrace);
  return plan;
}

absl::StatusOr<MemoryPlan> ToMemoryPlan(const internal::v1::LoadPlanned& planned,
                                        const std::vector<RankPlacement>& ranks) {
  const bool is_for_these = std::equal(
      planned.shards().begin(), planned.shards().end(), ranks.begin(), ranks.end(),
      [](const internal::v1::PlannedShard& shard, const RankPlacement& rank) { return shard.rank() == rank.rank; });
  if (!is_for_these) {
    return DistrustLoader(
        absl::StrCat("planned ", planned.shards_size(), " shards, which are not ranks ", JoinRanks(ranks)));
  }
  MemoryPlan plan{.shards = {}, .read_bytes = planned.read_bytes()};
  for (size_t i = 0; i < ranks.size(); ++i) {
    const internal::v1::PlannedShard& shard = planned.shards(static_cast<int>(i));
    plan.shards.push_back({ranks[i].rank, ranks[i].device, shard.slab_bytes(), shard.tensor_count()});
  }
  return plan;
}

}  // namespace weightbroker
