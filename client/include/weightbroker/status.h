// How the client library says that something failed: for people, and for programs.
//
//   weightbroker::Result<weightbroker::MappedWeights> weights = client->Attach(spec);
//   if (!weights.ok()) {
//     if (weights.status().reason() == "FINGERPRINT_MISMATCH") ...     // docs/errors.md lists the reasons
//     std::cerr << weights.status().ToString() << "\n";
//   }
//
// A Status and a Result are values: as thread-safe as an int.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <variant>

#include "weightbroker/export.h"

namespace weightbroker {

// The canonical codes of gRPC, with their numbers.
enum class StatusCode {
  kOk = 0,
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// Its name, for instance "FAILED_PRECONDITION".
WEIGHTBROKER_EXPORT const char* StatusCodeName(StatusCode code);

class [[nodiscard]] WEIGHTBROKER_EXPORT Status {
 public:
  using Metadata = std::map<std::string, std::string>;

  Status() = default;  // ok
  Status(StatusCode code, std::string reason, std::string message, Metadata metadata = {})
      : code_(code), reason_(std::move(reason)), message_(std::move(message)), metadata_(std::move(metadata)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  // Why, as one UPPER_SNAKE word for programs; empty only if ok.
  const std::string& reason() const { return reason_; }
  // What, where, found, allowed and what to do, as a sentence for people.
  const std::string& message() const { return message_; }
  // Every value that the message names.
  const Metadata& metadata() const { return metadata_; }

  // "OK", or "FAILED_PRECONDITION: <message> [FINGERPRINT_MISMATCH]".
  std::string ToString() const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string reason_;
  std::string message_;
  Metadata metadata_;
};

namespace internal {
// Ends the process, saying that the value of a failed Result was asked for.
[[noreturn]] WEIGHTBROKER_EXPORT void DieOfBadAccess(const Status& status);
}  // namespace internal

// Either a value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}        // NOLINT(google-explicit-constructor): `return value;`
  Result(Status status) : state_(std::move(status)) {  // NOLINT(google-explicit-constructor): `return status;`
    if (std::get<Status>(state_).ok()) internal::DieOfBadAccess(std::get<Status>(state_));
  }

  bool ok() const { return std::holds_alternative<T>(state_); }

  // The reason for which there is no value; ok if there is one.
  Status status() const { return ok() ? Status() : std::get<Status>(state_); }

  // The value. The process ends if there is none: ask ok() first.
  T& value() & { return RequireValue(), std::get<T>(state_); }
  const T& value() const& { return RequireValue(), std::get<T>(state_); }
  T&& value() && { return RequireValue(), std::get<T>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  void RequireValue() const {
    if (!ok()) internal::DieOfBadAccess(std::get<Status>(state_));
  }

  std::variant<Status, T> state_;
};

}  // namespace weightbroker
