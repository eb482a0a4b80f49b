#include "server/broker/placement.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/names.h"

namespace weightbroker {
namespace {

constexpr int kMaxRanksNamed = 4096;  // more than any node has; what a request says comes back in messages

absl::Status WrongCount(const std::string& field, const std::string& what) {
  return MakeError(Reason::kInvalidArgument, what, {{"field", field}});
}

absl::StatusOr<std::vector<int32_t>> RanksAskedFor(const v1::RegisterRequest& request, int32_t world_size) {
  if (request.ranks_size() > kMaxRanksNamed || request.devices_size() > kMaxRanksNamed) {
    return WrongCount("ranks", absl::StrCat("more than ", kMaxRanksNamed, " ranks or devices are named"));
  }
  std::vector<int32_t> ranks(request.ranks().begin(), request.ranks().end());
  for (int32_t rank = 0; request.ranks().empty() && rank < world_size; ++rank) ranks.push_back(rank);
  for (const int32_t rank : ranks) {
    if (rank >= 0 && rank < world_size) continue;
    return MakeError(Reason::kRankOutOfRange,
                     absl::StrCat("rank ", rank, " is to be held, but the spec has ", world_size,
                                  world_size == 1 ? " rank" : " ranks", ", counted from 0"),
                     {{"rank", absl::StrCat(rank)}, {"rank_count", absl::StrCat(world_size)}});
  }
  std::vector<int32_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end()) {
    return WrongCount("ranks", absl::StrCat("rank ", *twice, " is named twice"));
  }
  return ranks;
}

const ServedDevice* FindDevice(std::span<const ServedDevice> devices, const std::string& name) {
  const auto found =
      std::find_if(devices.begin(), devices.end(), [&](const auto& device) { return device.name == name; });
  return found == devices.end() ? nullptr : &*found;
}

absl::Status DeviceHasFailed(const ServedDevice& device) {
  return MakeError(Reason::kDeviceUnsupported,
                   absl::StrCat("device ", device.name, " takes no more weights: ", device.fault),
                   {{"device_uuid", device.name}});
}

absl::Status CheckDevicesNamed(const v1::RegisterRequest& request, size_t rank_count,
                               std::span<const ServedDevice> devices) {
  if (request.devices().empty()) return absl::OkStatus();
  for (const std::string& name : request.devices()) {
    if (const ServedDevice* const device = FindDevice(devices, name); device != nullptr) {
      if (!device->fault.empty()) return DeviceHasFailed(*device);
      continue;
    }
    const std::string known = absl::StrJoin(
        devices, ", ", [](std::string* out, const ServedDevice& device) { absl::StrAppend(out, device.name); });
    return MakeError(Reason::kDeviceUnknown,
                     absl::StrCat("device ", Quote(name), " is not one of this service's: ", known),
                     {{"device", Printable(name)}, {"devices", known}});
  }
  if (static_cast<size_t>(request.devices_size()) == rank_count) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat(request.devices_size(), " devices are named for ", rank_count,
                                " ranks: name one for each rank that is held here, or none"),
                   {{"field", "devices"}, {"ranks", absl::StrCat(rank_count)}});
}

bool Offers(const ServedDevice& device, v1::HandleKind kind) {
  return std::find(device.handle_kinds.begin(), device.handle_kinds.end(), kind) != device.handle_kinds.end();
}

// The names of the devices that ranks without one go to, in order; one for all if the host is among them.
std::vector<std::string> DevicesFor(v1::HandleKind kind, std::span<const ServedDevice> devices) {
  std::vector<std::string> names;
  for (const ServedDevice& device : devices) {
    if (!Offers(device, kind) || !device.fault.empty()) continue;
    if (device.name == kHostDevice) return {device.name};
    names.push_back(device.name);
  }
  return names;
}

// The devices for `rank_count` ranks as `kind`, in the ranks' order; nothing if they cannot be had.
std::optional<std::vector<std::string>> Assign(const v1::RegisterRequest& request, v1::HandleKind kind,
                                               size_t rank_count, std::span<const ServedDevice> devices) {
  if (!request.devices().empty()) {
    const bool all_offer =
        std::all_of(request.devices().begin(), request.devices().end(),
                    [&](const std::string& name) { return Offers(*FindDevice(devices, name), kind); });
    if (!all_offer) return std::nullopt;
    return std::vector<std::string>(request.devices().begin(), request.devices().end());
  }
  std::vector<std::string> names = DevicesFor(kind, devices);
  if (names.size() == 1 && names[0] == kHostDevice) return std::vector<std::string>(rank_count, kHostDevice);
  if (names.size() < rank_count) return std::nullopt;
  names.resize(rank_count);
  return names;
}

// The kinds to try, best first: those asked for, or else the best of the device that was named or comes first.
std::vector<v1::HandleKind> KindsToTry(const v1::RegisterRequest& request, std::span<const ServedDevice> devices) {
  if (request.handle_kinds().empty()) {
    const ServedDevice* const first =
        request.devices().empty() ? &devices.front() : FindDevice(devices, request.devices(0));
    return {first->handle_kinds.front()};
  }
  std::vector<v1::HandleKind> kinds;
  for (const int kind : request.handle_kinds()) kinds.push_back(static_cast<v1::HandleKind>(kind));
  return kinds;
}

absl::Status NoSuchKind(const std::vector<v1::HandleKind>& wanted, std::span<const ServedDevice> devices) {
  const std::string offered = JoinHandleKinds(HandleKindsOf(devices));
  const std::string kinds = JoinHandleKinds(wanted);
  return MakeError(Reason::kHandleKindUnsupported,
                   absl::StrCat("the service offers ", offered, ", but only ", kinds, " is asked for"),
                   {{"handle_kind", offered}, {"wanted", kinds}});
}

absl::Status NotPlaceable(const v1::RegisterRequest& request, v1::HandleKind kind, size_t rank_count,
                          std::span<const ServedDevice> devices) {
  if (!request.devices().empty()) {
    return MakeError(Reason::kHandleKindUnsupported,
                     absl::StrCat("not every device that is named offers ", HandleKindName(kind),
                                  ", and all ranks of a set have one handle kind"),
                     {{"handle_kind", HandleKindName(kind)}});
  }
  const size_t device_count = DevicesFor(kind, devices).size();
  return MakeError(
      Reason::kInvalidArgument,
      absl::StrCat(rank_count, " ranks are to be held, and the service has ", device_count, " devices for ",
                   HandleKindName(kind), ": name the ranks that this node is to hold, or a device for each"),
      {{"field", "ranks"}, {"ranks", absl::StrCat(rank_count)}, {"devices", absl::StrCat(device_count)}});
}

absl::Status OtherPlacement(const std::string& what, const std::string& wanted, const std::string& found) {
  return MakeError(Reason::kPlacementMismatch,
                   absl::StrCat("the weight set is there, but with other ", what, ": ", found, ", where ", wanted,
                                " are asked for: unregister it first, or ask for what is there"),
                   {{"field", what}, {"requested", wanted}, {"resident", found}});
}

std::string JoinDevices(std::span<const RankPlacement> ranks) {
  constexpr size_t kMaxShown = 16;
  const auto shown = ranks.first(std::min(ranks.size(), kMaxShown));
  return absl::StrCat(absl::StrJoin(shown, ", ",
                                    [](std::string* out, const RankPlacement& rank) {
                                      absl::StrAppend(out, rank.rank, ": ", rank.device);
                                    }),
                      ranks.size() > kMaxShown ? ", ..." : "");
}

}  // namespace

std::vector<ServedDevice> HostOnly() { return {{kHostDevice, {v1::HANDLE_KIND_HOST_MEMFD}}}; }

std::vector<v1::HandleKind> HandleKindsOf(std::span<const ServedDevice> devices) {
  std::vector<v1::HandleKind> kinds;
  for (const ServedDevice& device : devices) {
    for (const v1::HandleKind kind : device.handle_kinds) {
      if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
    }
  }
  return kinds;
}

Placement AllOnHost(int32_t world_size) {
  Placement placement;
  placement.world_size = world_size;
  placement.ranks.clear();
  for (int32_t rank = 0; rank < world_size; ++rank) placement.ranks.push_back({rank, kHostDevice});
  return placement;
}

absl::StatusOr<Placement> PlaceRanks(const v1::RegisterRequest& request, int32_t world_size,
                                     std::span<const ServedDevice> devices) {
  ASSIGN_OR_RETURN(const std::vector<int32_t> ranks, RanksAskedFor(request, world_size));
  RETURN_IF_ERROR(CheckDevicesNamed(request, ranks.size(), devices));
  RETURN_IF_ERROR(CheckHandleKindCount(request.handle_kinds_size()));
  const std::vector<v1::HandleKind> kinds = KindsToTry(request, devices);
  std::optional<v1::HandleKind> offered;  // the first that there is at all
  for (const v1::HandleKind kind : kinds) {
    if (DevicesFor(kind, devices).empty()) continue;
    if (!offered.has_value()) offered = kind;
    const auto names = Assign(request, kind, ranks.size(), devices);
    if (!names.has_value()) continue;
    Placement placement{.ranks = {}, .world_size = world_size, .handle_kind = kind};
    for (size_t i = 0; i < ranks.size(); ++i) placement.ranks.push_back({ranks[i], (*names)[i]});
    std::sort(placement.ranks.begin(), placement.ranks.end(),
              [](const RankPlacement& a, const RankPlacement& b) { return a.rank < b.rank; });
    return placement;
  }
  for (const ServedDevice& device : devices) {
    const bool was_meant = std::any_of(kinds.begin(), kinds.end(), [&](auto kind) { return Offers(device, kind); });
    if (was_meant && !device.fault.empty()) return DeviceHasFailed(device);
  }
  return offered.has_value() ? NotPlaceable(request, *offered, ranks.size(), devices) : NoSuchKind(kinds, devices);
}

absl::Status CheckPlacement(const v1::RegisterRequest& request, const Placement& wanted, const Placement& found) {
  if (!request.ranks().empty() &&
      !std::equal(wanted.ranks.begin(), wanted.ranks.end(), found.ranks.begin(), found.ranks.end(),
                  [](const RankPlacement& a, const RankPlacement& b) { return a.rank == b.rank; })) {
    return OtherPlacement("ranks", JoinRanks(wanted.ranks), JoinRanks(found.ranks));
  }
  if (!request.devices().empty() && wanted.ranks != found.ranks) {
    return OtherPlacement("devices", JoinDevices(wanted.ranks), JoinDevices(found.ranks));
  }
  const auto& kinds = request.handle_kinds();
  if (kinds.empty() || std::find(kinds.begin(), kinds.end(), found.handle_kind) != kinds.end()) return absl::OkStatus();
  std::vector<v1::HandleKind> wanted_kinds;
  for (const int kind : kinds) wanted_kinds.push_back(static_cast<v1::HandleKind>(kind));
  const std::string named = JoinHandleKinds(wanted_kinds);
  return MakeError(Reason::kHandleKindUnsupported,
                   absl::StrCat("the weight set is held as ", HandleKindName(found.handle_kind),
                                ", fixed when it was registered, but only ", named, " is asked for"),
                   {{"handle_kind", HandleKindName(found.handle_kind)}, {"wanted", named}});
}

absl::Status CheckHeld(const v1::RegisterRequest& request, const Placement& found) {
  v1::RegisterRequest named = request;
  for (int32_t rank = 0; request.ranks().empty() && rank < found.world_size; ++rank) named.add_ranks(rank);
  Placement wanted{.ranks = {}, .world_size = found.world_size};
  for (int i = 0; i < named.ranks_size(); ++i) {
    wanted.ranks.push_back({named.ranks(i), i < named.devices_size() ? named.devices(i) : ""});
  }
  std::sort(wanted.ranks.begin(), wanted.ranks.end(),
            [](const RankPlacement& a, const RankPlacement& b) { return a.rank < b.rank; });
  return CheckPlacement(named, wanted, found);
}

std::string JoinRanks(std::span<const RankPlacement> ranks) {
  std::vector<std::string> runs;
  for (size_t begin = 0; begin < ranks.size();) {
    size_t end = begin + 1;
    while (end < ranks.size() && ranks[end].rank == ranks[end - 1].rank + 1) ++end;
    runs.push_back(end - begin == 1 ? absl::StrCat(ranks[begin].rank)
                                    : absl::StrCat(ranks[begin].rank, "-", ranks[end - 1].rank));
    begin = end;
  }
  return absl::StrJoin(runs, ", ");
}

}  // namespace weightbroker
