#include "client/src/map_shard.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/cuda_memory.h"
#include "client/src/host_memory.h"
#include "client/src/redeem_ticket.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::client {
namespace {

// Of all slabs of a shard; unspecified if it has none, because every tensor is empty.
absl::StatusOr<v1::HandleKind> KindOf(const v1::ExportHeader& header, bool on_host) {
  v1::HandleKind kind = v1::HANDLE_KIND_UNSPECIFIED;
  int64_t total_bytes = 0;
  for (const v1::Slab& slab : header.slabs()) {
    const bool fits = (slab.handle_kind() == v1::HANDLE_KIND_HOST_MEMFD) == on_host &&
                      (kind == v1::HANDLE_KIND_UNSPECIFIED || kind == slab.handle_kind());
    kind = slab.handle_kind();
    const bool has_size =
        slab.size_bytes() > 0 && !__builtin_add_overflow(total_bytes, slab.size_bytes(), &total_bytes);
    if (!fits || kind == v1::HANDLE_KIND_UNSPECIFIED || !v1::HandleKind_IsValid(kind) || !has_size) {
      return NotTrusted(absl::StrCat("a slab of kind ", v1::HandleKind_Name(kind), " and ", slab.size_bytes(),
                                     " bytes on ", header.device()));
    }
  }
  return kind;
}

absl::StatusOr<std::vector<UniqueFd>> RedeemAll(const Connection& connection, const v1::ExportHeader& header,
                                                Deadline deadline) {
  if (header.slabs().empty()) return std::vector<UniqueFd>();
  const auto count = static_cast<size_t>(header.slabs_size());
  ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, RedeemTicket(connection.socket_path(), header.ticket(), count, deadline));
  if (fds.size() == count) return fds;
  return NotTrusted(absl::StrCat(fds.size(), " descriptors for ", count, " slabs"));
}

absl::StatusOr<std::unique_ptr<ShardMemory>> MapOnHost(const v1::ExportHeader& header,
                                                       const std::vector<UniqueFd>& fds) {
  auto memory = std::make_unique<HostMemory>();
  for (size_t i = 0; i < fds.size(); ++i) {
    RETURN_IF_ERROR(memory->Map(fds[i].get(), header.slabs(static_cast<int>(i)).size_bytes()));
  }
  return memory;
}

absl::StatusOr<std::unique_ptr<ShardMemory>> ImportOnGpu(const CudaContext& context, const v1::ExportHeader& header,
                                                         const std::vector<UniqueFd>& fds) {
  std::vector<VmmSlab> slabs;
  for (size_t i = 0; i < fds.size(); ++i) {
    slabs.push_back({fds[i].get(), header.slabs(static_cast<int>(i)).size_bytes()});
  }
  return CudaMemory::Import(context, header.device(), slabs);
}

absl::StatusOr<std::unique_ptr<ShardMemory>> OpenOnGpu(const CudaContext& context, const v1::ExportHeader& header) {
  std::vector<IpcSlab> slabs;
  for (const v1::Slab& slab : header.slabs()) {
    IpcSlab& opened = slabs.emplace_back();
    opened.size_bytes = slab.size_bytes();
    if (slab.cuda_ipc_handle().size() != opened.handle.size()) {
      return NotTrusted(absl::StrCat("a CUDA IPC handle of ", slab.cuda_ipc_handle().size(), " bytes"));
    }
    memcpy(opened.handle.data(), slab.cuda_ipc_handle().data(), opened.handle.size());
  }
  return CudaMemory::Open(context, header.device(), slabs);
}

}  // namespace

absl::Status NotTrusted(const std::string& what) {
  return MakeError(Reason::kProtocolError,
                   absl::StrCat("the service answered Export with ", what,
                                "; service and client library may be of different versions"),
                   {{"fault", what}});
}

absl::StatusOr<std::unique_ptr<ShardMemory>> MapShard(const Connection& connection, const v1::ExportHeader& header,
                                                      const EngineDevice& engine, Deadline deadline) {
  RETURN_IF_ERROR(CheckLiesOn(engine, header.device()));
  for (const v1::Slab& slab : header.slabs()) {
    if (!slab.device_uuid().empty()) RETURN_IF_ERROR(CheckLiesOn(engine, slab.device_uuid()));
  }
  ASSIGN_OR_RETURN(const v1::HandleKind kind, KindOf(header, engine.is_host()));
  std::vector<UniqueFd> fds;
  if (kind != v1::HANDLE_KIND_CUDA_IPC) {
    // Before the context, whose making takes so long that in a bad hour broker after broker dies meanwhile, and each
    // one's ticket with it.
    ASSIGN_OR_RETURN(fds, RedeemAll(connection, header, deadline));
  }
  if (engine.is_host()) return MapOnHost(header, fds);
  ASSIGN_OR_RETURN(const CudaContext context, CudaContext::Retain(*engine.driver, engine.device));
  return kind == v1::HANDLE_KIND_CUDA_IPC ? OpenOnGpu(context, header) : ImportOnGpu(context, header, fds);
}

}  // namespace weightbroker::client
