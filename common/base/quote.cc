#include "common/base/quote.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace weightbroker {
namespace {

constexpr size_t kMaxBytes = 200;

std::string Escaped(char character) {
  char buffer[8];
  std::snprintf(buffer, sizeof(buffer), "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(character)));
  return buffer;
}

// Takes the first character off `text` and appends it, escaped if it controls a terminal or is none.
void MoveCharacter(std::string_view& text, std::string& result) {
  const size_t length = Utf8SequenceLength(text);
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const bool is_control = byte(0) < 0x20 || byte(0) == 0x7F || (length == 2 && byte(0) == 0xC2 && byte(1) < 0xA0);
  if (length != 0 && !is_control) {
    result += text.substr(0, length);
  } else {
    for (const char part : text.substr(0, std::max<size_t>(length, 1))) result += Escaped(part);
  }
  text.remove_prefix(std::max<size_t>(length, 1));
}

}  // namespace

size_t Utf8SequenceLength(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return follows(1) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const bool overlong = first == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = first == 0xED && byte(1) > 0x9F;
    return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const bool overlong = first == 0xF0 && byte(1) < 0x90;
    const bool too_big = first == 0xF4 && byte(1) > 0x8F;
    return follows(1) && follows(2) && follows(3) && !overlong && !too_big ? 4 : 0;
  }
  return 0;
}

std::string Printable(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    if (result.size() >= kMaxBytes) return absl::StrCat(result, "... (", text.size(), " more bytes)");
    MoveCharacter(text, result);
  }
  return result;
}

std::string OneLine(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) MoveCharacter(text, result);
  return result;
}

std::string ToUtf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = Utf8SequenceLength(text);
    result += length == 0 ? Escaped(text[0]) : std::string(text.substr(0, length));
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

std::string_view CutUtf8(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  for (int i = 0; i < 3 && end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80; ++i) --end;
  return text.substr(0, end);
}

std::string CutUtf8WithCount(std::string_view text, size_t max_bytes) {
  const std::string_view cut = CutUtf8(text, max_bytes);
  std::string result(cut);
  if (cut.size() < text.size()) absl::StrAppend(&result, "... (", text.size() - cut.size(), " more bytes)");
  return result;
}

std::string Quote(std::string_view text) { return absl::StrCat("\"", Printable(text), "\""); }

}  // namespace weightbroker
