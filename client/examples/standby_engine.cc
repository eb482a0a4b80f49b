// An engine that stands by: it attaches to the weights first, so that nothing is left to do when its turn comes, joins
// a group, and serves while it is active. Start it several times; kill the one that is active, or stop it with SIGSTOP.
//
//   standby_engine --model /models/llama --torch_version any --register --group llama
//
// It prints a line for whatever becomes of it: "standby", "active <epoch> <checksum>", "superseded <epoch>". Serving is
// reading a tensor and asking whether it is still active, `--requests_per_second` times a second.

#include <signal.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>

#include "weightbroker/client.h"
#include "weightbroker/engine_group.h"

namespace {

using std::chrono::milliseconds;

struct Flags {
  std::string socket;
  std::string model;
  std::string torch_version;
  std::string group;
  bool register_if_missing = false;
  int heartbeat_timeout_ms = 0;
  int requests_per_second = 100;
  bool rejoin = true;
};

std::atomic<bool> g_ending{false};

void EndOnSignals() {
  struct sigaction action = {};
  action.sa_handler = [](int) { g_ending = true; };
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

void Say(const char* what, uint64_t epoch) {
  printf("%s %llu\n", what, static_cast<unsigned long long>(epoch));
  fflush(stdout);
}

int Fail(const weightbroker::Status& status) {
  fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.code() == weightbroker::StatusCode::kUnavailable ? 4 : 3;
}

// One tensor's bytes added up: what a request would read.
uint64_t ReadTensor(const weightbroker::Tensor& tensor) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < tensor.size_bytes; ++i) sum += static_cast<uint64_t>(tensor.data[i]);
  return sum;
}

// Until this engine is no longer active. A real one would pass `epoch` to whatever it writes to.
void ServeWhileActive(const Flags& flags, const weightbroker::MappedWeights& weights,
                      const weightbroker::EngineGroupMember& member, uint64_t epoch) {
  const auto& tensors = weights.tensors();
  size_t next = 0;
  uint64_t answer = tensors.empty() ? 0 : ReadTensor(tensors[0]);
  printf("active %llu %llu\n", static_cast<unsigned long long>(epoch), static_cast<unsigned long long>(answer));
  fflush(stdout);
  while (!g_ending && member.IsActive(epoch)) {
    std::this_thread::sleep_for(std::chrono::microseconds(1'000'000 / flags.requests_per_second));
    if (tensors.empty() || !member.IsActive(epoch)) continue;
    answer += ReadTensor(tensors[next++ % tensors.size()]);
  }
}

// Until a signal ends it, or it is no member any more.
int TakePart(const Flags& flags, const weightbroker::MappedWeights& weights, weightbroker::EngineGroupMember& member) {
  Say("standby", member.epoch());
  while (!g_ending) {
    const auto epoch = member.WaitUntilActive(milliseconds(100));
    if (epoch.ok()) {
      ServeWhileActive(flags, weights, member, *epoch);
      continue;
    }
    if (epoch.status().reason() == "DEADLINE_EXCEEDED") continue;
    if (epoch.status().reason() != "GROUP_SUPERSEDED") return Fail(epoch.status());
    Say("superseded", member.epoch());
    if (!flags.rejoin) return 0;
    if (const weightbroker::Status status = member.Rejoin(); !status.ok()) return Fail(status);
    Say("standby", member.epoch());
  }
  return 0;
}

int Run(const Flags& flags) {
  weightbroker::ClientOptions client_options;
  client_options.mode = weightbroker::Mode::kClient;
  client_options.torch_version = flags.torch_version;
  client_options.socket_path = flags.socket;
  const auto client = weightbroker::Client::Create(client_options);
  if (!client.ok()) return Fail(client.status());
  weightbroker::WeightSpec spec;
  spec.model = flags.model;
  weightbroker::AttachOptions attach;
  attach.fallback = weightbroker::Fallback::kFail;
  attach.register_if_missing = flags.register_if_missing;
  attach.prefault = weightbroker::Prefault::kPopulate;
  const auto weights = client->Attach(spec, attach);
  if (!weights.ok()) return Fail(weights.status());

  weightbroker::GroupOptions group;
  group.name = flags.group;
  group.fingerprint = weights->fingerprint();
  group.heartbeat_timeout = milliseconds(flags.heartbeat_timeout_ms);
  group.socket_path = flags.socket;
  auto member = weightbroker::EngineGroupMember::Join(group);
  if (!member.ok()) return Fail(member.status());
  return TakePart(flags, *weights, *member);
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("An example engine that stands by for others of its group, and serves while it is active.");
  app.add_option("--socket", flags.socket, "The service's socket; default: as for every client");
  app.add_option("--model", flags.model, "name:relative/path under a model root, or an absolute folder")->required();
  app.add_option("--torch_version", flags.torch_version, "The engine's torch version, or \"any\"")->required();
  app.add_option("--group", flags.group, "The name of the group")->required();
  app.add_flag("--register", flags.register_if_missing, "Have the service load the weights if it does not have them");
  app.add_option("--heartbeat_timeout_ms", flags.heartbeat_timeout_ms,
                 "After how long without a heartbeat a member counts as hung; default: as the group has it");
  app.add_option("--requests_per_second", flags.requests_per_second, "How often to read a tensor while active")
      ->check(CLI::PositiveNumber);
  app.add_flag("!--no_rejoin", flags.rejoin, "End when another has taken over, instead of standing by again");
  CLI11_PARSE(app, argc, argv);
  EndOnSignals();
  return Run(flags);
}
