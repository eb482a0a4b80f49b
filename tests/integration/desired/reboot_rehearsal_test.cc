// A node that is rebooted: every process of the service is killed at once, its run folder is emptied, and one command
// brings back all that the node is to hold, with no hand on it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/integration/service.h"
#include "tests/integration/versions/stamped_model.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using Json = nlohmann::json;

constexpr char kAlias[] = "model@live";
constexpr int kTensors = 8;
constexpr int64_t kTensorBytes = 256 << 10;
constexpr uint64_t kLiveVersion = 2;  // of the model that the alias names

pid_t ParentOf(const std::filesystem::path& process) {
  std::ifstream status(process / "status");
  pid_t parent = 0;
  for (std::string line; std::getline(status, line);) sscanf(line.c_str(), "PPid: %d", &parent);
  return parent;
}

// A process and all that descend from it.
std::vector<pid_t> FamilyOf(pid_t ancestor) {
  std::vector<pid_t> family = {ancestor};
  for (size_t i = 0; i < family.size(); ++i) {
    std::error_code error;
    for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
      const pid_t pid = atoi(process.path().filename().c_str());
      if (pid != 0 && ParentOf(process.path()) == family[i]) family.push_back(pid);
    }
  }
  return family;
}

bool IsRunning(pid_t pid) {
  std::error_code error;
  return !std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", error).empty();
}

// With etc/ and models/, which outlive a reboot, and run/, which does not.
class RebootRehearsal : public ::testing::Test {
 protected:
  RebootRehearsal() : socket_(folder_ / "run/weightbroker.sock") {
    for (const char* const name : {"etc", "models", "run"}) std::filesystem::create_directory(folder_ / name);
    WriteModel("first", 1);
    WriteModel("second", kLiveVersion);
    WriteFile(folder_ / "etc/weightbroker.json", Json({{"socket", socket_},
                                                       {"model_roots", {"models=" + (folder_ / "models")}},
                                                       {"metrics_address", "127.0.0.1:0"},
                                                       {"devices", "host"},
                                                       {"desired", folder_ / "etc/sets.json"}})
                                                     .dump());
    WriteFile(folder_ / "etc/sets.json",
              Json({{"version", 1},
                    {"sets",
                     {{{"name", "first"}, {"model", "models:first"}, {"torch_version", "any"}},
                      {{"name", "second"}, {"model", "models:second"}, {"torch_version", "any"}}}},
                    {"aliases", {{kAlias, "second"}}}})
                  .dump());
  }

  void WriteModel(const std::string& name, uint64_t version) const {
    std::filesystem::create_directory(folder_ / ("models/" + name));
    WriteStampedModel(folder_ / ("models/" + name), version, kTensors, kTensorBytes);
  }

  // The one command.
  void Boot() {
    node_ = std::make_unique<Program>("weightbrokerd",
                                      std::vector<std::string>{"--config_file=" + (folder_ / "etc/weightbroker.json")});
  }

  // Stopped first, so that it replaces nothing that is killed before it.
  void PullThePlug() {
    kill(node_->pid(), SIGSTOP);
    const std::vector<pid_t> family = FamilyOf(node_->pid());
    ASSERT_GE(family.size(), 2u) << "keeper and broker, at least";
    for (const pid_t pid : family) kill(pid, SIGKILL);
    EXPECT_EQ(node_->Wait().signal, SIGKILL);
    ASSERT_TRUE(Eventually([&] { return std::none_of(family.begin(), family.end(), IsRunning); }));
    for (const auto& left : std::filesystem::directory_iterator(folder_ / "run")) std::filesystem::remove_all(left);
  }

  Finished Tool(std::vector<std::string> words) const {
    words.insert(words.end(), {"--socket", socket_});
    return RunProgram("weightbroker", words);
  }

  bool IsReady() const {
    return Eventually([this] { return Tool({"status"}).exit.code == 0; });
  }

  Json Health() const { return Tool({"health", "--json"}).json; }

  Result<MappedWeights> Attach() const {
    ClientOptions client;
    client.mode = Mode::kClient;
    client.torch_version = "any";
    client.socket_path = socket_;
    AttachOptions attach;
    attach.fallback = Fallback::kFail;
    attach.alias = kAlias;
    return Client::Create(client)->Attach({}, attach);
  }

  void ExpectAllThereAndRight() const {
    const Json health = Health();
    ASSERT_THAT(health["desired_sets"], SizeIs(2)) << health.dump();
    for (const Json& set : health["desired_sets"]) EXPECT_EQ(set["state"], "STATE_RESIDENT");
    ASSERT_THAT(health["desired_aliases"], SizeIs(1));
    EXPECT_EQ(health["desired_aliases"][0]["in_place"], true);
    for (const Json& set : health["desired_sets"]) {
      const Finished verified = Tool({"verify", set["fingerprint"].get<std::string>()});
      EXPECT_EQ(verified.exit.code, 0) << verified.errors;
      EXPECT_THAT(verified.output, HasSubstr("equal byte for byte"));
    }
    ExpectAnEngineGetsTheLiveModel();
  }

  void ExpectAnEngineGetsTheLiveModel() const {
    const auto weights = Attach();
    ASSERT_TRUE(weights.ok()) << weights.status().ToString();
    EXPECT_TRUE(weights->Verify().ok());
    ASSERT_THAT(weights->tensors(), SizeIs(kTensors));
    for (const Tensor& tensor : weights->tensors()) {
      uint64_t word = 0;
      std::memcpy(&word, tensor.data, sizeof(word));
      EXPECT_EQ(word, kLiveVersion);
    }
  }

  const TemporaryFolder folder_;
  const std::string socket_;
  std::unique_ptr<Program> node_;
};

TEST_F(RebootRehearsal, BringsBackEverySetAndAliasWithNoHandOnIt) {
  Boot();
  ASSERT_TRUE(IsReady()) << node_->Errors();
  ExpectAllThereAndRight();
  const Json before = Health();
  // Another model is being loaded at that moment, so that there is a loader, too; nobody wants it of the next boot.
  std::filesystem::create_directory(folder_ / "models/extra");
  WriteSparseModel(folder_ / "models/extra");
  ASSERT_EQ(Tool({"register", "models:extra", "--torch_version", "any", "--no_wait"}).exit.code, 0);

  PullThePlug();
  EXPECT_EQ(Tool({"health", "--timeout", "0.2"}).exit.code, 4);
  Boot();

  ASSERT_TRUE(IsReady()) << node_->Errors();
  ExpectAllThereAndRight();
  const Json after = Health();
  EXPECT_THAT(after["weight_sets"], SizeIs(2));
  EXPECT_EQ(after["desired_sets"], before["desired_sets"]);
  EXPECT_EQ(after["desired_aliases"], before["desired_aliases"]);
  EXPECT_NE(after["process_id"], before["process_id"]);
  EXPECT_THAT(node_->Errors(), HasSubstr("event=desired.reached"));
}

}  // namespace
}  // namespace weightbroker::testing
