// How the tool shows things to people. Thread-safe: all functions are pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weightbroker::tool {

// "90,868,376 B", "1.2 GiB": exact below 10 KiB, else two digits and more in binary units.
std::string FormatBytes(int64_t bytes);

// "0.123 s", "2 min 5 s".
std::string FormatSeconds(double seconds);

// "1 lease", "2 leases".
std::string FormatCount(int64_t count, const std::string& noun);

// Columns as wide as their widest cell, two spaces between them, no line ends in spaces. The first row is the heading.
// What files and services say stands in it as OneLine has it: nothing that a terminal would obey.
std::string FormatTable(std::vector<std::vector<std::string>> rows);

// "[#####.....]  50 %": `width` marks for done/total; empty where total is 0.
std::string FormatBar(int64_t done, int64_t total, int width);

// "3 s", "2 min 05 s", "1 h 02 min"; at least one second. Rounded up.
std::string FormatSecondsLeft(double seconds);

}  // namespace weightbroker::tool
