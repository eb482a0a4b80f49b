#include "server/config/values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "tests/unit/endpoint/temp_folder.h"

namespace weightbroker {
namespace {

using ::testing::HasSubstr;
using ::weightbroker::testing::TempFolder;

template <typename T>
std::string WhyNot(const absl::StatusOr<T>& result) {
  return result.ok() ? "it is fine" : std::string(result.status().message());
}

TEST(ByteCount, HasBinarySuffixes) {
  EXPECT_EQ(*ParseByteCount("0"), 0);
  EXPECT_EQ(*ParseByteCount("1024"), 1024);
  EXPECT_EQ(*ParseByteCount("3KiB"), 3072);
  EXPECT_EQ(*ParseByteCount("512MiB"), int64_t{512} << 20);
  EXPECT_EQ(*ParseByteCount("80GiB"), int64_t{80} << 30);
  EXPECT_EQ(*ParseByteCount("2TiB"), int64_t{2} << 40);
}

TEST(ByteCount, RefusesOtherWordsAndWhatOverflows) {
  for (const char* text : {"", "GiB", "1GB", "1.5GiB", "-1", "1 GiB", "0x10", "8388608TiB", "9223372036854775808"}) {
    EXPECT_THAT(WhyNot(ParseByteCount(text)), HasSubstr("not a number of bytes")) << text;
  }
}

TEST(MemoryLimit, IsANumberOfBytesOrAPercentage) {
  EXPECT_EQ(*ParseMemoryLimit("3GiB"), MemoryLimit{.bytes = int64_t{3} << 30});
  EXPECT_EQ(*ParseMemoryLimit("80%"), MemoryLimit{.percent = 80});
  EXPECT_EQ(MemoryLimit{.percent = 80}.Of(1001), 800);
  EXPECT_EQ(MemoryLimit{.percent = 50}.Of(0), 1) << "nothing is granted on a guess";
  EXPECT_EQ(MemoryLimit{}.Of(1000), 0);
  for (const char* text : {"0%", "101%", "%", "8.5%", "-1%", "lots"}) {
    EXPECT_THAT(WhyNot(ParseMemoryLimit(text)), HasSubstr("percentage from 1% to 100%")) << text;
  }
}

TEST(Eviction, IsRefusedOrOfWhatIsIdle) {
  EXPECT_TRUE(*ParseEviction("idle"));
  EXPECT_FALSE(*ParseEviction("refuse"));
  EXPECT_THAT(WhyNot(ParseEviction("always")), HasSubstr("refuse or idle"));
}

TEST(Duration, HasAUnit) {
  using std::chrono::milliseconds;
  EXPECT_EQ(*ParseDuration("500ms"), milliseconds(500));
  EXPECT_EQ(*ParseDuration("5s"), milliseconds(5'000));
  EXPECT_EQ(*ParseDuration("2m"), milliseconds(120'000));
  EXPECT_EQ(*ParseDuration("0s"), milliseconds(0));
}

TEST(Duration, RefusesOtherWordsAndWhatOverflows) {
  for (const char* text : {"", "5", "s", "-1s", "+1s", "1.5s", "1h", "1 s", "9223372036854775807m"}) {
    EXPECT_FALSE(ParseDuration(text).ok()) << text;
  }
  EXPECT_FALSE(ParsePositiveDuration("0ms").ok());
  EXPECT_TRUE(ParsePositiveDuration("1ms").ok());
}

TEST(Device, IsAUuidANumberOrOneOfTwoWords) {
  for (const char* text : {"0", "15", "all", "host", "GPU-6f1c2d3e-0123-4567-89ab-0123456789ab"}) {
    EXPECT_EQ(*ParseDevice(text), text);
  }
}

TEST(Device, RefusesOtherWords) {
  for (const char* text :
       {"", "-1", "cuda:0", "GPU-6f1c", "GPU-6F1C2D3E-0123-4567-89AB-0123456789AB", "MIG-1", "10000"}) {
    EXPECT_THAT(WhyNot(ParseDevice(text)), HasSubstr("is no GPU")) << text;
  }
}

TEST(Mode, IsOctal) {
  EXPECT_EQ(*ParseMode("0660"), 0660u);
  EXPECT_EQ(*ParseMode("777"), 0777u);
  for (const char* text : {"", "0888", "rw-rw----", "1777", "07777777777777777777777777"}) {
    EXPECT_THAT(WhyNot(ParseMode(text)), HasSubstr("not a mode")) << text;
  }
}

TEST(User, IsANumberOrAName) {
  EXPECT_EQ(*ParseUser("1234"), 1234u);
  EXPECT_EQ(*ParseUser("root"), 0u);
  EXPECT_THAT(WhyNot(ParseUser("no-such-user")), HasSubstr("no user \"no-such-user\""));
  EXPECT_THAT(WhyNot(ParseUser("4294967295")), HasSubstr("not a number"));  // (uid_t)-1 means "nobody in particular"
  EXPECT_EQ(*ParseGroup("root"), 0u);
  EXPECT_THAT(WhyNot(ParseGroup("")), HasSubstr("no group"));
}

TEST(MetricsAddress, IsALoopbackPortOrNothing) {
  EXPECT_EQ(*ParseMetricsAddress("127.0.0.1:9464"), std::optional<int>(9464));
  EXPECT_EQ(*ParseMetricsAddress("127.0.0.1:0"), std::optional<int>(0));
  EXPECT_EQ(*ParseMetricsAddress(""), std::nullopt);
  for (const char* text : {"0.0.0.0:9464", "9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x"}) {
    EXPECT_THAT(WhyNot(ParseMetricsAddress(text)), HasSubstr("loopback only")) << text;
  }
}

TEST(ModelRoot, IsANameAndAFolderWithLinksResolved) {
  TempFolder folder;
  ASSERT_EQ(symlink(folder.path().c_str(), (folder / "link").c_str()), 0);

  const auto root = ParseModelRoot("llama-3.1_x=" + (folder / "link"));

  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_EQ(root->first, "llama-3.1_x");
  EXPECT_EQ(root->second, folder.path());
}

TEST(ModelRoot, RefusesWhatCannotHoldModels) {
  TempFolder folder;
  std::ofstream(folder / "file") << "x";
  EXPECT_THAT(WhyNot(ParseModelRoot("/tmp")), HasSubstr("not NAME=/PATH"));
  EXPECT_THAT(WhyNot(ParseModelRoot("=/tmp")), HasSubstr("not NAME=/PATH"));
  EXPECT_THAT(WhyNot(ParseModelRoot("a:b=/tmp")), HasSubstr("not NAME=/PATH"));
  EXPECT_THAT(WhyNot(ParseModelRoot("a=tmp")), HasSubstr("not an absolute path"));
  EXPECT_THAT(WhyNot(ParseModelRoot("a=")), HasSubstr("not an absolute path"));
  EXPECT_THAT(WhyNot(ParseModelRoot("a=/nonexistent")), HasSubstr("No such file"));
  EXPECT_THAT(WhyNot(ParseModelRoot("a=" + (folder / "file"))), HasSubstr("not a folder"));
}

TEST(Program, MustBeAFileThatMayBeRun) {
  TempFolder folder;
  std::ofstream(folder / "text") << "x";
  EXPECT_TRUE(CheckProgram("/bin/sh").ok());
  EXPECT_THAT(std::string(CheckProgram("/nonexistent").message()), HasSubstr("No such file"));
  EXPECT_THAT(std::string(CheckProgram(folder / "text").message()), HasSubstr("Permission denied"));
  EXPECT_THAT(std::string(CheckProgram(folder.path()).message()), HasSubstr("not a program"));
}

}  // namespace
}  // namespace weightbroker
