#include "common/base/alias_name.h"

#include <string_view>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"

namespace weightbroker {
namespace {

bool IsPlainWord(std::string_view word) {
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
  return !word.empty() && word.find_first_not_of(kPlain) == std::string_view::npos;
}

}  // namespace

bool IsAliasName(const std::string& text) {
  const size_t at = text.find('@');
  if (at == std::string::npos || text.size() > kMaxAliasNameBytes) return false;
  const std::string_view view = text;
  return IsPlainWord(view.substr(0, at)) && IsPlainWord(view.substr(at + 1));
}

absl::Status CheckAliasName(const std::string& text) {
  if (IsAliasName(text)) return absl::OkStatus();
  return MakeError(
      Reason::kInvalidArgument,
      absl::StrCat(Quote(text),
                   " is no alias: give NAME@TAG, for instance llama@live, of letters, digits, \"_\", \".\" "
                   "and \"-\", at most ",
                   kMaxAliasNameBytes, " characters in all"),
      {{"field", "alias"}, {"found", Printable(text)}});
}

}  // namespace weightbroker
