#include "common/base/quote.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weightbroker {
namespace {

using ::testing::HasSubstr;

TEST(Quote, LeavesUtf8AndEscapesTheRest) {
  EXPECT_EQ(Quote("l\xc3\xa9.\xf0\x9f\x98\x80"), "\"l\xc3\xa9.\xf0\x9f\x98\x80\"");
  EXPECT_EQ(Printable(std::string_view("a\n\0\x7f", 4)), "a\\x0a\\x00\\x7f");
}

TEST(Quote, EscapesBytesThatAreNotUtf8) {
  EXPECT_EQ(Printable("\xff"), "\\xff");
  EXPECT_EQ(Printable("\xc0\x80"), "\\xc0\\x80");                    // overlong
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // past U+10FFFF
  EXPECT_EQ(Printable("\xe2\x82"), "\\xe2\\x82");                    // cut short
}

TEST(Quote, CutsLongTextAndSaysHowMuchIsLeft) {
  EXPECT_THAT(Printable(std::string(1000, 'x')), HasSubstr("x... (800 more bytes)"));
}

TEST(Quote, CutsBetweenCharactersAndSaysHowMuchIsLeft) {
  EXPECT_EQ(CutUtf8("l\xc3\xa9", 3), "l\xc3\xa9");
  EXPECT_EQ(CutUtf8("l\xc3\xa9", 2), "l");
  EXPECT_EQ(CutUtf8("\xf0\x9f\x98\x80", 3), "");
  EXPECT_EQ(CutUtf8WithCount("l\xc3\xa9", 2), "l... (2 more bytes)");
}

TEST(Quote, EscapesTheControlCharactersThatTerminalsKnowBesidesThoseOfAscii) {
  EXPECT_EQ(Printable("a\xc2\x9b"
                      "2J"),
            "a\\xc2\\x9b2J");
  EXPECT_EQ(Printable("\xc2\xa0"), "\xc2\xa0");
}

TEST(Quote, PutsTextOfAnyLengthOnOneLine) {
  EXPECT_EQ(OneLine(std::string(1000, 'x') + "\x1b[2J\n"), std::string(1000, 'x') + "\\x1b[2J\\x0a");
}

TEST(Quote, MakesUtf8OfAnythingAndLeavesWhatIs) { EXPECT_EQ(ToUtf8("a\n\xc3\xa9\xc3"), "a\n\xc3\xa9\\xc3"); }

}  // namespace
}  // namespace weightbroker
