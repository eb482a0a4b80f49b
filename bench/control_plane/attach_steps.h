// What an attach consists of, each step timed: the client library's own parts, one after the other.
#pragma once

#include <map>
#include <string>

#include "absl/status/statusor.h"

namespace weightbroker::bench {

// Attaches to the weight set of `fingerprint` once. Seconds by step:
//   connect    from nothing to a connected channel
//   header     Export, to its first message: the broker grants a lease
//   tickets    a second connection, on which the ticket is exchanged for descriptors
//   map        mmap of the slabs
//   receive    waiting for the manifest's messages
//   decode     making tensors of them
//   finish     giving each its address, and checking that nothing is missing
//   lookup     finding one name, mean of finding every name once: there is no index, names are sorted
absl::StatusOr<std::map<std::string, double>> TimeAttachSteps(const std::string& socket,
                                                              const std::string& fingerprint);

}  // namespace weightbroker::bench
