// load_bench from its flags to its JSON, with a model of a few megabytes and without rivals that anyone has installed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/integration/program.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;

// A program that takes the place of a Python with one rival, whose tensors have digests that no file has.
constexpr char kLyingPython[] = R"(#!/bin/sh
if [ "$2" = probe ]; then
  echo '{"python": "3", "torch": "2", "arms": {"liar": {"version": "1.0"}, "nobody": {"absent": "no such module"}}}'
  exit
fi
for last; do :; done
echo '{"a": "00"}' >"$last"
echo '{"load_seconds": 1, "exec_seconds": 1, "cpu_seconds": 1, "bytes": 1}'
)";

class LoadBench : public ::testing::Test {
 protected:
  std::string WriteProgram(const std::string& name, const std::string& text) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream(path) << text;
    chmod(path.c_str(), 0755);
    return path;
  }

  nlohmann::json Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--json", "--gib", "0.01", "--rounds", "1", "--cache", "warm", "--folder",
                                       folder_.path() + "/models"});
    const Finished finished = RunProgram("load_bench", arguments);
    EXPECT_TRUE(finished.exit.success()) << finished.errors;
    return nlohmann::json::parse(finished.output, nullptr, /*allow_exceptions=*/false);
  }

  TemporaryFolder folder_;
};

TEST_F(LoadBench, SaysCeilingsArmsAndWhatEachSampleUsed) {
  const nlohmann::json report = Run({"--python", "/nonexistent", "--arms", "ours,read,ours_fp8_block,ours_tp2", "--tp",
                                     "2", "--quantize", "fp8_block"});
  ASSERT_TRUE(report.is_object());
  EXPECT_TRUE(report["rivals"].contains("absent"));
  EXPECT_TRUE(report["machine"].contains("kernel"));
  const nlohmann::json& size = report["sizes"][0];
  const nlohmann::json& state = size["states"][0];
  for (const char* const ceiling : {"copy", "read_cached", "fill"}) {
    EXPECT_GT(state["ceilings"][ceiling]["bytes_per_second"]["median"], 0) << ceiling;
  }
  for (const char* const name : {"ours", "read", "ours_fp8_block", "ours_tp2"}) {
    const nlohmann::json& arm = state["arms"][name];
    EXPECT_GT(arm["share_of_lower_ceiling"], 0) << name;
    EXPECT_EQ(arm["samples"].size(), 1) << name;
    for (const char* const figure : {"load_seconds", "exec_seconds", "cpu_seconds", "peak_resident_bytes"}) {
      EXPECT_GT(arm["figures"][figure]["median"], 0) << name << " " << figure;
    }
  }
  EXPECT_EQ(state["arms"]["ours"]["checksums"], "equal to the files'");
  EXPECT_EQ(state["arms"]["ours"]["figures"]["read_bytes"]["median"], size["bytes"]);
  EXPECT_EQ(state["arms"]["ours_tp2"]["figures"]["read_bytes"]["median"], size["bytes"]);
}

TEST_F(LoadBench, GivesNoFigureOfAnArmWhoseBytesAreNotTheFiles) {
  const nlohmann::json report = Run({"--python", WriteProgram("python", kLyingPython), "--arms", "read,liar"});
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report["rivals"]["arms"]["nobody"]["absent"], "no such module");
  const nlohmann::json& liar = report["sizes"][0]["states"][0]["arms"]["liar"];
  EXPECT_THAT(liar.value("failed", ""), HasSubstr("other bytes than the files"));
  EXPECT_FALSE(liar.contains("bytes_per_second"));
}

TEST_F(LoadBench, LoadsWithTheFlagsThatAnArmNames) {
  const std::string name = "ours:reader_threads=1:read_chunk=65536:read_method=pread";
  const nlohmann::json report = Run({"--arms", name});
  ASSERT_TRUE(report.is_object());
  const nlohmann::json& sample = report["sizes"][0]["states"][0]["arms"][name]["samples"][0];
  EXPECT_EQ(sample["reader_threads"], 1);
  EXPECT_EQ(sample["chunk_bytes"], 65536 + 4096) << "the longest read, with its ends rounded out";
}

TEST_F(LoadBench, RefusesAnArmWithFlagsThatThereAreNot) {
  for (const char* const arm : {"ours:threads=1", "ours:reader_threads=0", "ours:read_method=dd", "ours:read_chunk"}) {
    const Finished finished = RunProgram(
        "load_bench", {"--gib", "0.01", "--rounds", "1", "--folder", folder_.path() + "/models", "--arms", arm});
    EXPECT_FALSE(finished.exit.success()) << arm;
    EXPECT_THAT(finished.errors, HasSubstr("allowed are reader_threads=N")) << arm;
  }
}

TEST_F(LoadBench, RefusesFlagsOfAnArmThatIsNotOurs) {
  for (const char* const arm : {"read:reader_threads=1", "ours_tp2:reader_threads=1"}) {
    const Finished finished = RunProgram(
        "load_bench", {"--gib", "0.01", "--rounds", "1", "--folder", folder_.path() + "/models", "--arms", arm});
    EXPECT_FALSE(finished.exit.success()) << arm;
    EXPECT_THAT(finished.errors, HasSubstr("before its flags, allowed are ours")) << arm;
  }
}

TEST_F(LoadBench, ShowsHowALoadGoesWithThreadsChunksAndTensors) {
  const nlohmann::json report = Run({"--scaling"});
  ASSERT_TRUE(report.is_object());
  for (const char* const table : {"reader_threads", "reads_per_thread", "chunk_bytes", "tensors"}) {
    EXPECT_GE(report["scaling"][table].size(), 5) << table;
    for (const auto& [value, row] : report["scaling"][table].items()) {
      EXPECT_GT(row["bytes_per_second"]["median"], 0) << table << " " << value;
    }
  }
}

}  // namespace
}  // namespace weightbroker::testing
