#include "common/checkpoint/file_kind.h"

#include <algorithm>
#include <cctype>

namespace weightbroker {
namespace {

using std::literals::string_view_literals::operator""sv;

struct ForeignKind {
  std::string_view magic;  // lower case where it is text
  const char* clause;
};

constexpr char kLfs[] = "is a Git LFS pointer, not the file itself; run \"git lfs pull\" in the repository";
constexpr char kHtml[] = "is an HTML page, not weights: the download met an error or a login page; download it again";
constexpr char kZip[] =
    "is a zip archive, as torch.save writes: a pickle can run code when it is read; convert it to safetensors";
constexpr char kPickle[] = "is a Python pickle, which can run code when it is read; convert it to safetensors";
constexpr char kJson[] = "is a JSON text, not weights: an index, a config or a server's error message in their place";

// In the order in which they are tried.
constexpr ForeignKind kTextKinds[] = {
    {"version https://git-lfs"sv, kLfs},
    {"<!doctype"sv, kHtml},
    {"<html"sv, kHtml},
    {"<?xml"sv, "is an XML document, not weights: a storage server's error message; download it again"},
    {"{"sv, kJson},
    {"["sv, kJson},
};
constexpr ForeignKind kBinaryKinds[] = {
    {"PK\x03\x04"sv, kZip},
    {"PK\x05\x06"sv, kZip},
    {"\x80\x02"sv, kPickle},
    {"\x80\x03"sv, kPickle},
    {"\x80\x04"sv, kPickle},
    {"\x80\x05"sv, kPickle},
    {"GGUF"sv, "is a GGUF file; it has to be converted to safetensors"},
    {"\x89HDF"sv, "is an HDF5 file (Keras, TensorFlow); it has to be converted to safetensors"},
    {"\x93NUMPY"sv, "is a NumPy array; it has to be converted to safetensors"},
    {"\x1f\x8b"sv, "is compressed with gzip; uncompress it"},
    {"\x28\xb5\x2f\xfd"sv, "is compressed with zstd; uncompress it"},
    {"\x7f"
     "ELF"sv,
     "is a program, not weights"},
};

bool StartsWith(std::string_view text, std::string_view prefix) { return text.substr(0, prefix.size()) == prefix; }

std::string LowerWithoutLeadingSpace(std::string_view head) {
  while (!head.empty() && std::isspace(static_cast<unsigned char>(head.front())) != 0) head.remove_prefix(1);
  std::string lower(head);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

bool IsPlainText(std::string_view head) {
  return head.size() >= 8 && std::all_of(head.begin(), head.end(), [](char c) {
           return std::isprint(static_cast<unsigned char>(c)) != 0 || std::isspace(static_cast<unsigned char>(c)) != 0;
         });
}

}  // namespace

std::string DescribeForeignFile(std::string_view head) {
  for (const ForeignKind& kind : kBinaryKinds) {
    if (StartsWith(head, kind.magic)) return kind.clause;
  }
  const std::string text = LowerWithoutLeadingSpace(head);
  for (const ForeignKind& kind : kTextKinds) {
    if (StartsWith(text, kind.magic)) return kind.clause;
  }
  if (IsPlainText(head)) return "is plain text, not weights: a server's error message, perhaps; download it again";
  return "";
}

}  // namespace weightbroker
