// The tool's look at weights, against a real service: fingerprint, export and verify; and the checkpoints that it
// makes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using Json = nlohmann::json;

class ToolWeightsTest : public ::testing::Test {
 protected:
  Finished Tool(const std::string& command, const std::vector<std::string>& more = {}) const {
    return RunProgram("weightbroker", service_.ToolFlags(command, more));
  }

  // Two tensors, of which one is tied to another that the files do not have.
  void WriteTied() const {
    CheckpointBuilder()
        .Tensor("model.embed_tokens.weight", "BF16", {64, 32})
        .Tensor("model.norm.weight", "F32", {32})
        .Config(R"({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true})")
        .Write(service_.NewModel("tied"));
  }

  // A Llama that two ranks can split, made by the tool.
  void MakeLlama() const {
    const Finished made =
        RunProgram("weightbroker", {"mkcheckpoint", service_.ModelFolder("llama"), "--model", "llama", "--json"});
    ASSERT_EQ(made.exit.code, 0) << made.errors;
  }

  std::string Register(const std::string& model, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> flags = {Service::Model(model), "--torch_version", "any", "--json"};
    flags.insert(flags.end(), more.begin(), more.end());
    const Finished registered = Tool("register", flags);
    EXPECT_EQ(registered.exit.code, 0) << registered.errors;
    return registered.json["fingerprint"];
  }

  const Service service_;
};

// Turns one bit of one byte of a tensor in a file.
void Damage(const std::string& path, const std::string& tensor, size_t size_bytes, size_t offset) {
  std::string bytes = ReadFile(path);
  const size_t begin = bytes.find(TensorBytes(tensor, size_bytes));
  ASSERT_NE(begin, std::string::npos);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(begin + offset));
  file.put(static_cast<char>(bytes[begin + offset] ^ 1));
}

TEST_F(ToolWeightsTest, ShowsWhatAFingerprintIsMadeOf) {
  WriteTied();
  const std::string fingerprint = Register("tied");

  const Finished table = Tool("fingerprint", {"models:tied", "--torch_version", "any"});
  const Finished json = Tool("fingerprint", {"models:tied", "--torch_version", "any", "--json"});

  EXPECT_EQ(table.exit.code, 0) << table.errors;
  EXPECT_THAT(table.output, AllOf(HasSubstr(fingerprint), HasSubstr("environment.torch_version"), HasSubstr("yes")));
  EXPECT_EQ(json.json["fingerprint"], fingerprint);
  EXPECT_EQ(json.json["resident"], true);
  EXPECT_THAT(json.json["components"], Not(IsEmpty()));
}

TEST_F(ToolWeightsTest, ShowsEveryFieldInWhichWhatIsResidentDiffersWithBothValues) {
  WriteTied();
  const std::string resident = Register("tied");

  const Finished table = Tool("fingerprint", {"models:tied", "--torch_version", "2.11.0", "--dtype", "F32"});
  const Finished json = Tool("fingerprint", {"models:tied", "--torch_version", "2.11.0", "--dtype", "F32", "--json"});

  EXPECT_EQ(table.exit.code, 0) << table.errors;
  EXPECT_THAT(table.output, AllOf(HasSubstr(resident), HasSubstr("environment.torch_version"), HasSubstr("2.11.0"),
                                  HasSubstr("spec.dtype"), HasSubstr("F32")));
  EXPECT_EQ(json.json["resident"], false);
  EXPECT_EQ(json.json["compared_with"], resident);
  ASSERT_THAT(json.json["differences"], SizeIs(2));
  EXPECT_EQ(json.json["differences"][0]["requested"], "2.11.0");
  EXPECT_EQ(json.json["differences"][0]["resident"], "any");
}

TEST_F(ToolWeightsTest, RefusesFlagsThatAreNotSoOfTheSetThatAFingerprintNames) {
  MakeLlama();
  const std::string fingerprint = Register("llama", {"--tp", "2"});
  const auto exports = [&](const std::vector<std::string>& more) {
    std::vector<std::string> flags = {fingerprint, "--json"};
    flags.insert(flags.end(), more.begin(), more.end());
    return Tool("export", flags);
  };

  EXPECT_EQ(exports({"--tp", "2", "--torch_version", "any", "--layout", "hf"}).exit.code, 0);
  const std::vector<std::vector<std::string>> wrong = {
      {"--tp", "1"}, {"--torch_version", "2.11.0"}, {"--layout", "fused"}, {"--pp", "2"}, {"--dtype", "F32"}};
  for (const std::vector<std::string>& flags : wrong) {
    const Finished refused = exports(flags);
    EXPECT_EQ(refused.exit.code, 3) << flags[0];
    EXPECT_EQ(refused.json["reason"], "INVALID_ARGUMENT") << flags[0];
    EXPECT_EQ(refused.json["metadata"]["requested"], flags[1]);
  }
}

class ToolGoneFilesTest : public ToolWeightsTest {
 protected:
  // The fingerprint of weights whose files are gone.
  static std::string RegisterAndRemove(const Service& service) {
    CheckpointBuilder().Tensor("w", "BF16", {64, 64}).Write(service.NewModel("gone"));
    const auto set = service.Register("gone");
    EXPECT_THAT(set, IsOk());
    std::filesystem::remove_all(service.ModelFolder("gone"));
    return set->fingerprint();
  }

  static Finished Named(const Service& service, const std::string& command, const std::vector<std::string>& more = {}) {
    std::vector<std::string> flags = {"models:gone", "--torch_version", "any", "--json"};
    flags.insert(flags.end(), more.begin(), more.end());
    return RunProgram("weightbroker", service.ToolFlags(command, flags));
  }
};

TEST_F(ToolGoneFilesTest, AreToldApartFromThoseThatWereNeverThere) {
  const std::string fingerprint = RegisterAndRemove(service_);

  const Finished exported = Named(service_, "export");

  EXPECT_EQ(exported.exit.code, 3);
  EXPECT_EQ(exported.json["reason"], "MODEL_NOT_FOUND");
  EXPECT_EQ(exported.json["metadata"]["fingerprint"], fingerprint);
  EXPECT_THAT(exported.errors, HasSubstr("--unverified_exports=allow"));
}

TEST_F(ToolGoneFilesTest, AreExportedAndVerifiedByTheirModelWhereTheServiceAllowsIt) {
  const Service service({"--unverified_exports=allow"});
  const std::string fingerprint = RegisterAndRemove(service);

  const Finished exported = Named(service, "export");
  const Finished verified = Named(service, "verify", {"--digests"});

  EXPECT_EQ(exported.exit.code, 0) << exported.errors;
  EXPECT_EQ(exported.json["fingerprint"], fingerprint);
  EXPECT_EQ(verified.exit.code, 0) << verified.errors;
}

TEST_F(ToolWeightsTest, ListsTheTensorsWithoutTakingALease) {
  WriteTied();
  const std::string fingerprint = Register("tied");

  const Finished table = Tool("export", {fingerprint.substr(0, 8)});
  const Finished exported = Tool("export", {fingerprint, "--json"});

  EXPECT_EQ(table.exit.code, 0) << table.errors;
  EXPECT_THAT(table.output, AllOf(HasSubstr("model.norm.weight"), HasSubstr("HOST_MEMFD"), HasSubstr("ALIAS OF")));
  ASSERT_EQ(exported.exit.code, 0) << exported.errors;
  const Json shard = exported.json["ranks"][0];
  EXPECT_THAT(shard["slabs"], SizeIs(1));
  ASSERT_THAT(shard["tensors"], SizeIs(3));
  const Json head = shard["tensors"][0];
  const Json embedding = shard["tensors"][1];
  EXPECT_EQ(head["name"], "lm_head.weight");
  EXPECT_EQ(head["alias_of"], "model.embed_tokens.weight");
  EXPECT_EQ(head["offset_bytes"], embedding["offset_bytes"]);
  EXPECT_EQ(embedding["dtype"], "BF16");
  EXPECT_EQ(embedding["shape"], Json({64, 32}));
  EXPECT_EQ(embedding["size_bytes"], 64 * 32 * 2);
  EXPECT_THAT(embedding["digest"].get<std::string>(), SizeIs(32));
  EXPECT_EQ(Tool("health", {"--json"}).json["lease_count"], 0);
}

TEST_F(ToolWeightsTest, ListsTheTensorsOfEachRankOrOfOne) {
  MakeLlama();
  const std::string fingerprint = Register("llama", {"--tp", "2"});

  const Json both = Tool("export", {"models:llama", "--torch_version", "any", "--tp", "2", "--json"}).json;
  const Json second = Tool("export", {fingerprint, "--rank", "1", "--json"}).json;

  ASSERT_THAT(both["ranks"], SizeIs(2));
  EXPECT_EQ(both["ranks"][0]["rank"], 0);
  EXPECT_EQ(both["ranks"][1]["rank"], 1);
  ASSERT_THAT(second["ranks"], SizeIs(1));
  EXPECT_EQ(second["ranks"][0], both["ranks"][1]);
  EXPECT_NE(both["ranks"][0]["tensors"], both["ranks"][1]["tensors"]) << "digests differ where the ranks' parts do";
}

TEST_F(ToolWeightsTest, SaysWhatToDoAboutWeightsThatAreNotThere) {
  WriteTied();

  const Finished model = Tool("export", {"models:tied", "--torch_version", "any", "--json"});
  const Finished fingerprint = Tool("verify", {"0123456789ab", "--json"});

  EXPECT_EQ(model.exit.code, 3);
  EXPECT_EQ(model.json["reason"], "NOT_RESIDENT");
  EXPECT_THAT(model.errors, HasSubstr("what to do: "));
  EXPECT_EQ(fingerprint.exit.code, 3);
  EXPECT_EQ(fingerprint.json["reason"], "WEIGHT_SET_UNKNOWN");
  EXPECT_THAT(fingerprint.errors, HasSubstr("weightbroker list"));
  EXPECT_EQ(Tool("export", {"models:tied"}).exit.code, 2) << "a model needs a torch version";
}

TEST_F(ToolWeightsTest, FindsThatEachRankIsWhatTheFilesSay) {
  MakeLlama();
  const std::string fingerprint = Register("llama", {"--tp", "2", "--layout", "fused", "--quantize", "fp8_block"});

  const Finished table = Tool("verify", {fingerprint});
  const Finished verified = Tool("verify", {fingerprint, "--json"});

  EXPECT_EQ(table.exit.code, 0) << table.output << table.errors;
  EXPECT_THAT(table.output, HasSubstr("equal byte for byte"));
  ASSERT_EQ(verified.exit.code, 0) << verified.errors;
  EXPECT_EQ(verified.json["ok"], true);
  EXPECT_EQ(verified.json["files_unchanged"], true);
  ASSERT_THAT(verified.json["ranks"], SizeIs(2));
  for (const Json& rank : verified.json["ranks"]) {
    EXPECT_EQ(rank["differing_bytes"], 0);
    EXPECT_GT(rank["bytes"], 100'000);
    EXPECT_TRUE(rank["first_difference"].is_null());
  }
  EXPECT_EQ(Tool("health", {"--json"}).json["lease_count"], 0);
}

TEST_F(ToolWeightsTest, NamesTheFirstByteThatAFileHasOtherwiseSinceItWasLoaded) {
  CheckpointBuilder().Tensor("a", "BF16", {64, 64}).Tensor("b", "BF16", {64, 64}).Write(service_.NewModel("edited"));
  const std::string fingerprint = Register("edited");
  Damage(service_.ModelFolder("edited") + "/model.safetensors", "b", 8192, 4001);

  const Finished table = Tool("verify", {fingerprint});
  const Finished verified = Tool("verify", {fingerprint, "--json"});

  EXPECT_EQ(table.exit.code, 3);
  EXPECT_THAT(table.output, AllOf(HasSubstr("\"b\""), HasSubstr("byte 4001"), HasSubstr("WHEN LOADED")));
  EXPECT_EQ(verified.exit.code, 3);
  EXPECT_EQ(verified.json["ok"], false);
  EXPECT_EQ(verified.json["reason"], "DIGEST_MISMATCH");
  EXPECT_EQ(verified.json["files_unchanged"], false);
  const Json rank = verified.json["ranks"][0];
  EXPECT_EQ(rank["tensors"], 2);
  EXPECT_EQ(rank["differing_tensors"], 1);
  EXPECT_EQ(rank["differing_bytes"], 1);
  EXPECT_EQ(rank["first_difference"]["tensor"], "b");
  EXPECT_EQ(rank["first_difference"]["offset_bytes"], 4001);
  EXPECT_EQ(rank["first_difference"]["resident_byte"].get<int>() ^ 1, rank["first_difference"]["disk_byte"]);
}

// A hub cache names a blob by the hash of its contents, and that name is what the service takes for its identity: one
// that has gone bad since is told by nothing but its bytes.
TEST_F(ToolWeightsTest, FindsAWrongByteBehindAnIdentityThatIsRight) {
  const std::string folder = service_.NewModel("hub/snapshots/main");
  const std::string blob = service_.NewModel("hub/blobs") + "/" + std::string(64, 'a');
  CheckpointBuilder().Tensor("w", "F32", {32, 32}).Write(folder);
  std::filesystem::rename(folder + "/model.safetensors", blob);
  std::filesystem::create_symlink(blob, folder + "/model.safetensors");
  const std::string fingerprint = Register("hub/snapshots/main");
  Damage(blob, "w", 4096, 77);

  const Finished verified = Tool("verify", {fingerprint, "--json"});

  EXPECT_EQ(verified.exit.code, 3) << verified.errors;
  EXPECT_EQ(verified.json["files_unchanged"], true);
  EXPECT_EQ(verified.json["ranks"][0]["first_difference"]["offset_bytes"], 77);
  EXPECT_THAT(verified.json["message"].get<std::string>(), HasSubstr("unregister"));
  EXPECT_EQ(Tool("verify", {fingerprint, "--digests"}).exit.code, 0) << "what was loaded is as it was loaded";
}

TEST_F(ToolWeightsTest, VerifiesPublishedWeightsByTheirDigestsOnly) {
  WriteTied();
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = service_.socket();
  const Result<Client> client = Client::Create(options);
  ASSERT_TRUE(client.ok()) << client.status().ToString();
  WeightSpec spec;
  spec.model = Service::Model("tied");
  spec.layout = "engine";
  spec.engine = "test";
  spec.engine_version = "1";
  const std::string bytes(256, 'x');
  const auto weights = client->AttachOrPublish(spec, [&](Publisher& publisher) {
    TensorToPublish tensor;
    tensor.name = "w";
    tensor.dtype = DataType::kU8;
    tensor.shape = {256};
    tensor.kind = TensorKind::kBuffer;
    return publisher.Add(tensor, bytes.data());
  });
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();

  const Finished refused = Tool("verify", {weights->fingerprint(), "--json"});
  const Finished digests = Tool("verify", {weights->fingerprint(), "--digests", "--json"});
  const Finished exported = Tool("export", {weights->fingerprint(), "--json"});

  EXPECT_EQ(refused.exit.code, 3);
  EXPECT_EQ(refused.json["reason"], "LAYOUT_UNSUPPORTED");
  EXPECT_THAT(refused.errors, HasSubstr("--digests"));
  EXPECT_EQ(digests.exit.code, 0) << digests.errors;
  EXPECT_EQ(digests.json["ranks"][0]["bytes"], 256);
  EXPECT_EQ(exported.json["ranks"][0]["tensors"][0]["kind"], "BUFFER");
}

TEST(MakeCheckpoint, PlantsEachOfTheFaultsThatItLists) {
  const TemporaryFolder folder;
  const Json listed = Json::parse(RunProgram("weightbroker", {"mkcheckpoint", "--list_faults", "--json"}).output);
  ASSERT_THAT(listed, Not(IsEmpty()));
  for (const Json& fault : listed) {
    const std::string name = fault["name"];
    const Finished made = RunProgram("weightbroker", {"mkcheckpoint", folder / name, "--fault", name, "--json"});
    ASSERT_EQ(made.exit.code, 0) << name << ": " << made.errors;
    const Finished inspected = RunProgram("weightbroker", {"inspect", folder / name, "--json"});
    EXPECT_EQ(inspected.exit.code, 3) << name;
    EXPECT_EQ(Json::parse(inspected.output)["reason"], fault["reason"]) << name << ": " << inspected.output;
  }
}

TEST(MakeCheckpoint, MakesTheSameFilesFromTheSameSeed) {
  const TemporaryFolder folder;
  for (const char* const name : {"a", "b"}) {
    const Finished made = RunProgram("weightbroker", {"mkcheckpoint", folder / name, "--model", "MixtralForCausalLM",
                                                      "--fp8", "--bytes", "3MB", "--shards", "2", "--seed", "5"});
    ASSERT_EQ(made.exit.code, 0) << made.errors;
  }
  for (const char* const file : {"config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"}) {
    EXPECT_EQ(ReadFile(folder / (std::string("a/") + file)), ReadFile(folder / (std::string("b/") + file))) << file;
  }
}

TEST(MakeCheckpoint, RefusesWithAWordOnWhatToDo) {
  const TemporaryFolder folder;
  WriteFile(folder / "something", "");

  const Finished full = RunProgram("weightbroker", {"mkcheckpoint", folder.path(), "--json"});
  const Finished unknown = RunProgram("weightbroker", {"mkcheckpoint", folder / "new", "--fault", "x", "--json"});

  EXPECT_EQ(full.exit.code, 3);
  EXPECT_THAT(full.errors, HasSubstr("is not empty"));
  EXPECT_EQ(unknown.exit.code, 3);
  EXPECT_THAT(unknown.errors, HasSubstr("--list_faults"));
  EXPECT_EQ(RunProgram("weightbroker", {"mkcheckpoint"}).exit.code, 2);
  EXPECT_EQ(RunProgram("weightbroker", {"mkcheckpoint", folder / "new", "--set", "hidden_size"}).exit.code, 2);
}

}  // namespace
}  // namespace weightbroker::testing
