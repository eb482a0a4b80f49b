#include "tests/integration/service.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include "client/src/attach.h"
#include "client/src/unregister.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {
namespace {

using client::Connection;
using client::DeadlineIn;
using std::chrono::seconds;

std::vector<std::string> Join(std::vector<std::string> first, const std::vector<std::string>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// On a free port, unless the flags say where.
std::vector<std::string> WithMetrics(std::vector<std::string> flags) {
  constexpr std::string_view kFlag = "--metrics_address";
  const bool given = std::any_of(flags.begin(), flags.end(),
                                 [&](const std::string& flag) { return flag.compare(0, kFlag.size(), kFlag) == 0; });
  if (!given) flags.push_back(std::string(kFlag) + "=127.0.0.1:0");
  return flags;
}

struct ProcessEntry {
  pid_t pid = 0;
  pid_t parent = 0;
  std::string program;  // the name of the file it was started from
};

// Zombies have no program any more, and are left out.
std::vector<ProcessEntry> ReadProcesses() {
  std::vector<ProcessEntry> entries;
  std::error_code error;
  for (const auto& folder : std::filesystem::directory_iterator("/proc", error)) {
    const int pid = atoi(folder.path().filename().c_str());
    if (pid == 0) continue;
    const auto program = std::filesystem::read_symlink(folder.path() / "exe", error);
    std::ifstream status(folder.path() / "status");
    pid_t parent = 0;
    for (std::string line; std::getline(status, line);) sscanf(line.c_str(), "PPid: %d", &parent);
    if (!program.empty()) entries.push_back({pid, parent, program.filename().string()});
  }
  return entries;
}

bool IsMemfd(const std::filesystem::path& descriptor) {
  std::error_code error;
  return std::filesystem::read_symlink(descriptor, error).string().find("memfd:") != std::string::npos;
}

}  // namespace

Service::Service(const std::vector<std::string>& flags, int errors_fd) : socket_(folder_ / "weightbroker.sock") {
  std::filesystem::create_directory(folder_ / "models");
  program_ = std::make_unique<Program>(
      "weightbrokerd",
      WithMetrics(Join({"--socket", socket_, "--model_roots", "models=" + (folder_ / "models")}, flags)), errors_fd);
  connection_ = *Connection::Open({.socket_path = socket_});
  if (!connection_->WaitUntilConnected(DeadlineIn(kPatience)).ok() || !Health().ok()) {
    fprintf(stderr, "the service does not answer:\n%s\n", program_->Errors().c_str());
    abort();
  }
}

std::string Service::NewModel(const std::string& name) const {
  std::filesystem::create_directories(ModelFolder(name));
  return ModelFolder(name);
}

std::vector<std::string> Service::EngineFlags(const std::string& model, const std::vector<std::string>& more) const {
  return Join(StubEngineFlags(model, {"--fallback", "fail"}), more);
}

std::vector<std::string> Service::StubEngineFlags(const std::string& model,
                                                  const std::vector<std::string>& more) const {
  return Join({"--socket", socket_, "--model", Model(model), "--torch_version", "any", "--json"}, more);
}

std::vector<std::string> Service::ToolFlags(const std::string& command, const std::vector<std::string>& more) const {
  return Join({command, "--socket", socket_}, more);
}

absl::StatusOr<v1::HealthResponse> Service::Health() const {
  v1::HealthResponse response;
  const absl::Status status = connection_->Call(DeadlineIn(seconds(10)), [&](grpc::ClientContext& context) {
    return connection_->service().Health(&context, {}, &response);
  });
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::ListWeightSetsResponse> Service::ListWeightSets() const {
  v1::ListWeightSetsResponse response;
  const absl::Status status = connection_->Call(DeadlineIn(seconds(10)), [&](grpc::ClientContext& context) {
    return connection_->admin_service().ListWeightSets(&context, {}, &response);
  });
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::WeightSet> Service::Register(const std::string& model,
                                                const std::function<void(const LoadProgress&)>& on_progress) const {
  v1::RegisterRequest request;
  request.mutable_spec()->set_model(Model(model));
  return Register(std::move(request), on_progress);
}

absl::StatusOr<v1::WeightSet> Service::Register(v1::RegisterRequest request,
                                                const std::function<void(const LoadProgress&)>& on_progress) const {
  request.mutable_environment()->set_torch_version("any");
  request.add_handle_kinds(v1::HANDLE_KIND_HOST_MEMFD);
  request.set_wait(true);
  return client::RegisterAndWait(*connection_, request, DeadlineIn(kPatience), on_progress);
}

absl::StatusOr<v1::UnregisterResponse> Service::Unregister(const std::string& fingerprint, bool force) const {
  v1::UnregisterRequest request;
  request.set_fingerprint(fingerprint);
  request.set_force(force);
  return client::UnregisterOnce(*connection_, request, DeadlineIn(seconds(10)));
}

Result<MappedWeights> Service::Attach(const std::string& model, const std::string& torch_version) const {
  WeightSpec spec;
  spec.model = Model(model);
  return AttachRank(spec, 0, torch_version);
}

Result<MappedWeights> Service::AttachRank(const WeightSpec& spec, int32_t rank,
                                          const std::string& torch_version) const {
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = torch_version;
  options.socket_path = socket_;
  AttachOptions attach;
  attach.rank = rank;
  attach.fallback = Fallback::kFail;
  return Client::Create(options)->Attach(spec, attach);
}

std::vector<pid_t> Service::Processes() const {
  std::vector<ProcessEntry> entries = ReadProcesses();
  std::vector<pid_t> family = {program_->pid()};
  for (size_t i = 0; i < family.size(); ++i) {
    for (const ProcessEntry& entry : entries) {
      if (entry.parent == family[i]) family.push_back(entry.pid);
    }
  }
  return family;
}

std::vector<pid_t> Service::Loaders() const {
  const std::vector<pid_t> family = Processes();
  std::vector<pid_t> loaders;
  for (const ProcessEntry& entry : ReadProcesses()) {
    const bool ours = std::find(family.begin(), family.end(), entry.pid) != family.end();
    if (ours && entry.program == "weightbroker-loader") loaders.push_back(entry.pid);
  }
  return loaders;
}

int Service::CountMemfds() const {
  int count = 0;
  for (const pid_t pid : Processes()) {
    std::error_code error;
    for (const auto& fd : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd", error)) {
      if (IsMemfd(fd.path())) ++count;
    }
  }
  return count;
}

void WriteSparseModel(const std::string& folder, int64_t size_bytes) {
  constexpr int kTensors = 16;
  const int64_t tensor_bytes = size_bytes / kTensors;
  nlohmann::json header;
  for (int i = 0; i < kTensors; ++i) {
    header["layer." + std::to_string(i)] = {
        {"dtype", "U8"}, {"shape", {tensor_bytes}}, {"data_offsets", {i * tensor_bytes, (i + 1) * tensor_bytes}}};
  }
  const std::string start = RawSafetensors(header.dump());
  WriteFile(folder + "/config.json", kPlainConfig);
  WriteFile(folder + "/model.safetensors", start);
  std::filesystem::resize_file(folder + "/model.safetensors", start.size() + static_cast<uintmax_t>(size_bytes));
}

uint32_t TestSeed() {
  const char* given = getenv("WEIGHTBROKER_SEED");
  const uint32_t seed = given != nullptr ? static_cast<uint32_t>(strtoul(given, nullptr, 10)) : std::random_device()();
  printf("WEIGHTBROKER_SEED=%u\n", seed);
  return seed;
}

bool Eventually(const std::function<bool()>& condition) {
  const auto give_up = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

MappedMemory ReadMappedMemory(pid_t pid) {
  MappedMemory memory;
  std::ifstream smaps("/proc/" + std::to_string(pid) + "/smaps");
  bool of_the_service = false;
  for (std::string line; std::getline(smaps, line);) {
    long long kibibytes = 0;
    unsigned long long begin = 0;
    unsigned long long end = 0;
    if (sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
      of_the_service = line.find("memfd:weightbroker") != std::string::npos;
    } else if (of_the_service && sscanf(line.c_str(), "Rss: %lld kB", &kibibytes) == 1) {
      memory.resident_bytes += kibibytes * 1024;
    } else if (of_the_service && sscanf(line.c_str(), "Pss: %lld kB", &kibibytes) == 1) {
      memory.proportional_bytes += kibibytes * 1024;
    }
  }
  return memory;
}

}  // namespace weightbroker::testing
