// An engine of the chaos: attaches to a model of its own, to one that all share, or to weights that engines like it
// publish; compares every byte with what it must be; holds what it has for a moment, leaves, and begins anew, until
// SIGTERM or until it has had enough. It ends at once with an exit code of its own when a byte is wrong, or when
// weights that are there could not be attached.
//
// With --gpu its own model is on the first GPU, and so is another one (--exported_model), which whoever exports it by
// CUDA IPC takes with it when it is killed: then an attach may be refused, with a reason that says so.

#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/integration/chaos/tally.h"
#include "tests/integration/chaos/tensor_reader.h"
#include "tests/support/engine_client.h"
#include "weightbroker/client.h"

namespace weightbroker::testing {
namespace {

using std::chrono::milliseconds;

volatile sig_atomic_t stopped = 0;

struct Flags {
  std::string socket;
  std::string own_model;
  std::string shared_model;
  std::string exported_model;
  bool gpu = false;
  std::string tally;
  uint32_t seed = 1;
};

constexpr int64_t kPublishedBytes = 1 << 20;
constexpr uint32_t kPublishedTensors = 3;
constexpr uint32_t kPublishedVersions = 3;
constexpr uint32_t kLongestHoldMs = 100;
// Longer than all that is done to the service at once: it is stopped, found to hang, killed and started again.
constexpr milliseconds kDeadline(15'000);
// What an attach may be told of weights whose exporter is being killed, and which are then loaded anew.
constexpr std::string_view kExportRefusals[] = {"EXPORTER_DEAD", "HANDLE_STALE", "NOT_RESIDENT", "STILL_LOADING",
                                                "LOADER_FAILED"};

class Engine {
 public:
  explicit Engine(Flags flags) : flags_(std::move(flags)), random_(flags_.seed), tally_(MapTally(flags_.tally)) {}

  void Run() {
    while (stopped == 0) {
      if (!client_.has_value() || Chance(2)) client_.emplace(EngineClient(flags_.socket));
      DoOne();
      std::this_thread::sleep_for(milliseconds(random_() % 20));  // it has other things to do, too
      if (Chance(50)) break;
    }
    ++tally_->left;
  }

 private:
  bool Chance(uint32_t in) { return random_() % in == 0; }

  void DoOne() {
    if (Chance(4)) return PublishOrAttach();
    if (flags_.gpu && Chance(3)) return AttachToExported();
    Chance(3) ? Attach(flags_.shared_model, Options()) : Attach(flags_.own_model, OwnOptions());
  }

  AttachOptions Options() {
    AttachOptions options;
    options.fallback = Fallback::kFail;
    options.deadline = kDeadline;
    options.verify = Chance(4);
    return options;
  }

  AttachOptions OwnOptions() {
    AttachOptions options = Options();
    if (flags_.gpu) options.cuda_device = 0;
    return options;
  }

  void AttachToExported() {
    WeightSpec spec;
    spec.model = flags_.exported_model;
    const auto weights = client_->Attach(spec, OwnOptions());
    if (weights.ok()) {
      ++tally_->exported;
      return CompareAndHold(*weights, "");
    }
    const std::string reason = weights.status().reason();
    const auto end = std::end(kExportRefusals);
    if (std::find(std::begin(kExportRefusals), end, reason) == end) ExitUnattached(spec.model, weights.status());
    ++tally_->export_refusals;
  }

  void Attach(const std::string& model, const AttachOptions& options) {
    WeightSpec spec;
    spec.model = model;
    const auto weights = client_->Attach(spec, options);
    if (!weights.ok()) ExitUnattached(model, weights.status());
    ++tally_->attached;
    if (options.verify) ++tally_->verified;
    CompareAndHold(*weights, "");
  }

  [[noreturn]] static void ExitUnattached(const std::string& model, const weightbroker::Status& status) {
    fprintf(stderr, "%s could not be attached: %s: %s\n", model.c_str(), status.reason().c_str(),
            status.message().c_str());
    exit(status.reason() == "DIGEST_MISMATCH" ? kWrongBytes : kCannotAttach);
  }

  // Of what engines of one version publish, the bytes are those of tensors with the version in their names.
  void PublishOrAttach() {
    const std::string version = std::to_string(random_() % kPublishedVersions);
    WeightSpec spec;
    spec.model = flags_.shared_model;
    spec.layout = "engine";
    spec.engine = "chaos";
    spec.engine_version = version;
    PublishOptions options;
    options.attach = Options();
    bool published = false;
    options.on_published = [&](const PublishTimes&) { published = true; };
    const auto weights = client_->AttachOrPublish(
        spec, [&](Publisher& publisher) { return Publish(publisher, "@" + version); }, options);
    if (!weights.ok()) {
      if (weights.status().reason() == "DIGEST_MISMATCH") exit(kWrongBytes);
      ++tally_->publish_failures;
      fprintf(stderr, "publishing: %s: %s\n", weights.status().reason().c_str(), weights.status().message().c_str());
      return;
    }
    ++(published ? tally_->published : tally_->attached);
    CompareAndHold(*weights, "@" + version);
  }

  Status Publish(Publisher& publisher, const std::string& suffix) {
    for (uint32_t i = 0; i < kPublishedTensors; ++i) {
      TensorToPublish tensor;
      tensor.name = "published." + std::to_string(i);
      tensor.dtype = DataType::kU8;
      tensor.shape = {kPublishedBytes};
      const std::string& bytes = right_.Of(tensor.name + suffix, kPublishedBytes);
      if (Status status = publisher.Add(tensor, bytes.data()); !status.ok()) return status;
      if (Chance(4)) std::this_thread::sleep_for(milliseconds(random_() % kLongestHoldMs));
    }
    return Status();
  }

  void CompareAndHold(const MappedWeights& weights, const std::string& suffix) {
    Compare(weights, suffix);
    if (!Chance(2)) return;
    std::this_thread::sleep_for(milliseconds(random_() % kLongestHoldMs));
    Compare(weights, suffix);
  }

  void Compare(const MappedWeights& weights, const std::string& suffix) {
    for (const Tensor& tensor : weights) {
      const std::string& right = right_.Of(std::string(tensor.name) + suffix, static_cast<size_t>(tensor.size_bytes));
      if (memcmp(right.data(), reader_.Read(weights, tensor), right.size()) != 0) {
        fprintf(stderr, "wrong bytes in %s of %s\n", std::string(tensor.name).c_str(), weights.fingerprint().c_str());
        exit(kWrongBytes);
      }
      tally_->compared_bytes += tensor.size_bytes;
    }
  }

  const Flags flags_;
  std::mt19937 random_;
  Tally* const tally_;
  std::optional<Client> client_;
  RightBytes right_;
  TensorReader reader_;
};

}  // namespace
}  // namespace weightbroker::testing

int main(int argc, char** argv) {
  weightbroker::testing::Flags flags;
  CLI::App app("An engine of the chaos");
  app.add_option("--socket", flags.socket)->required();
  app.add_option("--own_model", flags.own_model)->required();
  app.add_option("--shared_model", flags.shared_model)->required();
  app.add_option("--exported_model", flags.exported_model);
  app.add_flag("--gpu", flags.gpu);
  app.add_option("--tally", flags.tally)->required();
  app.add_option("--seed", flags.seed);
  CLI11_PARSE(app, argc, argv);
  signal(SIGTERM, [](int) { weightbroker::testing::stopped = 1; });
  weightbroker::testing::Engine(flags).Run();
  return 0;
}
