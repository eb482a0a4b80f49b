#include "client/tool/validators.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/tool/find_set.h"
#include "common/base/alias_name.h"
#include "common/base/quote.h"

namespace weightbroker::tool {

CLI::Validator WholeNumberFrom(int64_t least) {
  const auto check = [least](const std::string& text) -> std::string {
    int64_t value = 0;
    if (absl::SimpleAtoi(text, &value) && value >= least) return {};
    return absl::StrCat(Quote(text), " is not a whole number of at least ", least);
  };
  return CLI::Validator(check, absl::StrCat("AT LEAST ", least));
}

CLI::Validator Seconds() {
  constexpr double kLeast = 0.001;
  constexpr double kMost = 1e9;
  const auto check = [](const std::string& text) -> std::string {
    double seconds = 0;
    if (absl::SimpleAtod(text, &seconds) && seconds >= kLeast && seconds <= kMost) return {};
    return absl::StrCat(Quote(text), " is not a number of seconds from 0.001 to 1000000000");
  };
  return CLI::Validator(check, "SECONDS");
}

CLI::Validator Utf8() {
  const auto check = [](const std::string& text) -> std::string {
    if (ToUtf8(text) == text) return {};
    return absl::StrCat(Quote(text), " is not UTF-8");
  };
  return CLI::Validator(check, "");
}

namespace {

std::string CheckFingerprint(const std::string& text) {
  if (IsFingerprint(text)) return {};
  return absl::StrCat(Quote(text), " is no fingerprint, of which 8 to 64 lower-case hexadecimal digits are needed");
}

}  // namespace

CLI::Validator FingerprintDigits() { return CLI::Validator(CheckFingerprint, ""); }

CLI::Validator FingerprintDigitsOrNone() {
  const auto check = [](const std::string& text) -> std::string {
    const std::string fault = text == "none" ? "" : CheckFingerprint(text);
    return fault.empty() ? fault : absl::StrCat(fault, R"(, nor "none")");
  };
  return CLI::Validator(check, "");
}

CLI::Validator AliasName() {
  const auto check = [](const std::string& text) { return std::string(CheckAliasName(text).message()); };
  return CLI::Validator(check, "");
}

}  // namespace weightbroker::tool
