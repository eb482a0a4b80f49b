// CHECK for fuzz programs: stops at once, so that libFuzzer keeps the input.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "common/base/error.h"

#define FUZZ_CHECK(condition)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

namespace weightbroker {

// Every refusal names a reason, is short, and survives the way over the wire (protobuf refuses strings that are not
// UTF-8).
inline void CheckRefusal(const absl::Status& status) {
  FUZZ_CHECK(!GetErrorDetails(status).reason.empty());
  FUZZ_CHECK(status.message().size() < 4000);
  const absl::Status parsed = ParseRpcStatus(SerializeRpcStatus(status));
  FUZZ_CHECK(GetErrorDetails(parsed).reason == GetErrorDetails(status).reason);
}

}  // namespace weightbroker
