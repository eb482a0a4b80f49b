#include "server/broker/alias_calls.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "server/broker/names.h"
#include "server/broker/timestamp.h"

namespace weightbroker {
namespace {

// The beginning of one would never be what an alias names.
absl::Status CheckExpected(const std::string& expected) {
  constexpr size_t kFingerprintDigits = 64;
  const bool is_whole =
      expected.size() == kFingerprintDigits && expected.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (expected.empty() || is_whole) return absl::OkStatus();
  return MakeError(Reason::kInvalidArgument,
                   absl::StrCat("expected_fingerprint ", Quote(expected), " is not ", kFingerprintDigits,
                                " lower-case hexadecimal digits: give the whole fingerprint, or an empty one for an "
                                "alias that must not be there"),
                   {{"field", "expected_fingerprint"}, {"found", Printable(expected)}});
}

}  // namespace

void WriteAlias(const KeptAlias& alias, v1::Alias* proto) {
  proto->set_name(alias.name);
  proto->set_fingerprint(alias.fingerprint);
  proto->set_previous_fingerprint(alias.previous_fingerprint);
  SetTimestamp(alias.move_time, proto->mutable_move_time());
}

absl::Status AnswerSetAlias(const ServiceContext& context, const CallRecord& record, const v1::SetAliasRequest& request,
                            v1::SetAliasResponse* response) {
  const absl::StatusOr<WeightSetRef> found = context.registry->FindByPrefix(request.fingerprint());
  RETURN_IF_ERROR(context.registry->CheckServing());
  AliasChange change{.name = request.alias(), .release_previous = request.release_previous()};
  ASSIGN_OR_RETURN(change.set, found);
  RETURN_IF_ERROR(CheckExpected(request.expected_fingerprint()));
  if (request.has_expected_fingerprint()) change.expected_fingerprint = request.expected_fingerprint();
  ASSIGN_OR_RETURN(AliasChanged changed, context.registry->SetAlias(change));
  context.metrics->CountAliasChange("set");
  Log(LogLevel::kInfo, "alias.set",
      {{"alias", changed.alias.name},
       {"fingerprint", changed.alias.fingerprint},
       {"previous", changed.alias.previous_fingerprint},
       {"superseded_leases", absl::StrCat(changed.superseded_leases)},
       {"previous_state", changed.released.has_value() ? StateName(changed.released->state()) : "kept"},
       {"uid", absl::StrCat(record.peer().uid)},
       {"peer_pid", absl::StrCat(record.peer().pid)}});
  WriteAlias(changed.alias, response->mutable_alias());
  response->set_superseded_lease_count(changed.superseded_leases);
  if (changed.released.has_value()) *response->mutable_released() = *std::move(changed.released);
  return absl::OkStatus();
}

absl::Status AnswerDeleteAlias(const ServiceContext& context, const CallRecord& record,
                               const v1::DeleteAliasRequest& request, v1::DeleteAliasResponse* response) {
  RETURN_IF_ERROR(CheckExpected(request.expected_fingerprint()));
  std::optional<std::string> expected;
  if (request.has_expected_fingerprint()) expected = request.expected_fingerprint();
  ASSIGN_OR_RETURN(const KeptAlias deleted, context.registry->DeleteAlias(request.alias(), expected));
  context.metrics->CountAliasChange("deleted");
  Log(LogLevel::kInfo, "alias.deleted",
      {{"alias", deleted.name},
       {"fingerprint", deleted.fingerprint},
       {"uid", absl::StrCat(record.peer().uid)},
       {"peer_pid", absl::StrCat(record.peer().pid)}});
  WriteAlias(deleted, response->mutable_alias());
  return absl::OkStatus();
}

}  // namespace weightbroker
