// Every reason for which weightbroker refuses or fails, one row each. The name is what stands in ErrorInfo.reason and
// in the metrics' `reason` label; the code is the canonical code that goes with it; docs/errors.md says what to do (a
// test checks that it has the same rows).
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace weightbroker {

// X(enumerator, UPPER_SNAKE name, canonical code)
// clang-format off
#define WEIGHTBROKER_REASONS(X)                                              \
  /* requests */                                                             \
  X(kInvalidArgument, "INVALID_ARGUMENT", kInvalidArgument)                  \
  X(kEnvironmentRequired, "ENVIRONMENT_REQUIRED", kInvalidArgument)          \
  X(kLayoutUnsupported, "LAYOUT_UNSUPPORTED", kInvalidArgument)              \
  X(kDtypeMismatch, "DTYPE_MISMATCH", kFailedPrecondition)                   \
  X(kDeviceUnknown, "DEVICE_UNKNOWN", kInvalidArgument)                      \
  X(kHandleKindUnsupported, "HANDLE_KIND_UNSUPPORTED", kFailedPrecondition)  \
  X(kRankOutOfRange, "RANK_OUT_OF_RANGE", kInvalidArgument)                  \
  X(kRankNotHere, "RANK_NOT_HERE", kNotFound)                                \
  X(kPlacementMismatch, "PLACEMENT_MISMATCH", kFailedPrecondition)           \
  /* GPUs */                                                                 \
  X(kGpuUnavailable, "GPU_UNAVAILABLE", kFailedPrecondition)                 \
  X(kDriverTooOld, "DRIVER_TOO_OLD", kFailedPrecondition)                    \
  X(kDeviceUnsupported, "DEVICE_UNSUPPORTED", kFailedPrecondition)           \
  X(kDeviceMismatch, "DEVICE_MISMATCH", kFailedPrecondition)                 \
  X(kHandleStale, "HANDLE_STALE", kFailedPrecondition)                       \
  X(kExporterDead, "EXPORTER_DEAD", kFailedPrecondition)                     \
  X(kCudaError, "CUDA_ERROR", kInternal)                                     \
  /* where models may lie */                                                 \
  X(kModelRootUnknown, "MODEL_ROOT_UNKNOWN", kNotFound)                      \
  X(kModelOutsideRoots, "MODEL_OUTSIDE_ROOTS", kPermissionDenied)            \
  X(kModelNotFound, "MODEL_NOT_FOUND", kNotFound)                            \
  /* what is in their files */                                               \
  X(kCheckpointIncomplete, "CHECKPOINT_INCOMPLETE", kFailedPrecondition)     \
  X(kCheckpointUnreadable, "CHECKPOINT_UNREADABLE", kFailedPrecondition)     \
  X(kCheckpointTruncated, "CHECKPOINT_TRUNCATED", kFailedPrecondition)       \
  X(kCheckpointMalformed, "CHECKPOINT_MALFORMED", kFailedPrecondition)       \
  X(kCheckpointNotSafetensors, "CHECKPOINT_NOT_SAFETENSORS", kFailedPrecondition) \
  X(kCheckpointTooLarge, "CHECKPOINT_TOO_LARGE", kFailedPrecondition)        \
  X(kCheckpointEmpty, "CHECKPOINT_EMPTY", kFailedPrecondition)               \
  X(kCheckpointIndexMismatch, "CHECKPOINT_INDEX_MISMATCH", kFailedPrecondition) \
  X(kCheckpointPathUnsafe, "CHECKPOINT_PATH_UNSAFE", kFailedPrecondition)    \
  X(kCheckpointChanged, "CHECKPOINT_CHANGED", kAborted)                      \
  X(kDtypeUnsupported, "DTYPE_UNSUPPORTED", kFailedPrecondition)             \
  X(kConfigMalformed, "CONFIG_MALFORMED", kFailedPrecondition)               \
  X(kQuantizationUnsupported, "QUANTIZATION_UNSUPPORTED", kFailedPrecondition) \
  X(kQuantizationMalformed, "QUANTIZATION_MALFORMED", kFailedPrecondition)   \
  X(kQuantizationConflict, "QUANTIZATION_CONFLICT", kFailedPrecondition)     \
  X(kQuantizationContradicted, "QUANTIZATION_CONTRADICTED", kFailedPrecondition) \
  X(kWeightNotFinite, "WEIGHT_NOT_FINITE", kFailedPrecondition)              \
  /* how they are split */                                                   \
  X(kArchitectureUnknown, "ARCHITECTURE_UNKNOWN", kFailedPrecondition)       \
  X(kArchitectureMismatch, "ARCHITECTURE_MISMATCH", kFailedPrecondition)     \
  X(kArchitectureInvalid, "ARCHITECTURE_INVALID", kInvalidArgument)          \
  X(kSplitImpossible, "SPLIT_IMPOSSIBLE", kFailedPrecondition)               \
  /* weight sets */                                                          \
  X(kFingerprintMismatch, "FINGERPRINT_MISMATCH", kFailedPrecondition)       \
  X(kNotResident, "NOT_RESIDENT", kNotFound)                                 \
  X(kGenerationMismatch, "GENERATION_MISMATCH", kFailedPrecondition)         \
  X(kStillLoading, "STILL_LOADING", kUnavailable)                            \
  X(kWeightSetUnknown, "WEIGHT_SET_UNKNOWN", kNotFound)                      \
  X(kWeightSetAmbiguous, "WEIGHT_SET_AMBIGUOUS", kInvalidArgument)           \
  X(kLeased, "LEASED", kFailedPrecondition)                                  \
  X(kAliased, "ALIASED", kFailedPrecondition)                                \
  X(kAliasUnknown, "ALIAS_UNKNOWN", kNotFound)                               \
  X(kAliasConflict, "ALIAS_CONFLICT", kAborted)                              \
  X(kCancelled, "CANCELLED", kCancelled)                                     \
  X(kMemoryExhausted, "MEMORY_EXHAUSTED", kResourceExhausted)                \
  X(kLoaderFailed, "LOADER_FAILED", kInternal)                               \
  X(kLoaderStalled, "LOADER_STALLED", kInternal)                             \
  /* publishing */                                                           \
  X(kPublishRequired, "PUBLISH_REQUIRED", kFailedPrecondition)               \
  X(kPublisherGone, "PUBLISHER_GONE", kAborted)                              \
  X(kPublicationUnknown, "PUBLICATION_UNKNOWN", kNotFound)                   \
  X(kPromiseBroken, "PROMISE_BROKEN", kFailedPrecondition)                   \
  X(kManifestInvalid, "MANIFEST_INVALID", kInvalidArgument)                  \
  X(kStillWritable, "STILL_WRITABLE", kFailedPrecondition)                   \
  /* engine groups */                                                        \
  X(kGroupUnknown, "GROUP_UNKNOWN", kNotFound)                               \
  X(kGroupMismatch, "GROUP_MISMATCH", kFailedPrecondition)                   \
  X(kGroupFull, "GROUP_FULL", kResourceExhausted)                            \
  X(kGroupInUse, "GROUP_IN_USE", kFailedPrecondition)                        \
  X(kGroupSuperseded, "GROUP_SUPERSEDED", kAborted)                          \
  X(kGroupPageInvalid, "GROUP_PAGE_INVALID", kDataLoss)                      \
  /* the endpoint and access to it */                                        \
  X(kSocketInUse, "SOCKET_IN_USE", kAlreadyExists)                           \
  X(kSocketPathInvalid, "SOCKET_PATH_INVALID", kInvalidArgument)             \
  X(kSocketUnusable, "SOCKET_UNUSABLE", kFailedPrecondition)                 \
  X(kAccessDenied, "ACCESS_DENIED", kPermissionDenied)                       \
  X(kTicketInvalid, "TICKET_INVALID", kPermissionDenied)                     \
  X(kTooManyRequests, "TOO_MANY_REQUESTS", kResourceExhausted)               \
  X(kDraining, "DRAINING", kUnavailable)                                     \
  X(kServiceUnknown, "SERVICE_UNKNOWN", kNotFound)                           \
  X(kServiceUnavailable, "SERVICE_UNAVAILABLE", kUnavailable)                \
  X(kServiceNotStarted, "SERVICE_NOT_STARTED", kUnavailable)                 \
  X(kDeadlineExceeded, "DEADLINE_EXCEEDED", kDeadlineExceeded)               \
  X(kKeeperRefused, "KEEPER_REFUSED", kFailedPrecondition)                   \
  X(kModeOff, "MODE_OFF", kUnavailable)                                      \
  /* integrity, and the rest */                                              \
  X(kDigestMismatch, "DIGEST_MISMATCH", kDataLoss)                           \
  X(kQuarantined, "QUARANTINED", kDataLoss)                                  \
  X(kTensorUnknown, "TENSOR_UNKNOWN", kNotFound)                             \
  X(kModuleMismatch, "MODULE_MISMATCH", kFailedPrecondition)                 \
  X(kTorchError, "TORCH_ERROR", kInternal)                                   \
  X(kProtocolError, "PROTOCOL_ERROR", kInternal)                             \
  X(kConfigurationInvalid, "CONFIGURATION_INVALID", kInvalidArgument)        \
  X(kSystemError, "SYSTEM_ERROR", kInternal)
// clang-format on

enum class Reason {
#define WEIGHTBROKER_REASON_ENUMERATOR(enumerator, name, code) enumerator,
  WEIGHTBROKER_REASONS(WEIGHTBROKER_REASON_ENUMERATOR)
#undef WEIGHTBROKER_REASON_ENUMERATOR
};

// Its UPPER_SNAKE name.
std::string_view ReasonName(Reason reason);

// The canonical code that goes with it.
absl::StatusCode ReasonCode(Reason reason);

}  // namespace weightbroker
