// Starts threads where the system may refuse to: at the limit of a user's or a container's processes std::thread
// throws, and no library of ours ends the process that it is in.
//
//   std::thread worker;
//   if (!TryStartThread(&worker, work)) work();      // with one thread less, then
//
// Thread-safe.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

namespace weightbroker {

// Makes `*thread`, which must not be running, run `function`. False, with the function not called, if there is no
// thread to be had.
template <typename Function>
[[nodiscard]] bool TryStartThread(std::thread* thread, Function function) {
  try {
    *thread = std::thread(std::move(function));
  } catch (const std::system_error&) {
    return false;
  }
  return true;
}

}  // namespace weightbroker
