#include "server/config/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/config/arguments.h"
#include "tests/unit/endpoint/temp_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::weightbroker::testing::Arguments;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TempFolder;
using ::weightbroker::testing::WriteFile;

absl::StatusOr<FlagValues> Read(std::vector<std::string> words) {
  const Arguments arguments(std::move(words));
  return ReadFlags(arguments.argc(), arguments.argv());
}

std::vector<std::string> ValuesOf(const absl::StatusOr<FlagValues>& flags, const std::string& name) {
  EXPECT_THAT(flags, IsOk());
  if (!flags.ok() || flags->count(name) == 0) return {"(missing)"};
  return flags->at(name).values;
}

class ConfigFile : public ::testing::Test {
 protected:
  absl::StatusOr<FlagValues> ReadFile(const std::string& text, std::vector<std::string> words = {}) {
    WriteFile(file_, text);
    words.push_back("--config_file=" + file_);
    return Read(std::move(words));
  }

  TempFolder folder_;
  const std::string file_ = folder_ / "config.json";
};

TEST(Flags, AreGivenWithAnEqualsSignOrASpace) {
  const auto flags = Read({"--socket=/a/b", "--log_level", "debug"});

  EXPECT_THAT(ValuesOf(flags, "socket"), ElementsAre("/a/b"));
  EXPECT_THAT(ValuesOf(flags, "log_level"), ElementsAre("debug"));
}

TEST(Flags, HaveTheirDefaultsWhenNothingIsSaid) {
  const auto flags = Read({});

  EXPECT_THAT(ValuesOf(flags, "socket_mode"), ElementsAre("0660"));
  EXPECT_THAT(ValuesOf(flags, "metrics_address"), ElementsAre("127.0.0.1:9464"));
  EXPECT_EQ(flags->count("socket"), 0u);
}

TEST(Flags, MayBeEmpty) {
  const auto flags = Read({"--metrics_address=", "--log_level=debug"});

  EXPECT_THAT(ValuesOf(flags, "metrics_address"), ElementsAre(""));
  EXPECT_THAT(ValuesOf(flags, "log_level"), ElementsAre("debug"));
}

TEST(Flags, ListsAreRepeatedOrSeparatedByCommas) {
  EXPECT_THAT(ValuesOf(Read({"--allowed_uids=1,2", "--allowed_uids", "3"}), "allowed_uids"),
              ElementsAre("1", "2", "3"));
}

TEST(Flags, ModelRootsAreRepeatedAndMayHaveCommasInTheirPath) {
  EXPECT_THAT(ValuesOf(Read({"--model_roots=a=/x,y", "--model_roots=b=/z"}), "model_roots"),
              ElementsAre("a=/x,y", "b=/z"));
}

TEST(Flags, RefusesAnUnknownOneNamingTheNearest) {
  const auto flags = Read({"--sockets=/a"});

  EXPECT_THAT(flags, StatusIs(Reason::kConfigurationInvalid, HasSubstr("no flag --sockets; the nearest is --socket ")));
  EXPECT_THAT(flags, HasMetadata("nearest", "socket"));
  EXPECT_THAT(Read({"--model-roots=a=/x"}), HasMetadata("nearest", "model_roots"));
}

TEST(Flags, RefusesWordsThatAreNoFlags) {
  EXPECT_THAT(Read({"serve"}), StatusIs(Reason::kConfigurationInvalid, HasSubstr("\"serve\" is not a flag")));
}

TEST(Flags, RefusesASingleValueGivenTwice) {
  EXPECT_THAT(Read({"--socket=/a", "--socket=/b"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("--socket: is given more than once")));
}

TEST(Flags, RefusesAFlagWithoutItsValue) {
  EXPECT_THAT(Read({"--socket"}), StatusIs(Reason::kConfigurationInvalid, HasSubstr("--socket")));
}

TEST(Flags, HelpNamesEveryOneThatIsForPeople) {
  const std::string help = FlagHelp("weightbrokerd");
  std::vector<std::string> left_out;
  for (const FlagRow& row : FlagRows()) {
    if (help.find(absl::StrCat("  --", row.name, *row.value_name != '\0' ? "=" : "\n")) == std::string::npos) {
      left_out.push_back(row.name);
    }
  }
  EXPECT_THAT(left_out, ElementsAre("listen_fd", "keeper_fd", "resume_fd", "check_resume"));
}

TEST(Flags, TakesNoInternalOneForTheNearest) {
  EXPECT_THAT(Read({"--keeper_f=3"}), StatusIs(Reason::kConfigurationInvalid, Not(HasSubstr("--keeper_fd"))));
}

std::string ReadDocument() {
  std::ifstream stream(WEIGHTBROKER_TEST_DATA "/../../docs/configuration.md");
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

TEST(Flags, AreDocumentedInTheSameRows) {
  std::string rows;
  for (const FlagRow& row : FlagRows()) {
    const auto code = [](const char* text) { return *text == '\0' ? std::string() : absl::StrCat("`", text, "`"); };
    absl::StrAppend(&rows, "| `", row.name, "` | ", code(row.value_name), " | ", code(row.default_value), " | ",
                    row.help, " |\n");
  }
  EXPECT_THAT(ReadDocument(), HasSubstr("|---|---|---|---|\n" + rows + "\n"));
}

TEST_F(ConfigFile, IsAsDocumented) {
  const std::string document = ReadDocument();
  const size_t begin = document.find("```json\n") + strlen("```json\n");

  EXPECT_THAT(ReadFile(document.substr(begin, document.find("```", begin) - begin)), IsOk());
}

TEST(ConfigFileExample, IsReadAsItIsInstalled) {
  EXPECT_THAT(Read({"--config_file=" WEIGHTBROKER_TEST_DATA "/../../deploy/systemd/weightbroker.json.example"}),
              IsOk());
}

TEST_F(ConfigFile, GivesWhatTheCommandLineDoesNot) {
  const auto flags =
      ReadFile(R"({"socket": "/from/file", "log_level": "error", "reader_threads": 7})", {"--socket=/from/line"});

  EXPECT_THAT(ValuesOf(flags, "socket"), ElementsAre("/from/line"));
  EXPECT_THAT(ValuesOf(flags, "log_level"), ElementsAre("error"));
  EXPECT_THAT(ValuesOf(flags, "reader_threads"), ElementsAre("7"));
  EXPECT_EQ(flags->at("log_level").source, file_ + ": log_level");
}

TEST_F(ConfigFile, HasListsAsArrays) {
  const auto flags = ReadFile(R"({"allowed_uids": [1000, "nobody"], "model_roots": ["a=/x", "b=/y"]})");

  EXPECT_THAT(ValuesOf(flags, "allowed_uids"), ElementsAre("1000", "nobody"));
  EXPECT_THAT(ValuesOf(flags, "model_roots"), ElementsAre("a=/x", "b=/y"));
}

TEST_F(ConfigFile, RefusesAnUnknownKeyNamingFileKeyAndTheNearest) {
  const auto flags = ReadFile(R"({"alowed_uids": [1]})");

  EXPECT_THAT(flags, StatusIs(Reason::kConfigurationInvalid, AllOf(HasSubstr(file_), HasSubstr("alowed_uids"),
                                                                   HasSubstr("nearest is \"allowed_uids\""))));
  EXPECT_THAT(flags, HasMetadata("file", file_));
  EXPECT_THAT(flags, HasMetadata("key", "alowed_uids"));
  EXPECT_THAT(flags, HasMetadata("nearest", "allowed_uids"));
}

TEST_F(ConfigFile, RefusesWhatBelongsOnTheCommandLine) {
  EXPECT_THAT(ReadFile(R"({"listen_fd": 3})"), StatusIs(Reason::kConfigurationInvalid, HasSubstr("as --listen_fd")));
  EXPECT_THAT(ReadFile(R"({"config_file": "/x"})"), StatusIs(Reason::kConfigurationInvalid));
}

TEST_F(ConfigFile, RefusesValuesOfAnotherType) {
  for (const char* value : {"null", "true", "1.5", "{}", "[\"a\"]"}) {
    EXPECT_THAT(ReadFile(std::string("{\"socket\": ") + value + "}"),
                StatusIs(Reason::kConfigurationInvalid, HasSubstr("string or a whole number")))
        << value;
  }
}

TEST_F(ConfigFile, RefusesWhatIsNoJsonObject) {
  for (const char* text : {"", "{", "[]", "{\"socket\": \"/a\", \"socket\": \"/b\"}", "socket=/a"}) {
    EXPECT_THAT(ReadFile(text), StatusIs(Reason::kConfigurationInvalid, HasSubstr(file_))) << text;
  }
}

TEST_F(ConfigFile, MustBeThere) {
  EXPECT_THAT(Read({"--config_file=/nonexistent.json"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("--config_file: ")));
  EXPECT_THAT(Read({"--config_file=/nonexistent.json"}), HasMetadata("file", "/nonexistent.json"));
  EXPECT_THAT(Read({"--config_file="}), StatusIs(Reason::kConfigurationInvalid));
  EXPECT_THAT(Read({"--config_file=" + folder_.path()}), StatusIs(Reason::kConfigurationInvalid));
}

}  // namespace
}  // namespace weightbroker
