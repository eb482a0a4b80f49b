#include "server/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include "absl/strings/str_cat.h"
#include "server/endpoint/listener.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/config/arguments.h"
#include "tests/unit/endpoint/temp_folder.h"

namespace weightbroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;
using ::weightbroker::testing::Arguments;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;
using ::weightbroker::testing::TempFolder;
using ::weightbroker::testing::WriteFile;

absl::StatusOr<BrokerConfig> Parse(std::vector<std::string> words) {
  const Arguments arguments(std::move(words));
  return ParseBrokerConfig(arguments.argc(), arguments.argv());
}

TEST(BrokerConfig, HoldsEveryFlagInItsType) {
  TempFolder folder;
  const auto config = Parse({"--socket=/tmp/a.sock",
                             "--socket_mode=0600",
                             "--socket_group=root",
                             "--allowed_uids=7,root",
                             "--allowed_gids=8",
                             "--model_roots=m=" + folder.path(),
                             "--memory_limit=2GiB",
                             "--device_memory_limit=90%",
                             "--eviction=idle",
                             "--metrics_address=127.0.0.1:1234",
                             "--reader_threads=3",
                             "--reads_per_thread=5",
                             "--read_chunk=8MiB",
                             "--read_method=pread",
                             "--max_concurrent_loads=5",
                             "--log_level=warning",
                             "--log_format=json",
                             "--unverified_exports=allow",
                             "--loader_path=/bin/sh",
                             "--broker_path=/bin/sh",
                             "--keeper_socket=/tmp/k.sock",
                             "--no_broker",
                             "--broker_ping_interval=20ms",
                             "--broker_ping_timeout=2s",
                             "--broker_start_timeout=1m",
                             "--max_loaders=6",
                             "--keeper_fd=3",
                             "--resume_fd=4",
                             "--check_resume=1"});

  ASSERT_THAT(config, IsOk());
  EXPECT_EQ(config->socket, "/tmp/a.sock");
  EXPECT_FALSE(config->create_socket_folder);
  EXPECT_EQ(config->socket_mode, 0600u);
  EXPECT_EQ(config->socket_group, 0u);
  EXPECT_THAT(config->access.allowed_uids, ElementsAre(0u, 7u));
  EXPECT_THAT(config->access.allowed_gids, ElementsAre(8u));
  ASSERT_EQ(config->model_roots.size(), 1u);
  EXPECT_EQ(config->model_roots[0].name, "m");
  EXPECT_EQ(config->model_roots[0].path, folder.path());
  EXPECT_EQ(config->memory_limit, MemoryLimit{.bytes = int64_t{2} << 30});
  EXPECT_EQ(config->device_memory_limit, MemoryLimit{.percent = 90});
  EXPECT_TRUE(config->evicts_idle);
  EXPECT_EQ(config->metrics_port, 1234);
  EXPECT_EQ(config->reader_threads, 3);
  EXPECT_EQ(config->reads_per_thread, 5);
  EXPECT_EQ(config->read_chunk_bytes, 8 << 20);
  EXPECT_EQ(config->read_method, "pread");
  EXPECT_EQ(config->max_concurrent_loads, 5);
  EXPECT_EQ(config->log_level, LogLevel::kWarning);
  EXPECT_EQ(config->log_format, LogFormat::kJson);
  EXPECT_TRUE(config->exports_unverified);
  EXPECT_EQ(config->loader_path, "/bin/sh");
  EXPECT_EQ(config->keeper_socket, "/tmp/k.sock");
  EXPECT_TRUE(config->no_broker);
  EXPECT_EQ(config->broker_ping_interval, std::chrono::milliseconds(20));
  EXPECT_EQ(config->broker_ping_timeout, std::chrono::seconds(2));
  EXPECT_EQ(config->broker_start_timeout, std::chrono::minutes(1));
  EXPECT_EQ(config->max_loaders, 6);
  EXPECT_EQ(config->keeper_fd, 3);
  EXPECT_EQ(config->resume_fd, 4);
  EXPECT_EQ(config->check_resume, 1);
}

TEST(ParseBrokerConfig, TakesGpusByNumberAndUuidAndEveryOneByDefault) {
  EXPECT_THAT(Parse({"--socket=/tmp/a.sock"})->devices, ElementsAre("all"));
  const auto config = Parse({"--socket=/tmp/a.sock", "--devices=1,GPU-6f1c2d3e-0123-4567-89ab-0123456789ab"});
  ASSERT_THAT(config, IsOk());
  EXPECT_THAT(config->devices, ElementsAre("1", "GPU-6f1c2d3e-0123-4567-89ab-0123456789ab"));
  EXPECT_TRUE(config->names_gpus());
  EXPECT_FALSE(Parse({"--socket=/tmp/a.sock", "--devices=host"})->names_gpus());
}

TEST(ParseBrokerConfig, RefusesAllBesideAGpu) {
  EXPECT_THAT(Parse({"--socket=/tmp/a.sock", "--devices=all,1"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("\"all\" stands alone")));
}

TEST(ParseBrokerConfig, PutsTheUuidOfItsGpuIntoTheSocketsName) {
  const auto config = Parse({"--socket=/tmp/{gpu_uuid}.sock", "--devices=GPU-6f1c2d3e-0123-4567-89ab-0123456789ab"});
  ASSERT_THAT(config, IsOk());
  EXPECT_EQ(config->socket, "/tmp/GPU-6f1c2d3e-0123-4567-89ab-0123456789ab.sock");
  EXPECT_THAT(
      Parse({"--socket=/tmp/{gpu_uuid}.sock"}),
      StatusIs(Reason::kConfigurationInvalid, HasSubstr("--socket: {gpu_uuid} stands for the UUID of one GPU")));
}

TEST(BrokerConfig, HasDefaultsInTheStructThatAreThoseOfTheTable) {
  const auto config = Parse({"--socket=/tmp/a.sock"});
  const BrokerConfig plain;

  ASSERT_THAT(config, IsOk());
  EXPECT_EQ(config->socket_mode, plain.socket_mode);
  EXPECT_EQ(config->memory_limit, plain.memory_limit);
  EXPECT_FALSE(config->evicts_idle);
  EXPECT_EQ(config->reader_threads, plain.reader_threads);
  EXPECT_EQ(config->max_concurrent_loads, plain.max_concurrent_loads);
  EXPECT_EQ(config->log_level, plain.log_level);
  EXPECT_EQ(config->exports_unverified, plain.exports_unverified);
  EXPECT_EQ(config->broker_ping_interval, plain.broker_ping_interval);
  EXPECT_EQ(config->broker_ping_timeout, plain.broker_ping_timeout);
  EXPECT_EQ(config->broker_start_timeout, plain.broker_start_timeout);
  EXPECT_EQ(config->max_loaders, plain.max_loaders);
  EXPECT_EQ(config->metrics_port, 9464);
  EXPECT_THAT(config->loader_path, EndsWith("/tests/weightbroker-loader"));
}

TEST(BrokerConfig, FindsTheDefaultSocketAndMayCreateItsFolder) {
  unsetenv("WEIGHTBROKER_SOCKET");
  setenv("XDG_RUNTIME_DIR", "/run/user/1", 1);
  const auto config = Parse({});

  ASSERT_THAT(config, IsOk());
  EXPECT_EQ(config->socket, *DefaultSocketPath());
  EXPECT_TRUE(config->create_socket_folder);
}

TEST(BrokerConfig, RefusesAnOverLongSocketPathNamingTheFlag) {
  const auto config = Parse({"--socket=/tmp/" + std::string(200, 's')});

  EXPECT_THAT(config, StatusIs(Reason::kConfigurationInvalid, AllOf(HasSubstr("--socket: "), HasSubstr("205 bytes"))));
  EXPECT_THAT(config, HasMetadata("flag", "socket"));
}

TEST(BrokerConfig, NamesFileAndKeyOfAValueThatIsWrong) {
  TempFolder folder;
  WriteFile(folder / "c.json", R"({"memory_limit": "lots"})");

  const auto config = Parse({"--config_file=" + (folder / "c.json")});

  EXPECT_THAT(config, StatusIs(Reason::kConfigurationInvalid, HasSubstr(folder / "c.json: memory_limit: \"lots\"")));
  EXPECT_THAT(config, HasMetadata("value", "lots"));
}

TEST(BrokerConfig, RefusesAModelRootGivenTwice) {
  TempFolder a;
  TempFolder b;
  EXPECT_THAT(Parse({"--socket=/s", "--model_roots=m=" + a.path(), "--model_roots=m=" + b.path()}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("the name \"m\" is given twice")));
  EXPECT_THAT(Parse({"--socket=/s", "--model_roots=m=" + a.path(), "--model_roots=n=" + a.path() + "/."}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("\"n\" and \"m\" are the same folder")));
}

TEST(BrokerConfig, RefusesToWaitForABrokerThatCouldNotReachTheKeeper) {
  EXPECT_THAT(Parse({"--socket=/tmp/a.sock", "--no_broker"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("needs --keeper_socket")));
}

TEST(BrokerConfig, RefusesToPingAllTheTime) {
  EXPECT_THAT(Parse({"--socket=/tmp/a.sock", "--broker_ping_interval=0ms"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("--broker_ping_interval")));
}

TEST(BrokerConfig, RefusesAnArchitectureDirThatIsNoFolder) {
  TempFolder folder;
  EXPECT_EQ(Parse({"--socket=/s", "--architecture_dir=" + folder.path()})->architecture_dir, folder.path());
  EXPECT_THAT(Parse({"--socket=/s", "--architecture_dir=/nowhere"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("/nowhere")));
}

TEST(BrokerConfig, RefusesNumbersOutOfRange) {
  EXPECT_THAT(Parse({"--socket=/s", "--max_concurrent_loads=0"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("from 1 to 64")));
  EXPECT_THAT(Parse({"--socket=/s", "--reader_threads=257"}), StatusIs(Reason::kConfigurationInvalid));
  for (const char* chunk : {"4KiB", "10000", "512MiB", "many"}) {
    EXPECT_THAT(Parse({"--socket=/s", absl::StrCat("--read_chunk=", chunk)}), StatusIs(Reason::kConfigurationInvalid));
  }
  EXPECT_THAT(Parse({"--socket=/s", "--read_method=mmap"}), StatusIs(Reason::kConfigurationInvalid));
}

TEST(BrokerConfig, RefusesAnInheritedDescriptorThatDoesNotListen) {
  EXPECT_THAT(Parse({"--socket=/s", "--listen_fd=2"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("descriptor 2 is not a listening socket")));

  TempFolder folder;
  auto listener = Listener::Create({.path = folder / "s"});
  ASSERT_THAT(listener, IsOk());
  EXPECT_THAT(Parse({"--socket=/s", "--listen_fd=" + std::to_string(listener->fd())}), IsOk());
}

TEST(BrokerConfig, ChecksAProgramThatIsNamedAndAllWhenAskedTo) {
  EXPECT_THAT(Parse({"--socket=/s", "--loader_path=/nonexistent"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("--loader_path: the program /nonexistent")));
  EXPECT_THAT(Parse({"--socket=/s"}), IsOk());
  EXPECT_THAT(Parse({"--socket=/s", "--broker_path=/bin/sh", "--check_config"}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("--loader_path: the program")));
}

TEST(AnswerWithoutServing, ExplainsAnInvalidConfigurationAndGives2) {
  CaptureStderr();
  const auto code = AnswerWithoutServing("weightbrokerd", Parse({"--colour=red"}));

  EXPECT_THAT(GetCapturedStderr(), HasSubstr("weightbrokerd: command line: there is no flag --colour"));
  EXPECT_EQ(code, 2);
}

TEST(AnswerWithoutServing, SaysInOneLineThatAConfigurationIsValidAndGives0) {
  TempFolder folder;
  CaptureStdout();
  const auto code = AnswerWithoutServing(
      "weightbrokerd", Parse({"--socket=/s/s", "--model_roots=m=" + folder.path(), "--loader_path=/bin/sh",
                              "--broker_path=/bin/sh", "--check_config"}));

  EXPECT_EQ(GetCapturedStdout(), "weightbrokerd: the configuration is valid: socket /s/s, 1 model roots\n");
  EXPECT_EQ(code, 0);
}

TEST(AnswerWithoutServing, PrintsVersionAndHelpWhateverElseIsWrong) {
  CaptureStdout();
  EXPECT_EQ(AnswerWithoutServing("weightbrokerd", Parse({"--version", "--memory_limit=lots"})), 0);
  EXPECT_EQ(AnswerWithoutServing("weightbrokerd", Parse({"--help"})), 0);

  EXPECT_THAT(GetCapturedStdout(), AllOf(HasSubstr("weightbrokerd 0."), HasSubstr("--model_roots=NAME=/PATH")));
}

TEST(AnswerWithoutServing, SaysNothingWhenThereIsServingToDo) {
  EXPECT_EQ(AnswerWithoutServing("weightbrokerd", Parse({"--socket=/s"})), std::nullopt);
}

}  // namespace
}  // namespace weightbroker
