#include "server/broker/names.h"

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

constexpr int kMaxHandleKinds = 16;

std::string WithoutPrefix(const std::string& name, const std::string& prefix) {
  return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : name;
}

}  // namespace

std::string StateName(v1::WeightSetState state) {
  return WithoutPrefix(v1::WeightSetState_Name(state), "WEIGHT_SET_STATE_");
}

std::string HandleKindName(v1::HandleKind kind) {
  if (!v1::HandleKind_IsValid(kind)) return absl::StrCat(static_cast<int>(kind));
  return WithoutPrefix(v1::HandleKind_Name(kind), "HANDLE_KIND_");
}

std::string JoinHandleKinds(std::span<const v1::HandleKind> kinds) {
  std::string joined;
  for (const v1::HandleKind kind : kinds) absl::StrAppend(&joined, joined.empty() ? "" : ", ", HandleKindName(kind));
  return joined;
}

absl::Status CheckHandleKindCount(int count) {
  if (count <= kMaxHandleKinds) return absl::OkStatus();
  return MakeError(
      Reason::kInvalidArgument,
      absl::StrCat("handle_kinds has ", count, " entries; at most ", kMaxHandleKinds, " are allowed"),
      {{"field", "handle_kinds"}, {"found", absl::StrCat(count)}, {"allowed", absl::StrCat(kMaxHandleKinds)}});
}

}  // namespace weightbroker
