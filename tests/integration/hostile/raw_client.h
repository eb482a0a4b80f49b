// The service's socket as a hostile client sees it: bytes, and gRPC calls made of bytes, without gRPC.
//
//   UniqueFd connection = ConnectTo(path);
//   SendAll(connection.get(), Http2Preface() + RawCall(1, "/weightbroker.v1.WeightBrokerService/Export", request));
//
// Not thread-safe on one connection.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/base/unique_fd.h"

namespace weightbroker::testing {

// Blocking; invalid, with errno, if nobody answers.
UniqueFd ConnectTo(const std::string& path);

// Whether all of it went out within `timeout`; false also if the other side has gone.
bool SendAll(int fd, std::string_view bytes, std::chrono::milliseconds timeout = std::chrono::milliseconds(1000));

// Reads and forgets until the other side closes; false if it has not within `timeout`.
bool IsClosedWithin(int fd, std::chrono::milliseconds timeout);

// What arrives until `enough` bytes are there, the other side closes, or `timeout`.
std::string ReadSome(int fd, size_t enough, std::chrono::milliseconds timeout);

// What an HTTP/2 client says first: the 24 bytes, and empty SETTINGS.
std::string Http2Preface();

// A call of a method with one request message: HEADERS and DATA, with END_STREAM. `stream` is odd and goes up.
// `claimed_bytes` is the length that the message is said to have; its own if negative. `metadata_bytes` of padding go
// into its headers.
std::string RawCall(uint32_t stream, const std::string& path, const std::string& message, int64_t claimed_bytes = -1,
                    size_t metadata_bytes = 0);

}  // namespace weightbroker::testing
