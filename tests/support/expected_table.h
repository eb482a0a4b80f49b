// Reads tests/data/*/EXPECTED.tsv: one header line, then rows of cells between tabs.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {

struct ExpectedRow {
  std::string file;      // the first cell
  std::string expected;  // the second
};

inline std::vector<ExpectedRow> ReadExpectedTable(const std::string& path) {
  std::istringstream lines(ReadFile(path));
  std::vector<ExpectedRow> rows;
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line)) {
    std::istringstream cells(line);
    ExpectedRow row;
    std::getline(cells, row.file, '\t');
    std::getline(cells, row.expected, '\t');
    rows.push_back(row);
  }
  return rows;
}

}  // namespace weightbroker::testing
