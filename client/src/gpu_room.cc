#include "client/src/gpu_room.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/unregister.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

constexpr std::chrono::milliseconds kPollInterval(20);
// From the service's word that a set is gone to its memory being free: descriptors are closed in several processes.
constexpr std::chrono::milliseconds kMostTimeToFree(5'000);
constexpr int kFingerprintDigits = 12;
constexpr int64_t kMiB = 1 << 20;

// A set that the service has on the GPU.
struct ResidentSet {
  std::string fingerprint;
  int64_t size_bytes = 0;
  int lease_count = 0;                        // of all its ranks: it is unregistered as a whole
  bool is_kept = false;                       // pinned, or named by an alias
  std::pair<int64_t, int32_t> last_use = {};  // seconds and nanoseconds

  bool may_go() const { return lease_count == 0 && !is_kept; }

  std::string Describe() const {
    return absl::StrCat("weight set ", fingerprint.substr(0, kFingerprintDigits), " of the service (",
                        size_bytes / kMiB, " MiB, ", lease_count, lease_count == 1 ? " lease" : " leases",
                        is_kept ? ", pinned or named by an alias)" : ")");
  }
};

class Room {
 public:
  Room(const CudaContext& context, const std::string& uuid, int64_t need_bytes, const RoomOptions& options)
      : context_(context), uuid_(uuid), need_bytes_(need_bytes), options_(options) {}

  absl::Status Make() {
    ASSIGN_OR_RETURN(bool enough, HasEnough());
    if (enough) return absl::OkStatus();
    const std::vector<ResidentSet> sets = ListSets();
    int64_t most_bytes = free_bytes_;
    for (const ResidentSet& set : sets) most_bytes += set.may_go() ? set.size_bytes : 0;
    if (most_bytes < need_bytes_) return Full();  // nothing goes for nothing
    for (const ResidentSet& set : sets) {
      if (!options_.evict || !set.may_go() || !Unregister(set.fingerprint)) continue;
      ASSIGN_OR_RETURN(enough, WaitForRoom(free_bytes_ + set.size_bytes));
      if (enough) return absl::OkStatus();
    }
    return Full();
  }

 private:
  absl::StatusOr<bool> HasEnough() {
    const CudaScope current(context_);
    RETURN_IF_ERROR(current.status());
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    const CudaResult result = context_.driver().MemGetInfo(&free_bytes, &total_bytes);
    if (result != kCudaSuccess) return CudaError(context_.driver(), result, "cuMemGetInfo", "asking for free memory");
    free_bytes_ = static_cast<int64_t>(free_bytes);
    return free_bytes_ >= need_bytes_;
  }

  // Until there is enough, or what is to be had by letting go of one set.
  absl::StatusOr<bool> WaitForRoom(int64_t expected_bytes) {
    const auto give_up = std::chrono::steady_clock::now() + std::min(kMostTimeToFree, Remaining(options_.deadline));
    while (true) {
      ASSIGN_OR_RETURN(const bool enough, HasEnough());
      const bool is_over = free_bytes_ >= expected_bytes || std::chrono::steady_clock::now() >= give_up;
      if (enough || is_over) return enough;
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  // Those not used for longest first, as the service itself evicts them. Empty if there is no service, or it does not
  // say: then nothing of its is let go of.
  std::vector<ResidentSet> ListSets() const {
    if (options_.service == nullptr) return {};
    v1::ListWeightSetsResponse response;
    const absl::Status status = options_.service->Call(options_.deadline, [&](grpc::ClientContext& context) {
      return options_.service->admin_service().ListWeightSets(&context, {}, &response);
    });
    std::vector<ResidentSet> sets;
    if (!status.ok()) return sets;
    for (const v1::WeightSet& set : response.weight_sets()) {
      ResidentSet here{set.fingerprint()};
      for (const v1::Shard& shard : set.shards()) {
        here.lease_count += shard.lease_count();
        if (shard.device() == uuid_) here.size_bytes += shard.size_bytes();
      }
      here.is_kept = set.pinned() || !set.aliases().empty();
      here.last_use = {set.last_use_time().seconds(), set.last_use_time().nanos()};
      if (here.size_bytes > 0) sets.push_back(std::move(here));
    }
    std::stable_sort(sets.begin(), sets.end(),
                     [](const ResidentSet& a, const ResidentSet& b) { return a.last_use < b.last_use; });
    return sets;
  }

  // Without force: a lease that was granted meanwhile makes the service refuse.
  bool Unregister(const std::string& fingerprint) const {
    v1::UnregisterRequest request;
    request.set_fingerprint(fingerprint);
    return UnregisterOnce(*options_.service, request, options_.deadline).ok();
  }

  absl::Status Full() const {
    std::vector<std::string> holders;
    for (const ResidentSet& set : ListSets()) holders.push_back(set.Describe());
    if (options_.inventory != nullptr) {
      const auto processes = options_.inventory->Processes(uuid_);
      if (processes.ok()) holders.push_back(DescribeHolders(*processes));
    }
    const std::string who = holders.empty() ? "unknown" : absl::StrJoin(holders, "; ");
    return MakeError(Reason::kMemoryExhausted,
                     absl::StrCat("loading the weights onto the GPU ", uuid_, " takes ", need_bytes_,
                                  " bytes, and it has ", free_bytes_, " free; held by: ", who,
                                  options_.evict ? "" : "; sets without leases can be let go of (evict_unleased)"),
                     {{"need_bytes", absl::StrCat(need_bytes_)},
                      {"have_bytes", absl::StrCat(free_bytes_)},
                      {"limited_by", "device"},
                      {"device_uuid", uuid_},
                      {"holders", who}});
  }

  const CudaContext& context_;
  const std::string& uuid_;
  const int64_t need_bytes_;
  const RoomOptions& options_;
  int64_t free_bytes_ = 0;
};

}  // namespace

absl::Status MakeRoomOnGpu(const CudaContext& context, const std::string& uuid, int64_t need_bytes,
                           const RoomOptions& options) {
  return Room(context, uuid, need_bytes, options).Make();
}

}  // namespace weightbroker::client
