#include "client/tool/validators.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
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

}  // namespace weightbroker::tool
