#include "client/tool/remedy.h"

#include <span>
#include <sstream>
#include <string_view>

#include "common/base/embedded_file.h"

namespace weightbroker {

std::span<const EmbeddedFile> EmbeddedErrorsPage();

namespace tool {
namespace {

// "`A` or `B`" -> "A or B"
std::string WithoutMarks(std::string_view cell) {
  std::string text;
  for (const char c : cell) {
    if (c != '`') text.push_back(c);
  }
  const size_t begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

}  // namespace

std::string RemedyFor(const std::string& reason) {
  const std::string row_begin = "| `" + reason + "` |";
  std::istringstream page(EmbeddedErrorsPage().front().text);
  for (std::string line; std::getline(page, line);) {
    if (line.compare(0, row_begin.size(), row_begin) != 0) continue;
    const size_t end = line.find_last_of('|');
    const size_t begin = line.find_last_of('|', end - 1);
    return WithoutMarks(std::string_view(line).substr(begin + 1, end - begin - 1));
  }
  return "";
}

}  // namespace tool
}  // namespace weightbroker
