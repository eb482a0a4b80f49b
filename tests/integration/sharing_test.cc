// What engines get: the same bytes however they ask, in the same physical memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <csignal>
#include <string>

#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/status_matchers.h"

namespace weightbroker::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kLargeBytes = 64 << 20;

void WriteSmallModel(const Service& service) {
  CheckpointBuilder()
      .Tensor("b.weight", "BF16", {7, 5})
      .Tensor("a.weight", "F32", {3})
      .Tensor("scalar", "F32", {})
      .Tensor("empty", "F32", {0, 4})
      .Write(service.NewModel("small"));
}

// As the engines' --help describes it, from the builder's bytes.
std::string SmallModelChecksum() {
  const std::string text = "a.weight" + TensorBytes("a.weight", 12) + "b.weight" + TensorBytes("b.weight", 70) +
                           "empty" + "scalar" + TensorBytes("scalar", 4);
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_Digest(text.data(), text.size(), digest, &size, EVP_sha256(), nullptr);
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) {
    char digits[3];
    snprintf(digits, sizeof(digits), "%02x", digest[i]);
    hex += digits;
  }
  return hex;
}

TEST(Engines, ReadTheBytesOfTheFilesWithLibraryAndWithStub) {
  const Service service;
  WriteSmallModel(service);

  const Finished engine = RunProgram("engine", service.EngineFlags("small", {"--register", "--verify"}));
  const Finished stub_engine = RunProgram("stub_engine", service.StubEngineFlags("small"));

  ASSERT_TRUE(engine.exit.success()) << engine.errors;
  ASSERT_TRUE(stub_engine.exit.success()) << stub_engine.errors;
  EXPECT_EQ(engine.json["source"], "attached");
  EXPECT_EQ(engine.json["tensors"], 4);
  EXPECT_EQ(engine.json["bytes"], 86);
  EXPECT_EQ(engine.json["checksum"], SmallModelChecksum());
  for (const char* field : {"tensors", "bytes", "checksum", "fingerprint", "generation"}) {
    EXPECT_EQ(stub_engine.json[field], engine.json[field]) << field;
  }
}

TEST(Engines, ReadTheSameFromDiskByChoiceAndWhereNoServiceIs) {
  const Service service;
  WriteSmallModel(service);
  const std::vector<std::string> from_disk = {
      "--model", service.ModelFolder("small"), "--torch_version", "any", "--json", "--verify"};

  std::vector<std::string> off = from_disk;
  off.insert(off.end(), {"--mode", "off"});
  std::vector<std::string> fallback = from_disk;
  fallback.insert(fallback.end(), {"--mode", "client", "--socket", service.socket() + ".nobody"});
  const Finished by_choice = RunProgram("engine", off);
  const Finished by_need = RunProgram("engine", fallback);

  ASSERT_TRUE(by_choice.exit.success()) << by_choice.errors;
  ASSERT_TRUE(by_need.exit.success()) << by_need.errors;
  EXPECT_EQ(by_choice.json["source"], "disk");
  EXPECT_THAT(by_choice.json["why_not_attached"], HasSubstr("MODE_OFF"));
  EXPECT_EQ(by_choice.json["checksum"], SmallModelChecksum());
  EXPECT_EQ(by_need.json["source"], "disk");
  EXPECT_THAT(by_need.json["why_not_attached"], HasSubstr("SERVICE_UNAVAILABLE"));
  EXPECT_EQ(by_need.json["checksum"], SmallModelChecksum());
}

TEST(Engines, KnowTheWeightsByOneFingerprintWhereverTheyCameFrom) {
  const Service service;
  WriteSmallModel(service);
  const auto set = service.Register("small");
  ASSERT_THAT(set, IsOk());
  ClientOptions options;
  options.torch_version = "any";
  options.model_roots = {{"models", service.ModelFolder("")}};
  WeightSpec spec;
  spec.model = Service::Model("small");

  const auto from_disk = Client::Create(options)->Attach(spec);

  ASSERT_TRUE(from_disk.ok()) << from_disk.status().ToString();
  EXPECT_EQ(from_disk->fingerprint(), set->fingerprint());
  EXPECT_EQ(from_disk->generation(), 0);
  EXPECT_FALSE(from_disk->lease_lost());
}

TEST(Engines, ShareOnePhysicalCopy) {
  const Service service;
  CheckpointBuilder().Tensor("large", "U8", {kLargeBytes}).Write(service.NewModel("large"));
  ASSERT_THAT(service.Register("large"), IsOk());

  Program first("engine", service.EngineFlags("large", {"--hold_seconds", "600"}));
  Program second("engine", service.EngineFlags("large", {"--hold_seconds", "600"}));
  ASSERT_TRUE(first.WaitForLine("attached")) << first.Errors();
  ASSERT_TRUE(second.WaitForLine("attached")) << second.Errors();

  for (const pid_t pid : {first.pid(), second.pid()}) {
    const MappedMemory memory = ReadMappedMemory(pid);
    EXPECT_GE(memory.resident_bytes, kLargeBytes);
    EXPECT_LE(memory.proportional_bytes, memory.resident_bytes * 51 / 100) << "not one copy, shared by two";
    RecordProperty("resident_bytes", std::to_string(memory.resident_bytes));
    RecordProperty("proportional_bytes", std::to_string(memory.proportional_bytes));
  }
}

TEST(Engines, DieAloneOfAWriteToATensor) {
  const Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());
  Program bystander("engine", service.EngineFlags("small", {"--hold_seconds", "600"}));
  ASSERT_TRUE(bystander.WaitForLine("attached")) << bystander.Errors();

  const Finished writer = RunProgram("engine", service.EngineFlags("small", {"--write_fault"}));
  const Finished stub_writer = RunProgram("stub_engine", service.StubEngineFlags("small", {"--write_fault"}));

  EXPECT_EQ(writer.exit.signal, SIGSEGV) << writer.exit.ToString();
  EXPECT_EQ(stub_writer.exit.signal, SIGSEGV) << stub_writer.exit.ToString();
  EXPECT_TRUE(bystander.IsRunning());
  const Finished after = RunProgram("engine", service.EngineFlags("small", {"--verify"}));
  ASSERT_TRUE(after.exit.success()) << after.errors;
  EXPECT_EQ(after.json["checksum"], SmallModelChecksum());
}

TEST(Engines, AttachAndLeaveAgainAndAgain) {
  const Service service;
  WriteSmallModel(service);
  ASSERT_THAT(service.Register("small"), IsOk());

  const Finished engine = RunProgram("engine", service.EngineFlags("small", {"--loop", "50", "--prefault"}));

  ASSERT_TRUE(engine.exit.success()) << engine.errors;
  EXPECT_TRUE(Eventually([&] { return service.Health()->lease_count() == 0; }));
}

}  // namespace
}  // namespace weightbroker::testing
