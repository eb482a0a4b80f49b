// The real service (weightbrokerd, broker and loaders) in a runtime folder of its own, with a model root beside it.
//
//   Service service;
//   CheckpointBuilder().Tensor("a", "BF16", {2, 3}).Write(service.NewModel("tiny"));
//   ASSERT_THAT(service.Register("tiny"), IsOk());
//   Program engine("engine", service.EngineFlags("tiny"));
//
// Killed when destroyed. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/connection.h"
#include "tests/integration/program.h"
#include "weightbroker/client.h"

namespace weightbroker::testing {

class Service {
 public:
  // Starts it with these flags besides socket and model root, and waits until it answers. `errors_fd` is as for
  // Program.
  explicit Service(const std::vector<std::string>& flags = {}, int errors_fd = -1);

  Program& program() { return *program_; }
  const std::string& socket() const { return socket_; }
  std::string ModelFolder(const std::string& name) const { return folder_ / ("models/" + name); }
  // The same, made.
  std::string NewModel(const std::string& name) const;
  // "models:<name>", as a spec says it.
  static std::string Model(const std::string& name) { return "models:" + name; }

  // Flags for `engine`, which attaches or fails, and for `stub_engine`.
  std::vector<std::string> EngineFlags(const std::string& model, const std::vector<std::string>& more = {}) const;
  std::vector<std::string> StubEngineFlags(const std::string& model, const std::vector<std::string>& more = {}) const;
  // Flags of the tool's subcommand.
  std::vector<std::string> ToolFlags(const std::string& command, const std::vector<std::string>& more = {}) const;

  absl::StatusOr<v1::HealthResponse> Health() const;
  // Of Health the part that asks nobody else: a GPU's driver that is busy holds Health up.
  absl::StatusOr<v1::ListWeightSetsResponse> ListWeightSets() const;
  absl::StatusOr<v1::WeightSet> Register(const std::string& model,
                                         const std::function<void(const LoadProgress&)>& on_progress = nullptr) const;
  // The same for a request as it is, with `wait` set.
  absl::StatusOr<v1::WeightSet> Register(v1::RegisterRequest request,
                                         const std::function<void(const LoadProgress&)>& on_progress = nullptr) const;
  absl::StatusOr<v1::UnregisterResponse> Unregister(const std::string& fingerprint, bool force) const;

  // Attaches this process. It fails where the service cannot give the weights.
  Result<MappedWeights> Attach(const std::string& model, const std::string& torch_version = "any") const;
  Result<MappedWeights> AttachRank(const WeightSpec& spec, int32_t rank,
                                   const std::string& torch_version = "any") const;

  // Every process of the service: the one that was started and all that descend from it.
  std::vector<pid_t> Processes() const;
  // The loaders among them.
  std::vector<pid_t> Loaders() const;
  // How many descriptors of memfds the service's processes hold together.
  int CountMemfds() const;

 private:
  TemporaryFolder folder_;
  std::string socket_;
  std::unique_ptr<Program> program_;
  std::shared_ptr<client::Connection> connection_;
};

// Writes a model of `size_bytes` in sixteen tensors of zeros into `folder`, at once whatever its size: the files have
// holes. With kSlowLoadBytes its load takes long enough to be caught in the middle.
inline constexpr int64_t kSlowLoadBytes = int64_t{1} << 30;
void WriteSparseModel(const std::string& folder, int64_t size_bytes = kSlowLoadBytes);

// For moments that a test chooses at random: another one each time, or $WEIGHTBROKER_SEED. It is printed, so that a run
// that failed can be repeated.
uint32_t TestSeed();

// Whether `condition` becomes true before kPatience has passed.
bool Eventually(const std::function<bool()>& condition);

// The shared and proportional size of what a process has mapped of the service's memory, in bytes, from its smaps.
struct MappedMemory {
  int64_t resident_bytes = 0;
  int64_t proportional_bytes = 0;
};
MappedMemory ReadMappedMemory(pid_t pid);

}  // namespace weightbroker::testing
