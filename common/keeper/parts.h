// How an entry is cut into packets: part i has the i-th kMaxKeeperValueBytes of the value and the i-th
// kMaxKeeperFdsPerPacket of the descriptors, either of which may be used up before the other. Pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

#include "common/keeper/protocol.h"

namespace weightbroker {

// How many packets an entry takes: at least one.
inline int CountParts(size_t value_bytes, size_t fds) {
  const size_t for_value = (value_bytes + kMaxKeeperValueBytes - 1) / kMaxKeeperValueBytes;
  const size_t for_fds = (fds + kMaxKeeperFdsPerPacket - 1) / kMaxKeeperFdsPerPacket;
  return static_cast<int>(std::max({for_value, for_fds, size_t{1}}));
}

inline std::string_view ValueOfPart(std::string_view value, int part) {
  const size_t begin = std::min(value.size(), static_cast<size_t>(part) * kMaxKeeperValueBytes);
  return value.substr(begin, kMaxKeeperValueBytes);
}

template <typename T>
std::span<const T> FdsOfPart(std::span<const T> fds, int part) {
  const size_t begin = std::min(fds.size(), static_cast<size_t>(part) * kMaxKeeperFdsPerPacket);
  return fds.subspan(begin, std::min(fds.size() - begin, static_cast<size_t>(kMaxKeeperFdsPerPacket)));
}

}  // namespace weightbroker
