// The largest headers that the format allows, in the shapes that cost most. What they cost is printed; the memory is
// bounded, the time only by the test's own limit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/safetensors.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/memory_files.h"
#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::RawSafetensors;
using testing::StatusIs;

// Of this process, in bytes: VmRSS or VmHWM.
int64_t Memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == field + ":" && status >> kib) return kib * 1024;
  }
  return 0;
}

void ForgetPeak() { std::ofstream("/proc/self/clear_refs") << "5"; }

struct Cost {
  absl::StatusOr<SafetensorsHeader> header;
  int64_t peak_bytes = 0;  // beyond what was there before
};

Cost Read(const std::string& what, const std::string& bytes) {
  MemoryFile file("file", bytes);
  ForgetPeak();
  const int64_t before_bytes = Memory("VmRSS");
  const std::clock_t start = std::clock();
  Cost cost{ReadSafetensorsHeader(file, "file")};
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  cost.peak_bytes = Memory("VmHWM") - before_bytes;
  std::printf("%s: header of %zu bytes, %zu tensors: %.2f s of a processor, %lld MiB at most\n", what.c_str(),
              bytes.size() - 8, cost.header.ok() ? cost.header->tensors.size() : size_t{0}, seconds,
              static_cast<long long>(cost.peak_bytes >> 20));
  return cost;
}

constexpr int64_t kMiB = int64_t{1} << 20;
// A sanitizer makes everything slower, and its memory is its own affair.
#ifdef WEIGHTBROKER_SANITIZED
constexpr int64_t kHeaderBytes = kMaxHeaderBytes / 20;
#else
constexpr int64_t kHeaderBytes = kMaxHeaderBytes;
#endif

void ExpectAtMost(int64_t limit_bytes, const Cost& cost) {
#ifndef WEIGHTBROKER_SANITIZED
  EXPECT_LE(cost.peak_bytes, limit_bytes);
#else
  (void)limit_bytes;
  (void)cost;
#endif
}

// Entries "name<number>" until the header has no room for another, then blanks up to its limit.
std::string FullHeader(const std::string& opening, const std::function<std::string(int)>& entry,
                       const std::string& closing) {
  std::string header = opening;
  for (int number = 0;; ++number) {
    const std::string next = absl::StrCat(number == 0 ? "" : ",", entry(number));
    if (header.size() + next.size() + closing.size() > static_cast<size_t>(kHeaderBytes)) break;
    header += next;
  }
  header += closing;
  return header.append(static_cast<size_t>(kHeaderBytes) - header.size(), ' ');
}

TEST(LargeHeader, OfAHundredThousandTensorsIsRead) {
  std::string header = "{";
  for (int64_t i = 0; i < 100'000; ++i) {
    absl::StrAppend(&header, i == 0 ? "" : ",", "\"model.layers.", i, ".self_attn.q_proj.weight\":{\"dtype\":\"BF16\",",
                    "\"shape\":[2,2],\"data_offsets\":[", 8 * i, ",", 8 * (i + 1), "]}");
  }
  const Cost cost = Read("100,000 tensors", RawSafetensors(header + "}", 800'000));
  ASSERT_THAT(cost.header, IsOk());
  EXPECT_EQ(cost.header->tensors.size(), 100'000u);
  ExpectAtMost(128 * kMiB, cost);
}

TEST(LargeHeader, OfAHundredMillionBytesFullOfTensorsIsRead) {
  const auto empty_tensor = [](int number) {
    return absl::StrCat("\"", number, R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
  };
  const Cost cost = Read("tensors", RawSafetensors(FullHeader("{", empty_tensor, "}")));
  ASSERT_THAT(cost.header, IsOk());
  EXPECT_GT(cost.header->tensors.size(), static_cast<size_t>(kHeaderBytes / 70));
  ExpectAtMost(1024 * kMiB, cost);
}

TEST(LargeHeader, OfAHundredMillionBytesFullOfKeysIsRead) {
  const auto entry = [](int number) { return absl::StrCat("\"", number, "\":0"); };
  const Cost cost = Read(
      "keys of an extra field",
      RawSafetensors(FullHeader(R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"extra":{)", entry, "}}}")));
  ASSERT_THAT(cost.header, IsOk());
  ExpectAtMost(1024 * kMiB, cost);
}

TEST(LargeHeader, OfAHundredMillionBytesFullOfMetadataIsRead) {
  const Cost cost = Read(
      "metadata", RawSafetensors(FullHeader(R"({"__metadata__":{)",
                                            [](int number) { return absl::StrCat("\"", number, "\":\"\""); }, "}}")));
  ASSERT_THAT(cost.header, IsOk());
  ExpectAtMost(2048 * kMiB, cost);
}

TEST(LargeHeader, OfAHundredMillionBytesInOneStringIsRefusedWithAShortMessage) {
  const std::string name(static_cast<size_t>(kHeaderBytes) - 20, 'n');
  const Cost cost = Read("one name", RawSafetensors(absl::StrCat("{\"", name, "\":[]}")));
  EXPECT_THAT(cost.header, StatusIs(Reason::kCheckpointMalformed, HasSubstr("is described by an array")));
  EXPECT_LT(cost.header.status().message().size(), 1000u);
  ExpectAtMost(1024 * kMiB, cost);
}

TEST(LargeHeader, OverAHundredMillionBytesIsRefusedUnread) {
  std::string bytes = RawSafetensors("{}");
  const uint64_t length = static_cast<uint64_t>(kMaxHeaderBytes) + 1;
  bytes.replace(0, 8, std::string(reinterpret_cast<const char*>(&length), 8));
  bytes.resize(8 + static_cast<size_t>(length), ' ');
  const Cost cost = Read("over the limit", bytes);
  EXPECT_THAT(cost.header, StatusIs(Reason::kCheckpointTooLarge));
  ExpectAtMost(16 * kMiB, cost);
}

}  // namespace
}  // namespace weightbroker
