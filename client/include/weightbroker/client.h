// Weights for an inference engine: mapped from a running weightbroker service, or loaded from disk where there is none.
//
//   auto client = weightbroker::Client::Create({.mode = weightbroker::Mode::kClient, .torch_version = "2.11.0"});
//   if (!client.ok()) return Fail(client.status());
//   auto weights = client->Attach({.model = "/models/llama"});
//   if (!weights.ok()) return Fail(weights.status());        // neither service nor disk: status says why
//   for (const weightbroker::Tensor& tensor : *weights) Bind(tensor.name, tensor.data, tensor.dtype, tensor.shape);
//
// C++17. (The example's designated initializers are C++20; assign the fields in C++17.) Thread-safe: several threads
// may attach through one Client. Do not fork() after Create: gRPC's threads do not survive it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "weightbroker/export.h"
#include "weightbroker/mapped_weights.h"
#include "weightbroker/publisher.h"
#include "weightbroker/status.h"

namespace weightbroker {

namespace client {
class ClientState;
}

enum class Mode {
  kOff,     // load from disk in this process, with the service's own reader, checks and loader
  kClient,  // attach to a running service
  kDaemon,  // the same, after starting one where none answers; of many processes that do so at once, one does it
};

// What Attach does when the service cannot give the weights.
enum class Fallback {
  kDisk,  // loads them from disk, as Mode::kOff does
  kFail,  // fails with the service's error
};

// Ways for this process to map the service's memory, with the numbers of weightbroker.v1.HandleKind.
enum class HandleKind : int32_t {
  kHostMemfd = 1,  // host memory, read-only for everyone
  kCudaVmmFd = 2,  // GPU memory that outlives the process that made it; mapped read-only
  kCudaIpc = 3,    // GPU memory that can be mapped while the process that made it lives; writable
};

// How Mode::kDaemon starts a service. It is detached: it goes on when this process has ended, until it gets SIGTERM.
struct DaemonOptions {
  // The path of weightbrokerd. Empty: $WEIGHTBROKERD, else the one beside this process's program.
  std::string program;
  // Its flags, besides --socket and a --model_roots for each of ClientOptions::model_roots. Only the process that
  // starts it is heard.
  std::vector<std::string> flags;
  // Where its log lines go, appended. Empty: the socket's path and ".log".
  std::string log_path;
};

struct ClientOptions {
  Mode mode = Mode::kOff;
  // The engine's torch version, or the literal "any" for an engine whose weights do not depend on it. Required, because
  // it is part of the fingerprint; "any" matches only "any".
  std::string torch_version;
  // Where the service listens. Empty: $WEIGHTBROKER_SOCKET, else /run/weightbroker/weightbroker.sock for root, else
  // $XDG_RUNTIME_DIR/weightbroker/weightbroker.sock. With "{gpu_uuid}" in it there is one service for each GPU: see
  // AttachOptions::devices.
  std::string socket_path;
  // Folders by name, for specs "name:relative/path" that are loaded from disk; a running service has its own.
  std::map<std::string, std::string> model_roots;
  DaemonOptions daemon;  // for Mode::kDaemon
};

// Which weights are meant. Everything in it is part of the fingerprint.
struct WeightSpec {
  std::string model;                 // a folder, absolute, or "name:relative/path" under a model root
  int32_t tensor_parallel_size = 1;  // over how many ranks each weight is split
  std::string quantization;  // "none", "fp8", "fp8_block" (while it is loaded), or empty for the checkpoint's own
  std::string dtype;         // "BF16", "F16", "F32", or empty for the checkpoint's own
  std::string layout;        // "hf" (or empty), the checkpoint's names; "fused"; "engine", an engine's own
  int32_t pipeline_parallel_size = 1;            // over how many stages the layers are split
  int32_t expert_parallel_size = 1;              // over how many groups the experts are split
  int32_t data_parallel_size = 1;                // how many replicas there are of everything but the experts
  std::string mtp_layers;                        // of multi-token prediction: "keep" (or empty) or "drop"
  std::vector<std::string> unquantized_modules;  // which "fp8_block" leaves as they are
  std::string engine;                            // with layout "engine", and only then: whose
  std::string engine_version;                    // and of which version
};

struct LoadProgress {
  std::string phase;  // "ALLOCATING", "LOADING", "VERIFYING", "RESIDENT"
  int64_t done_bytes = 0;
  int64_t total_bytes = 0;  // 0 until known
  double rate_bytes_per_second = 0;
  double seconds_left = -1;  // at that rate; negative until known
};

// What happens to the hold on attached weights after Attach has returned. Mapped memory stays valid whatever it is.
struct LeaseEvent {
  enum class Kind {
    kDraining,     // the service says that it takes the weight set, or itself, down
    kInterrupted,  // the lease has ended, with its broker or by an operator; it is being renewed
    kRenewed,      // the service counts this mapping again
    kLost,         // the weight set has been released, or the service stayed away too long; nothing follows
    kSuperseded,   // the alias that was attached by names another weight set now; the lease goes on as it was
    kQuarantined,  // the service has found these bytes damaged, or their GPU faulty: do not use them; see `why`
  };
  Kind kind = Kind::kLost;
  Status why;                    // ok for kRenewed and kSuperseded
  std::string alias = {};        // for kSuperseded
  std::string fingerprint = {};  // of the weight set that it names now, for kSuperseded
};

// When pages of attached memory are mapped into the process.
enum class Prefault {
  kNone,      // on first touch, one by one
  kPopulate,  // all before Attach returns, in large steps (MADV_POPULATE_READ; Linux 5.14). On a GPU: always so
};

struct AttachOptions {
  Fallback fallback = Fallback::kDisk;
  // If the service does not have the weights, have it load them, and wait.
  bool register_if_missing = false;
  // Called on the attaching thread while the service loads, at least twice a second. May be empty.
  std::function<void(const LoadProgress&)> on_progress;
  // For everything but loading: to reach the service or, in Mode::kDaemon, start one; and to have every tensor's
  // address.
  std::chrono::milliseconds deadline{10'000};
  // For the service to load the weights, where register_if_missing asks for it.
  std::chrono::milliseconds load_deadline{3'600'000};
  // Which of the spec's ranks this engine is, from 0: the one whose shard it gets. RANK_NOT_HERE if the service holds
  // only others.
  int32_t rank = 0;
  // Attaches to the weight set with this fingerprint (all 64 digits), whatever the model's files are now; NOT_RESIDENT
  // if there is none, and nothing is registered. Empty: to the one that spec, environment and files come to. From disk
  // it is not looked at.
  std::string fingerprint;
  // Attaches to the weight set that this alias ("llama@live") names at this moment, whatever the model's files are;
  // ALIAS_UNKNOWN if there is none. MappedWeights::fingerprint() says which one it was. When the alias is moved to
  // another, on_lease_event gets kSuperseded: attach again, by the same alias, when it suits, and let go of the old
  // weights once nothing uses them. Nothing is registered. Not together with `fingerprint`. From disk it is not looked
  // at.
  std::string alias;
  // The engine's GPU, as this process counts (torch's cuda:N); -1 for weights in host memory. Weights that lie on
  // another GPU are refused, though the driver could map them: every access would go over the link between the two.
  // The calling thread's current device and context stay as they are. The GPU's primary context, which torch and
  // CUDA's runtime use too, is created if nobody has (110 to 150 ms).
  int32_t cuda_device = -1;
  // What the engine can map, best first. Empty: kCudaVmmFd and kCudaIpc with a GPU, else kHostMemfd.
  std::vector<HandleKind> handle_kinds;
  // The UUID of each rank's GPU on this node, in the order of ranks, for every rank the same list.
  // With one service for the node it says where register_if_missing puts the ranks; empty: a single rank goes to this
  // engine's GPU, and several where the service chooses.
  // With one service for each GPU it is required for more than one rank: no rank is attached before all of them hold
  // weights of one fingerprint.
  std::vector<std::string> devices;
  // Where the weights are loaded from disk to a GPU that lacks the memory: have the service let go of sets on it that
  // nobody holds, pins or names by an alias, those not used for longest first, until there is room.
  bool evict_unleased = false;
  Prefault prefault = Prefault::kNone;
  // Reads every byte that has been attached before Attach returns, as MappedWeights::Verify does. If a digest differs
  // the service is told, which then checks for itself, and Attach fails with DIGEST_MISMATCH, or falls back.
  bool verify = false;
  // For prefaulting, verifying and reading from disk; 0 chooses.
  int threads = 0;
  // How long after its interruption a lease may be renewed: a service that is being replaced is back sooner. 0: it is
  // lost at once.
  std::chrono::milliseconds lease_renewal_deadline{60'000};
  // Called on a thread of this library, one event after the other, and not once the weights have been destroyed. It
  // must not destroy them. May be empty.
  std::function<void(const LeaseEvent&)> on_lease_event;
};

// How long the parts of a publication took, each by itself, and how much was copied for it.
struct PublishTimes {
  double grant_seconds = 0;   // from the offer to memory that can be written to
  double load_seconds = 0;    // the loader's own work, with what memory it had added
  double finish_seconds = 0;  // from its return until everything had been written
  double commit_seconds = 0;  // until the service had taken it over, digests among it
  double digest_seconds = 0;  // of these, the service's taking of digests
  int64_t copied_bytes = 0;   // by Publisher::Add, or told to CountCopy
};

struct PublishOptions {
  // Of these, what is for attaching: rank, cuda_device, handle_kinds, devices, deadline, prefault, ...; load_deadline
  // is for another engine to publish. On a GPU a single rank is published to the engine's own; of several, `devices`
  // says where each is, for every rank the same list.
  AttachOptions attach;
  // How many bytes there will be in all, where that is known: one slab for them all. 0: slabs are added as they are
  // needed.
  int64_t expected_bytes = 0;
  // Every tensor that there will be, aliases with `alias_of`, where that is known: something else is then refused.
  std::vector<TensorToPublish> promise;
  // Called on the publishing thread once what it has published has been taken over. May be empty.
  std::function<void(const PublishTimes&)> on_published;
};

class WEIGHTBROKER_EXPORT Client {
 public:
  // Checks the options and, unless in Mode::kOff, begins to connect without waiting: that no service answers is found,
  // or changed, by the first call. ENVIRONMENT_REQUIRED without a torch version; SOCKET_PATH_INVALID if no socket path
  // can be derived.
  static Result<Client> Create(const ClientOptions& options);

  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();  // weights that were attached stay mapped and leased

  // Waits until the service is reached. SERVICE_UNAVAILABLE after `deadline`; SERVICE_NOT_STARTED in Mode::kDaemon,
  // with the last lines of the log; at once, ok, in Mode::kOff.
  Status WaitUntilConnected(std::chrono::milliseconds deadline) const;

  // Makes every tensor of `spec` addressable. A service that is being replaced is waited for, and a call that was in
  // flight is made again, within the deadline. Fails with the service's reason (NOT_RESIDENT, FINGERPRINT_MISMATCH with
  // every differing field in metadata, ...), or, with Fallback::kDisk, only if loading from disk fails too (then with
  // the disk's reason, and the service's in metadata["service_reason"]). What the service sends is not trusted:
  // PROTOCOL_ERROR if the manifest or the memory are not what they must be.
  // With a GPU also DEVICE_MISMATCH naming both UUIDs, HANDLE_STALE where a CUDA IPC handle's maker has gone,
  // GPU_UNAVAILABLE, DRIVER_TOO_OLD, DEVICE_UNKNOWN, CUDA_ERROR; and from disk MEMORY_EXHAUSTED with need, have and
  // who holds the rest.
  Result<MappedWeights> Attach(const WeightSpec& spec, const AttachOptions& options = {}) const;

  // Attaches to weights that an engine has published, or has `load` publish them: of many engines that do this at once
  // one does, and the others wait and attach. `spec.layout` is "engine". `load` puts every tensor into the publisher
  // and returns ok, and all that it was given goes when it returns; what it fails with comes back, and nothing is left.
  // If the engine that publishes ends, another one's `load` is called; a `load` whose publication ends under it, with
  // its broker or with another rank's publisher, is called again, three times in all. Fails as Attach does (there is no
  // fallback to disk), with MODE_OFF, PROMISE_BROKEN, MEMORY_EXHAUSTED, ... GPU memory, unlike the host's, cannot be
  // sealed: the service says of such a set that this process may write to it until it has exited. What comes back is
  // another mapping than the publisher's, read-only where the kind allows it.
  using Loader = std::function<Status(Publisher&)>;
  Result<MappedWeights> AttachOrPublish(const WeightSpec& spec, const Loader& load,
                                        const PublishOptions& options = {}) const;

 private:
  explicit Client(std::shared_ptr<client::ClientState> state);

  std::shared_ptr<client::ClientState> state_;
};

}  // namespace weightbroker
