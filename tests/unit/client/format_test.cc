#include "client/tool/format.h"

#include <gtest/gtest.h>

namespace weightbroker::tool {
namespace {

TEST(FormatBytes, IsExactForLittleAndShortForMuch) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(10'239), "10239 B");
  EXPECT_EQ(FormatBytes(10'240), "10.0 KiB");
  EXPECT_EQ(FormatBytes(90'868'376), "86.7 MiB");
  EXPECT_EQ(FormatBytes(int64_t{3} << 40), "3.0 TiB");
}

TEST(FormatSeconds, CountsMinutesFromOneOn) {
  EXPECT_EQ(FormatSeconds(0.1234), "0.123 s");
  EXPECT_EQ(FormatSeconds(125.9), "2 min 5 s");
}

TEST(FormatTable, AlignsColumnsAndEndsNoLineInSpaces) {
  EXPECT_EQ(FormatTable({{"A", "LONG", "C"}, {"value", "b", ""}}), "A      LONG  C\nvalue  b\n");
}

TEST(FormatSecondsLeft, RoundsUpAndKeepsTwoUnits) {
  EXPECT_EQ(FormatSecondsLeft(0), "1 s");
  EXPECT_EQ(FormatSecondsLeft(2.1), "3 s");
  EXPECT_EQ(FormatSecondsLeft(125), "2 min 05 s");
  EXPECT_EQ(FormatSecondsLeft(3725), "1 h 02 min");
  EXPECT_EQ(FormatSecondsLeft(-1), "1 s");
}

TEST(FormatTable, LetsNoCellControlTheTerminal) {
  EXPECT_EQ(FormatTable({{"A", "B"}, {"\x1b[2J", "\n"}}), "A        B\n\\x1b[2J  \\x0a\n");
}

TEST(FormatBar, ShowsThePartDoneAndNothingWithoutATotal) {
  EXPECT_EQ(FormatBar(1, 2, 10), "[#####.....]  50 %");
  EXPECT_EQ(FormatBar(3, 2, 4), "[####] 100 %");
  EXPECT_EQ(FormatBar(0, 0, 10), "");
}

TEST(FormatCount, SaysOneInTheSingular) {
  EXPECT_EQ(FormatCount(0, "lease"), "0 leases");
  EXPECT_EQ(FormatCount(1, "lease"), "1 lease");
  EXPECT_EQ(FormatCount(2, "lease"), "2 leases");
}

}  // namespace
}  // namespace weightbroker::tool
