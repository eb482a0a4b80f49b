// docs/errors.md against common/base/reason.h, both ways.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/reason.h"

namespace weightbroker {
namespace {

using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

constexpr Reason kReasons[] = {
#define WEIGHTBROKER_REASON(enumerator, name, code) Reason::enumerator,
    WEIGHTBROKER_REASONS(WEIGHTBROKER_REASON)
#undef WEIGHTBROKER_REASON
};

struct Row {
  std::string reason;
  std::string code;
  std::string meaning;
  std::string remedy;
};

std::string Trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" `");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" `") - begin + 1);
}

std::vector<Row> ReadRows() {
  std::ifstream page(WEIGHTBROKER_DOCS "/errors.md");
  std::vector<Row> rows;
  for (std::string line; std::getline(page, line);) {
    if (line.rfind("| `", 0) != 0) continue;
    std::istringstream cells(line.substr(1));
    Row row;
    for (std::string* cell : {&row.reason, &row.code, &row.meaning, &row.remedy}) {
      std::getline(cells, *cell, '|');
      *cell = Trimmed(*cell);
    }
    rows.push_back(row);
  }
  return rows;
}

TEST(ErrorsPage, HasOneRowForEachReasonWithItsCode) {
  std::vector<std::string> expected;
  for (const Reason reason : kReasons) {
    expected.push_back(std::string(ReasonName(reason)) + " " + absl::StatusCodeToString(ReasonCode(reason)));
  }
  std::vector<std::string> found;
  for (const Row& row : ReadRows()) found.push_back(row.reason + " " + row.code);
  EXPECT_THAT(found, UnorderedElementsAreArray(expected));
}

TEST(ErrorsPage, SaysForEachReasonWhatItMeansAndWhatToDo) {
  std::vector<std::string> incomplete;
  for (const Row& row : ReadRows()) {
    if (row.meaning.empty() || row.remedy.empty()) incomplete.push_back(row.reason);
  }
  EXPECT_THAT(incomplete, IsEmpty());
}

}  // namespace
}  // namespace weightbroker
