#include "server/broker/quarantine.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"

namespace weightbroker {

bool QuarantineShard(Registry& registry, const WeightSetRef& set, int32_t rank, const std::string& why) {
  const std::string& fingerprint = set->fingerprint().hash;
  const Registry::QuarantineResult result = registry.Quarantine(set, rank, why);
  if (!result.is_new) return false;
  Log(LogLevel::kError, "shard.quarantined",
      {{"fingerprint", fingerprint}, {"rank", absl::StrCat(rank)}, {"cause", why}});
  if (!result.kept.ok()) {
    Log(LogLevel::kError, "quarantine.not_kept",
        {{"fingerprint", fingerprint},
         {"rank", absl::StrCat(rank)},
         {"reason", GetErrorDetails(result.kept).reason},
         {"message", absl::StrCat(std::string(result.kept.message()),
                                  ": the next broker would serve this shard; unregister the set now")}});
  }
  return true;
}

}  // namespace weightbroker
