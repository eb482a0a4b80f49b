#include "bench/standby/member.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "bench/bench_support.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/device/cuda_context.h"
#include "weightbroker/client.h"
#include "weightbroker/engine_group.h"

namespace weightbroker::bench {
namespace {

absl::Status ToAbsl(const Status& status) {
  return status.ok() ? absl::OkStatus() : MakeError(Reason::kSystemError, status.ToString());
}

Result<MappedWeights> AttachTo(const MemberFlags& flags) {
  ClientOptions options;
  options.mode = Mode::kClient;
  options.torch_version = "any";
  options.socket_path = flags.socket;
  const Result<Client> client = Client::Create(options);
  if (!client.ok()) return client.status();
  if (const Status status = client->WaitUntilConnected(std::chrono::seconds(60)); !status.ok()) return status;
  WeightSpec spec;
  spec.model = flags.model;
  AttachOptions attach;
  attach.fallback = Fallback::kFail;
  attach.register_if_missing = true;
  attach.prefault = Prefault::kPopulate;
  if (flags.gpu) attach.cuda_device = 0;
  return client->Attach(spec, attach);
}

// Reads weights where they lie.
class Reader {
 public:
  static absl::StatusOr<Reader> Create(bool gpu) {
    Reader reader;
    if (!gpu) return reader;
    ASSIGN_OR_RETURN(CudaDriver* const driver, LoadCudaDriver());
    ASSIGN_OR_RETURN(reader.context_, CudaContext::Retain(*driver, /*device=*/0));
    return reader;
  }

  absl::StatusOr<uint64_t> FirstByte(const Tensor& tensor) const {
    if (!context_.has_value()) return static_cast<uint64_t>(*static_cast<const volatile std::byte*>(tensor.data));
    const CudaScope current(*context_);
    RETURN_IF_ERROR(current.status());
    CudaDriver& driver = context_->driver();
    std::byte byte{};
    CudaResult result =
        driver.MemcpyDtoHAsync(&byte, reinterpret_cast<CudaDevicePtr>(tensor.data), sizeof(byte), nullptr);
    if (result == kCudaSuccess) result = driver.StreamSynchronize(nullptr);
    if (result != kCudaSuccess) return CudaError(driver, result, "cuMemcpyDtoHAsync", "reading a weight");
    return static_cast<uint64_t>(byte);
  }

 private:
  std::optional<CudaContext> context_;
};

absl::Status Tell(const MemberReport& report) {
  if (send(kReportFd, &report, sizeof(report), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(report))) {
    return absl::OkStatus();
  }
  return SystemError("the report to the observer", errno);
}

// Memory of this process alone, all of it written to, that the kernel has to free when it dies.
absl::Status Hold(int64_t bytes, bool huge_pages) {
  if (bytes == 0) return absl::OkStatus();
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return SystemError("mmap of the memory to hold", errno);
  if (huge_pages && madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE) != 0) {
    return SystemError("madvise(MADV_HUGEPAGE)", errno);
  }
  const auto touch = [memory](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += 4096) static_cast<volatile char*>(memory)[i] = 1;
  };
  std::thread half(touch, 0, bytes / 2);
  touch(bytes / 2, bytes);
  half.join();
  return absl::OkStatus();
}

absl::Status BeActive(const MemberFlags& flags, const Reader& reader, const Tensor& tensor,
                      const EngineGroupMember& member, uint64_t epoch) {
  MemberReport report{.step = MemberReport::Step::kActive, .epoch = epoch, .woken_at = NowSeconds()};
  ASSIGN_OR_RETURN(report.byte, reader.FirstByte(tensor));
  report.read_at = NowSeconds();
  if (!member.IsActive(epoch)) return MakeError(Reason::kGroupSuperseded, "superseded before the first read was over");
  RETURN_IF_ERROR(Tell(report));
  RETURN_IF_ERROR(Hold(flags.hold_bytes, flags.huge_pages));
  report.step = MemberReport::Step::kHolds;
  RETURN_IF_ERROR(Tell(report));
  while (member.IsActive(epoch)) std::this_thread::sleep_for(std::chrono::microseconds(200));
  report.step = MemberReport::Step::kFenced;
  RETURN_IF_ERROR(Tell(report));
  while (true) pause();  // until the observer ends it
}

}  // namespace

absl::Status RunMember(const MemberFlags& flags) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // no engine with so much memory outlives an observer that was ended
  const Result<MappedWeights> weights = AttachTo(flags);
  if (!weights.ok()) return ToAbsl(weights.status());
  ASSIGN_OR_RETURN(const Reader reader, Reader::Create(flags.gpu));
  const Tensor& tensor = weights->tensors()[static_cast<size_t>(getpid()) % weights->tensors().size()];
  if (flags.gpu) RETURN_IF_ERROR(reader.FirstByte(tensor).status());  // the driver's own first time
  GroupOptions options;
  options.name = flags.group;
  options.fingerprint = weights->fingerprint();
  options.heartbeat_timeout = std::chrono::milliseconds(flags.timeout_ms);
  options.socket_path = flags.socket;
  auto member = EngineGroupMember::Join(options);
  if (!member.ok()) return ToAbsl(member.status());
  RETURN_IF_ERROR(Tell({.step = MemberReport::Step::kJoined}));
  const Result<uint64_t> epoch = member->WaitUntilActive(std::chrono::hours(24));
  if (!epoch.ok()) return ToAbsl(epoch.status());
  return BeActive(flags, reader, tensor, *member, *epoch);
}

}  // namespace weightbroker::bench
