#include "common/checkpoint/file_kind.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weightbroker {
namespace {

using ::testing::HasSubstr;

TEST(DescribeForeignFile, SaysWhatItIsAndWhatToDo) {
  const std::pair<const char*, const char*> expected[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"},
      {"<!DOCTYPE html><html>", "HTML page"},
      {"\n  <HTML>", "HTML page"},
      {"<?xml version=\"1.0\"?><Error>", "XML"},
      {"PK\x03\x04zip", "zip archive"},
      {"\x80\x02}q", "pickle"},
      {"GGUF\x03", "GGUF"},
      {"\x89HDF\r\n", "HDF5"},
      {"{\"error\":\"not found\"}", "JSON text"},
      {"Entry not found", "plain text"},
  };
  for (const auto& [head, clause] : expected) EXPECT_THAT(DescribeForeignFile(head), HasSubstr(clause)) << head;
}

TEST(DescribeForeignFile, SaysNothingOfWhatItDoesNotKnow) {
  EXPECT_EQ(DescribeForeignFile(""), "");
  EXPECT_EQ(DescribeForeignFile(std::string_view("\0\0\0\0\0\0\0\0", 8)), "");
  EXPECT_EQ(DescribeForeignFile("\x01\x02\x03"), "");
}

}  // namespace
}  // namespace weightbroker
