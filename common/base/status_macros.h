// RETURN_IF_ERROR(expression) and ASSIGN_OR_RETURN(declaration, expression), for absl::Status and absl::StatusOr.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define WEIGHTBROKER_CONCAT_INNER(a, b) a##b
#define WEIGHTBROKER_CONCAT(a, b) WEIGHTBROKER_CONCAT_INNER(a, b)

#define RETURN_IF_ERROR(expression)                           \
  do {                                                        \
    if (absl::Status status_ = (expression); !status_.ok()) { \
      return status_;                                         \
    }                                                         \
  } while (false)

#define ASSIGN_OR_RETURN(declaration, expression) \
  WEIGHTBROKER_ASSIGN_OR_RETURN(WEIGHTBROKER_CONCAT(status_or_, __LINE__), declaration, expression)
#define WEIGHTBROKER_ASSIGN_OR_RETURN(temporary, declaration, expression) \
  auto temporary = (expression);                                          \
  if (!temporary.ok()) return std::move(temporary).status();              \
  declaration = *std::move(temporary)
