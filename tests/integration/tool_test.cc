// The command-line tool against a real service: what it prints and what it exits with.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "common/base/unique_fd.h"
#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class ToolTest : public ::testing::Test {
 protected:
  void SetUp() override { CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service_.NewModel("small")); }

  Finished Tool(const std::string& command, const std::vector<std::string>& more = {}) const {
    return RunProgram("weightbroker", service_.ToolFlags(command, more));
  }

  // Of `alias`, whose flags stand behind a command of its own.
  Finished Alias(std::vector<std::string> words) const {
    words.insert(words.begin(), "alias");
    words.insert(words.end(), {"--socket", service_.socket()});
    return RunProgram("weightbroker", words);
  }

  Finished Register() const { return Tool("register", {"models:small", "--torch_version", "any", "--json"}); }

  const Service service_;
};

TEST_F(ToolTest, TellsAServiceThatDoesNotAnswerFromNone) {
  const auto broker = static_cast<pid_t>(service_.Health()->process_id());
  kill(broker, SIGSTOP);

  const Finished tool = Tool("list", {"--timeout", "0.5", "--json"});

  kill(broker, SIGCONT);
  EXPECT_EQ(tool.exit.code, 4);
  EXPECT_THAT(tool.json["message"].get<std::string>(), HasSubstr("the service hangs: see its log"));
}

TEST_F(ToolTest, SaysInJsonWhatIsWrongWithTheCommandLine) {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"register", "--json"}, {"status", "--bogus", "--json"}, {"regster", "models:small", "--json"}}) {
    const Finished tool = RunProgram("weightbroker", words);

    EXPECT_EQ(tool.exit.code, 2) << words[0];
    EXPECT_EQ(tool.json["ok"], false) << words[0];
    EXPECT_EQ(tool.json["reason"], "INVALID_ARGUMENT") << words[0];
    EXPECT_THAT(tool.json["message"].get<std::string>(), Not(IsEmpty())) << words[0];
  }
}

TEST_F(ToolTest, RegistersByTheFirstKindOfHandleThatIsToBeHad) {
  const Finished refused =
      Tool("register", {"models:small", "--torch_version", "any", "--handle_kinds", "CUDA_IPC", "--json"});
  const Finished unknown = Tool("register", {"models:small", "--torch_version", "any", "--handle_kinds", "CUDA"});
  const Finished registered = Tool("register", {"models:small", "--torch_version", "any", "--handle_kinds",
                                                "CUDA_IPC,HOST_MEMFD", "--devices", "host", "--json"});

  EXPECT_EQ(refused.json["metadata"]["wanted"], "CUDA_IPC") << refused.output;
  EXPECT_EQ(unknown.exit.code, 2);
  ASSERT_EQ(registered.exit.code, 0) << registered.errors;
  EXPECT_EQ(registered.json["shards"][0]["handle_kind"], "HANDLE_KIND_HOST_MEMFD");
}

TEST_F(ToolTest, RegistersListsAndUnregisters) {
  const Finished registered = Register();
  ASSERT_EQ(registered.exit.code, 0) << registered.errors;
  EXPECT_EQ(registered.json["state"], "WEIGHT_SET_STATE_RESIDENT");
  const std::string fingerprint = registered.json["fingerprint"];

  const Finished table = Tool("list");
  EXPECT_EQ(table.exit.code, 0);
  EXPECT_THAT(table.output, HasSubstr("FINGERPRINT"));
  EXPECT_THAT(table.output, HasSubstr(fingerprint.substr(0, 12)));
  EXPECT_THAT(table.output, HasSubstr("RESIDENT"));
  const Finished list = Tool("list", {"--json"});
  EXPECT_EQ(list.json["weight_sets"][0]["fingerprint"], fingerprint);

  const Finished unregistered = Tool("unregister", {fingerprint.substr(0, 8), "--json"});
  ASSERT_EQ(unregistered.exit.code, 0) << unregistered.errors;
  EXPECT_EQ(unregistered.json["weight_set"]["fingerprint"], fingerprint);
  EXPECT_THAT(Tool("health").output, HasSubstr("IDLE"));
}

TEST_F(ToolTest, AsksTheServiceThatTheFlagNamesWhateverTheEnvironmentSays) {
  const TemporaryFolder folder;
  setenv("WEIGHTBROKER_SOCKET", service_.socket().c_str(), 1);

  const Finished named = RunProgram("weightbroker", {"list", "--socket", folder / "none.sock", "--timeout", "1"});
  const Finished unnamed = RunProgram("weightbroker", {"list"});

  unsetenv("WEIGHTBROKER_SOCKET");
  EXPECT_EQ(named.exit.code, 4) << named.output;
  EXPECT_EQ(unnamed.exit.code, 0) << unnamed.errors;
}

TEST_F(ToolTest, FailsWhereWhatItPrintsCannotBeWritten) {
  const std::string command = "'" WEIGHTBROKER_BIN_DIR "/weightbroker' list --socket '" + service_.socket() + "'";

  const int status = std::system((command + " >/dev/full 2>/dev/null").c_str());

  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 3);
}

TEST_F(ToolTest, TakesNoTimeToWaitThatIsNone) {
  for (const char* seconds : {"0", "-1", "nan", "1e300", "9223372036854775807", "soon"}) {
    const Finished tool = Tool("list", {"--timeout", seconds});
    EXPECT_EQ(tool.exit.code, 2) << seconds;
    EXPECT_THAT(tool.errors, HasSubstr("number of seconds from 0.001 to")) << seconds;
  }
}

TEST_F(ToolTest, ReturnsAtOnceWithoutWaiting) {
  const Finished registered = Tool("register", {"models:small", "--torch_version", "any", "--no_wait", "--json"});

  ASSERT_EQ(registered.exit.code, 0) << registered.errors;
  EXPECT_THAT(registered.json["fingerprint"], Not(IsEmpty()));
}

TEST_F(ToolTest, ShowsHealthAsTableAndAsJson) {
  ASSERT_EQ(Register().exit.code, 0);

  const Finished table = Tool("health");
  const Finished json = Tool("health", {"--json"});

  EXPECT_EQ(table.exit.code, 0);
  EXPECT_THAT(table.output, HasSubstr("READY"));
  EXPECT_THAT(table.output, HasSubstr("models"));
  EXPECT_EQ(json.json["status"], "STATUS_READY");
  EXPECT_EQ(json.json["lease_count"], 0);
}

TEST_F(ToolTest, ExitsWithThreeWhereTheServiceRefuses) {
  ASSERT_EQ(Register().exit.code, 0);
  const auto weights = service_.Attach("small");
  ASSERT_TRUE(weights.ok());

  const Finished refused = Tool("unregister", {weights->fingerprint(), "--json"});

  EXPECT_EQ(refused.exit.code, 3);
  EXPECT_EQ(refused.json["ok"], false);
  EXPECT_EQ(refused.json["reason"], "LEASED");
  EXPECT_THAT(refused.errors, HasSubstr("reason: LEASED"));
}

TEST_F(ToolTest, ExitsWithTwoForWrongUsage) {
  EXPECT_EQ(RunProgram("weightbroker", {}).exit.code, 2);
  EXPECT_EQ(RunProgram("weightbroker", {"inspect"}).exit.code, 2);
  EXPECT_EQ(Tool("register", {"models:small"}).exit.code, 2) << "the torch version is required";
  EXPECT_EQ(Tool("list", {"--no_such_flag"}).exit.code, 2);
  EXPECT_EQ(RunProgram("weightbroker", {"--help"}).exit.code, 0);
}

TEST_F(ToolTest, ListsTheCommandsToWhoeverNamesNoneOfThem) {
  const Finished tool = RunProgram("weightbroker", {"regster", "models:small"});

  EXPECT_EQ(tool.exit.code, 2);
  EXPECT_THAT(tool.errors, HasSubstr("there is no command \"regster\"; these are: inspect, plan, register"));
}

TEST_F(ToolTest, SaysWhatANumberMustBe) {
  for (const char* number : {"0", "-1", "1.5", "two"}) {
    const Finished tool = Tool("register", {"models:small", "--torch_version", "any", "--tp", number});
    EXPECT_EQ(tool.exit.code, 2) << number;
    EXPECT_THAT(tool.errors, HasSubstr("\"" + std::string(number) + "\" is not a whole number of at least 1"));
  }
}

TEST_F(ToolTest, TakesNoNameThatARequestCannotHold) {
  const Finished tool = Tool("register", {"models:\xff", "--torch_version", "any"});

  EXPECT_EQ(tool.exit.code, 2);
  EXPECT_THAT(tool.errors, HasSubstr("\"models:\\xff\" is not UTF-8"));
}

TEST_F(ToolTest, SaysWhatIsNeitherAFingerprintNorAModel) {
  for (const char* weights : {"0123456", "0123456789ABCDEF", "small"}) {
    const Finished tool = Tool("export", {weights});
    EXPECT_EQ(tool.exit.code, 2) << weights;
    EXPECT_THAT(tool.errors, HasSubstr("8 to 64 lower-case hexadecimal digits")) << weights;
  }
}

// A value that cannot be one is wrong usage, whoever would find out.
TEST_F(ToolTest, ExitsWithTwoForWhatCannotBeAFingerprintOrAnAlias) {
  const std::string whole(64, 'a');
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"unregister", "0123"},
                                             {"unregister", "models:small"},
                                             {"unregister", whole + "a"},
                                             {"scrub", "0123456789ABCDEF"},
                                             {"alias", "set", "small", whole},
                                             {"alias", "set", "small@live@now", whole},
                                             {"alias", "set", "small@live", "small"},
                                             {"alias", "set", "small@live", whole, "--expected", "0123"},
                                             {"alias", "delete", "live"},
                                             {"alias", "delete", "small@live", "--expected", "nothing"}}) {
    const std::vector<std::string> more(words.begin() + 1, words.end());
    const Finished tool = words.front() == "alias" ? Alias(more) : Tool(words.front(), more);
    EXPECT_EQ(tool.exit.code, 2) << ::testing::PrintToString(words) << tool.errors;
    EXPECT_THAT(tool.errors, ::testing::AnyOf(HasSubstr("hexadecimal digits"), HasSubstr("give NAME@TAG")));
  }
}

TEST_F(ToolTest, ExpectsAFingerprintOfWhichSomeDigitsAreGiven) {
  const std::string fingerprint = Register().json["fingerprint"];
  ASSERT_EQ(Alias({"set", "small@live", fingerprint, "--expected", "none"}).exit.code, 0);
  const Finished other = Tool("register", {"models:small", "--torch_version", "any", "--dtype", "F16", "--json"});
  const std::string second = other.json["fingerprint"];

  const Finished unknown = Alias({"set", "small@live", second, "--expected", "0123456789", "--json"});
  const Finished conflict = Alias({"set", "small@live", second, "--expected", "none", "--json"});
  const Finished moved = Alias({"set", "small@live", second, "--expected", fingerprint.substr(0, 8)});
  const Finished removed = Alias({"delete", "small@live", "--expected", second.substr(0, 12)});

  EXPECT_EQ(unknown.exit.code, 3);
  EXPECT_EQ(unknown.json["reason"], "WEIGHT_SET_UNKNOWN");
  EXPECT_EQ(conflict.json["reason"], "ALIAS_CONFLICT");
  EXPECT_EQ(moved.exit.code, 0) << moved.errors;
  EXPECT_EQ(removed.exit.code, 0) << removed.errors;
}

TEST_F(ToolTest, SaysHowFarALoadWasThatTookTooLong) {
  WriteSparseModel(service_.NewModel("large"));

  const Finished tool =
      Tool("register", {"models:large", "--torch_version", "any", "--load_timeout", "0.05", "--json"});

  EXPECT_EQ(tool.exit.code, 4) << tool.output;
  EXPECT_EQ(tool.json["reason"], "DEADLINE_EXCEEDED");
  EXPECT_THAT(tool.errors, HasSubstr("models:large was not resident after 0.05 s (--load_timeout)"));
}

TEST_F(ToolTest, SaysThatFlagsStandBehindTheCommand) {
  const Finished list = RunProgram("weightbroker", {"--socket", service_.socket(), "list"});

  EXPECT_EQ(list.exit.code, 2);
  EXPECT_THAT(list.errors, HasSubstr("weightbroker list --socket ..."));
}

TEST_F(ToolTest, ListsAPathWithoutTheControlCharactersInIt) {
  // A spec may have none, but where its symbolic links lead is another matter.
  const std::string folder = service_.NewModel("clear\x1b[2J\nscreen");
  CheckpointBuilder().Tensor("w", "BF16", {2, 2}).Write(folder);
  std::filesystem::create_directory_symlink(folder, service_.ModelFolder("link"));
  ASSERT_EQ(Tool("register", {"models:link", "--torch_version", "any"}).exit.code, 0);

  const Finished list = Tool("list");

  EXPECT_THAT(list.output, HasSubstr("clear\\x1b[2J\\x0ascreen"));
  EXPECT_THAT(list.output, Not(HasSubstr("\x1b")));
}

TEST_F(ToolTest, InspectsOffline) {
  const Finished folder = RunProgram("weightbroker", {"inspect", service_.ModelFolder("small"), "--json"});
  const Finished file =
      RunProgram("weightbroker", {"inspect", "--file", service_.ModelFolder("small") + "/config.json", "--json"});

  EXPECT_EQ(folder.exit.code, 0);
  EXPECT_EQ(nlohmann::json::parse(folder.output)["ok"], true);
  EXPECT_EQ(file.exit.code, 3);
  EXPECT_EQ(nlohmann::json::parse(file.output)["ok"], false);
}

TEST_F(ToolTest, ShowsWhatAFileSaysWithoutTheControlCharactersInIt) {
  const std::string folder = service_.NewModel("clear\x1b[2J");
  CheckpointBuilder().Tensor("\x1b]0;title", "BF16", {2, 2}).Write(folder);

  const Finished inspected = RunProgram("weightbroker", {"inspect", folder});
  const Finished planned = RunProgram("weightbroker", {"plan", folder});

  EXPECT_THAT(inspected.output, HasSubstr("clear\\x1b[2J"));
  EXPECT_THAT(inspected.output, Not(HasSubstr("\x1b")));
  EXPECT_THAT(planned.output, HasSubstr("\\x1b]0;title")) << planned.errors;
  EXPECT_THAT(planned.output, Not(HasSubstr("\x1b")));
}

TEST(Tool, WritesAWholeCheckpointThoughNobodyReadsItsProgress) {
  const TemporaryFolder folder;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  const std::string command = std::string("'") + WEIGHTBROKER_BIN_DIR "/weightbroker' mkcheckpoint '" + (folder / "m") +
                              "' --model llama --shards 4 >/dev/null 2>&" + std::to_string(ends[1]);

  const int status = std::system(command.c_str());

  close(ends[1]);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(RunProgram("weightbroker", {"inspect", folder / "m"}).exit.code, 0);
}

TEST(Tool, SaysAtOnceThatItsSocketIsNone) {
  const TemporaryFolder folder;
  WriteFile(folder / "file", "");
  for (const auto& [path, what] : std::vector<std::pair<std::string, std::string>>{
           {folder.path(), "it is a folder"}, {folder / "file", "it is no socket"}}) {
    // Fails by the test's own limit if it is waited for.
    const Finished list = RunProgram("weightbroker", {"list", "--socket", path, "--timeout", "1000000"});
    EXPECT_EQ(list.exit.code, 4) << path;
    EXPECT_THAT(list.errors, HasSubstr(what)) << path;
  }
}

// With a keeper, connects are refused only where there is none, and no broker.
TEST(Tool, WaitsForNoServiceWhoseSocketIsAllThatIsLeft) {
  const TemporaryFolder folder;
  const std::string path = folder / "s.sock";
  const UniqueFd bound(socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(bound.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);

  // Fails by the test's own limit if it is waited for.
  const Finished list = RunProgram("weightbroker", {"list", "--socket", path, "--timeout", "1000000", "--json"});

  EXPECT_EQ(list.exit.code, 4);
  EXPECT_EQ(list.json["reason"], "SERVICE_UNAVAILABLE");
  EXPECT_THAT(list.errors, HasSubstr(path + ": the socket is there, but the service that made it has gone"));
  EXPECT_THAT(list.errors, HasSubstr("start weightbrokerd"));
}

TEST(Tool, ExitsWithFourWhereNoServiceAnswers) {
  const TemporaryFolder folder;

  const Finished health = RunProgram("weightbroker", {"health", "--socket", folder / "nobody", "--json"});

  EXPECT_EQ(health.exit.code, 4);
  EXPECT_EQ(health.json["reason"], "SERVICE_UNAVAILABLE");
  EXPECT_THAT(health.errors, HasSubstr("start weightbrokerd"));
}

}  // namespace
}  // namespace weightbroker::testing
