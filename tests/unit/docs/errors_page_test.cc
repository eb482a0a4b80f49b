// docs/errors.md against common/base/reason.h, both ways: and that what is compared would tell if they differed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/base/reason.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Reason kReasons[] = {
#define WEIGHTBROKER_REASON(enumerator, name, code) Reason::enumerator,
    WEIGHTBROKER_REASONS(WEIGHTBROKER_REASON)
#undef WEIGHTBROKER_REASON
};

std::string ReadPage() {
  std::ifstream page(WEIGHTBROKER_DOCS "/errors.md");
  std::ostringstream text;
  text << page.rdbuf();
  return text.str();
}

std::string Trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" `");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" `") - begin + 1);
}

// "| a | b |" -> "a", "b"
std::vector<std::string> CellsOf(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream text(line.substr(1));
  for (std::string cell; std::getline(text, cell, '|');) cells.push_back(Trimmed(cell));
  return cells;
}

// What is wrong with one row; empty if nothing is.
std::string FaultOf(const std::vector<std::string>& cells, const std::map<std::string, std::string>& codes) {
  if (cells.size() != 4) return "has " + std::to_string(cells.size()) + " cells instead of 4";
  const auto code = codes.find(cells[0]);
  if (code == codes.end()) return "is no reason";
  if (code->second != cells[1]) return "has the code " + code->second + " in the code";
  if (cells[2].empty()) return "does not say what it means";
  if (cells[3].empty()) return "does not say what to do";
  return "";
}

// Everything in which a page differs from the table in the code, one sentence each.
std::vector<std::string> FaultsOf(const std::string& page) {
  std::map<std::string, std::string> codes;
  for (const Reason reason : kReasons) {
    codes[std::string(ReasonName(reason))] = absl::StatusCodeToString(ReasonCode(reason));
  }
  std::vector<std::string> faults;
  std::set<std::string> found;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("| `", 0) != 0) continue;
    const std::vector<std::string> cells = CellsOf(line);
    if (const std::string fault = FaultOf(cells, codes); !fault.empty()) faults.push_back(cells[0] + " " + fault);
    if (!found.insert(cells[0]).second) faults.push_back(cells[0] + " is there twice");
  }
  for (const auto& [reason, code] : codes) {
    if (found.count(reason) == 0) faults.push_back(reason + " has no row");
  }
  return faults;
}

// The page with one line in place of the row of DRAINING; the row itself comes back in `row`.
std::string PageWith(const std::string& line, std::string* row = nullptr) {
  std::string page = ReadPage();
  const size_t begin = page.find("| `DRAINING` |");
  const size_t end = page.find('\n', begin);
  if (row != nullptr) *row = page.substr(begin, end - begin);
  return page.replace(begin, end - begin, line);
}

TEST(ErrorsPage, HasOneRowForEachReasonWithItsCodeWhatItMeansAndWhatToDo) {
  EXPECT_THAT(FaultsOf(ReadPage()), IsEmpty());
}

TEST(ErrorsPage, WouldBeFoundToLackARow) { EXPECT_THAT(FaultsOf(PageWith("")), ElementsAre("DRAINING has no row")); }

TEST(ErrorsPage, WouldBeFoundToHaveARowOfNoReason) {
  std::string row;
  PageWith("", &row);
  EXPECT_THAT(FaultsOf(PageWith(row + "\n| `DRAINED` | UNAVAILABLE | It is. | Wait. |")),
              ElementsAre("DRAINED is no reason"));
}

TEST(ErrorsPage, WouldBeFoundToHaveARowTwice) {
  std::string row;
  PageWith("", &row);
  EXPECT_THAT(FaultsOf(PageWith(row + "\n" + row)), ElementsAre("DRAINING is there twice"));
}

TEST(ErrorsPage, WouldBeFoundToHaveAnIncompleteRow) {
  EXPECT_THAT(FaultsOf(PageWith("| `DRAINING` | UNAVAILABLE | It is shutting down. | |")),
              ElementsAre("DRAINING does not say what to do"));
  EXPECT_THAT(FaultsOf(PageWith("| `DRAINING` | UNAVAILABLE |  | Wait. |")),
              ElementsAre("DRAINING does not say what it means"));
  EXPECT_THAT(FaultsOf(PageWith("| `DRAINING` | UNAVAILABLE | Wait. |")),
              ElementsAre("DRAINING has 3 cells instead of 4"));
  EXPECT_THAT(FaultsOf(PageWith("| `DRAINING` | NOT_FOUND | It is. | Wait. |")),
              ElementsAre("DRAINING has the code UNAVAILABLE in the code"));
}

}  // namespace
}  // namespace weightbroker
