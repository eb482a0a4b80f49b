#include "client/tool/service_commands.h"

#include <google/protobuf/util/time_util.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/attach.h"
#include "client/src/connection.h"
#include "client/src/unregister.h"
#include "client/tool/desired_command.h"
#include "client/tool/dry_run.h"
#include "client/tool/format.h"
#include "client/tool/progress.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using client::DeadlineIn;
using google::protobuf::RepeatedPtrField;
using google::protobuf::util::TimeUtil;

constexpr size_t kShortFingerprint = 12;  // unregister takes a prefix of 8 digits or more

std::string StateName(v1::WeightSetState state) {
  return WithoutPrefix(v1::WeightSetState_Name(state), "WEIGHT_SET_STATE_");
}

std::vector<std::string> DescribeSet(const v1::WeightSet& set) {
  int64_t tensors = 0;
  int64_t bytes = 0;
  int64_t leases = 0;
  for (const v1::Shard& shard : set.shards()) {
    tensors += shard.tensor_count();
    bytes += shard.size_bytes();
    leases += shard.lease_count();
  }
  return {set.fingerprint().substr(0, kShortFingerprint),
          absl::StrCat(set.generation()),
          StateName(set.state()),
          absl::StrCat(tensors),
          FormatBytes(bytes),
          absl::StrCat(leases),
          set.load_seconds() > 0 ? FormatSeconds(set.load_seconds()) : "",
          Printable(set.spec().model())};
}

std::vector<std::string> DescribeShard(const v1::WeightSet& set, const v1::Shard& shard) {
  return {set.fingerprint().substr(0, kShortFingerprint),
          absl::StrCat(shard.rank()),
          shard.device(),
          WithoutPrefix(v1::HandleKind_Name(shard.handle_kind()), "HANDLE_KIND_"),
          absl::StrCat(shard.tensor_count()),
          FormatBytes(shard.size_bytes()),
          absl::StrCat(shard.lease_count())};
}

// Of the sets that have more than rank 0, every rank.
void PrintShards(const RepeatedPtrField<v1::WeightSet>& sets) {
  std::vector<std::vector<std::string>> rows = {
      {"FINGERPRINT", "RANK", "DEVICE", "HANDLE", "TENSORS", "MEMORY", "LEASES"}};
  for (const v1::WeightSet& set : sets) {
    if (set.shards_size() == 1 && set.shards(0).rank() == 0) continue;
    for (const v1::Shard& shard : set.shards()) rows.push_back(DescribeShard(set, shard));
  }
  if (rows.size() > 1) printf("\n%s", FormatTable(rows).c_str());
}

// Of shards in GPU memory, which is not sealed.
void PrintWhoMayWrite(const v1::WeightSet& set) {
  for (const v1::Shard& shard : set.shards()) {
    if (!shard.publisher_writable()) continue;
    printf("%s rank %d may be written to by its publisher, process %lld, until that exits\n",
           set.fingerprint().substr(0, kShortFingerprint).c_str(), shard.rank(),
           static_cast<long long>(shard.publisher_process_id()));
  }
}

void PrintQuarantine(const v1::WeightSet& set) {
  for (const v1::Shard& shard : set.shards()) {
    if (shard.quarantine().empty()) continue;
    printf("%s rank %d is in quarantine, and not exported: %s\n",
           set.fingerprint().substr(0, kShortFingerprint).c_str(), shard.rank(), Printable(shard.quarantine()).c_str());
  }
}

void PrintSets(const RepeatedPtrField<v1::WeightSet>& sets) {
  if (sets.empty()) {
    printf("no weight sets\n");
    return;
  }
  std::vector<std::vector<std::string>> rows = {
      {"FINGERPRINT", "GEN", "STATE", "TENSORS", "MEMORY", "LEASES", "LOADED IN", "MODEL"}};
  for (const v1::WeightSet& set : sets) rows.push_back(DescribeSet(set));
  printf("%s", FormatTable(rows).c_str());
  PrintShards(sets);
  for (const v1::WeightSet& set : sets) {
    PrintWhoMayWrite(set);
    PrintQuarantine(set);
    if (!set.has_failure()) continue;
    printf("%s failed: %s [%s]\n", set.fingerprint().substr(0, kShortFingerprint).c_str(),
           set.failure().message().c_str(), set.failure().reason().c_str());
  }
}

// What may become of each resident set when memory is missing.
void PrintPolicies(const RepeatedPtrField<v1::WeightSet>& sets) {
  std::vector<std::vector<std::string>> rows = {{"FINGERPRINT", "POLICY", "LAST USE", "ALIASES"}};
  for (const v1::WeightSet& set : sets) {
    if (!set.has_last_use_time()) continue;
    rows.push_back({set.fingerprint().substr(0, kShortFingerprint), set.pinned() ? "pinned" : "evictable",
                    TimeUtil::ToString(set.last_use_time()),
                    set.aliases().empty() ? "-" : absl::StrJoin(set.aliases(), " ")});
  }
  if (rows.size() > 1) printf("\n%s", FormatTable(rows).c_str());
}

void PrintSet(const v1::WeightSet& set) {
  RepeatedPtrField<v1::WeightSet> sets;
  *sets.Add() = set;
  PrintSets(sets);
}

// Nothing where there is no GPU.
void PrintGpus(const v1::HealthResponse& health) {
  if (health.devices().empty()) return;
  std::vector<std::vector<std::string>> rows = {{"GPU", "UUID", "NAME", "CAPABILITY", "MEMORY", "FREE", "USED"}};
  for (const v1::Device& gpu : health.devices()) {
    rows.push_back({absl::StrCat(gpu.ordinal()), gpu.uuid(), gpu.name(), gpu.compute_capability(),
                    FormatBytes(gpu.total_bytes()), FormatBytes(gpu.free_bytes()),
                    gpu.refusal().empty() ? "yes" : absl::StrCat("no: ", gpu.refusal())});
  }
  printf("%s\n", FormatTable(rows).c_str());
}

// Connects, makes one unary call, and prints its response with `print`.
template <typename Response, typename Call, typename Print>
ExitCode RunUnary(const ServiceFlags& flags, Call call, Print print) {
  const auto connection = Connect(flags);
  if (!connection.ok()) return PrintError(connection.status(), flags.json);
  Response response;
  const absl::Status status = (*connection)->Call(DeadlineIn(flags.timeout), [&](grpc::ClientContext& context) {
    return call(**connection, context, &response);
  });
  if (!status.ok()) return PrintError(status, flags.json);
  if (flags.json) {
    PrintJson(response);
  } else {
    print(response);
  }
  return kDone;
}

v1::RegisterRequest ToRequest(const RegisterFlags& flags) {
  v1::RegisterRequest request;
  *request.mutable_spec() = flags.spec;
  request.mutable_spec()->set_model(flags.model);
  for (const int rank : flags.ranks) request.add_ranks(rank);
  for (const std::string& device : flags.devices) request.add_devices(device);
  for (const std::string& name : flags.handle_kinds) {
    v1::HandleKind kind = v1::HANDLE_KIND_UNSPECIFIED;
    v1::HandleKind_Parse(absl::StrCat("HANDLE_KIND_", name), &kind);  // one of those that the flag may name
    request.add_handle_kinds(kind);
  }
  request.mutable_environment()->set_torch_version(flags.torch_version);
  request.set_wait(flags.wait);
  request.set_pinned(flags.pinned);
  return request;
}

absl::Status NotLoadedInTime(const RegisterFlags& flags, const LoadProgress& last) {
  const std::string seconds = absl::StrCat(std::chrono::duration<double>(flags.load_timeout).count());
  const std::string how_far = last.phase.empty()
                                  ? "nothing was heard of the load"
                                  : absl::StrCat("the load was in ", last.phase, ", at ", last.done_bytes, " of ",
                                                 last.total_bytes, " bytes, and goes on");
  return MakeError(Reason::kDeadlineExceeded,
                   absl::StrCat(Printable(flags.model), " was not resident after ", seconds, " s (--load_timeout): ",
                                how_far, "; register it again to wait on, with a longer --load_timeout"),
                   {{"seconds", seconds},
                    {"state", last.phase},
                    {"done_bytes", absl::StrCat(last.done_bytes)},
                    {"total_bytes", absl::StrCat(last.total_bytes)}});
}

absl::StatusOr<v1::WeightSet> Register(const ServiceFlags& service, const RegisterFlags& flags) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connect(service));
  ProgressPrinter progress;
  LoadProgress last;
  absl::StatusOr<v1::WeightSet> set = client::RegisterAndWait(
      *connection, ToRequest(flags), DeadlineIn(flags.wait ? flags.load_timeout : service.timeout),
      [&](const LoadProgress& now) {
        progress.Show(now);
        last = now;
      });
  if (!set.ok() && flags.wait && HasReason(set.status(), Reason::kDeadlineExceeded)) {
    return NotLoadedInTime(flags, last);
  }
  return set;
}

absl::StatusOr<v1::UnregisterResponse> Unregister(const ServiceFlags& service, const v1::UnregisterRequest& request) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connect(service));
  return client::UnregisterOnce(*connection, request, DeadlineIn(service.timeout));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Connection>> Connect(const ServiceFlags& service) {
  constexpr std::chrono::milliseconds kRefusalPatience(1000);
  return Connection::Open({.socket_path = service.socket, .refusal_patience = kRefusalPatience});
}

void PrintHealth(const v1::HealthResponse& health) {
  const std::string limit = health.memory_limit_bytes() > 0 ? FormatBytes(health.memory_limit_bytes()) : "none";
  printf("%s", FormatTable({{"status", StatusName(health)},
                            {"version", health.version()},
                            {"process", absl::StrCat(health.process_id())},
                            {"since", TimeUtil::ToString(health.start_time())},
                            {"memory", absl::StrCat(FormatBytes(health.reserved_bytes()), " reserved, limit ", limit,
                                                    ", ", FormatBytes(health.available_bytes()), " available")},
                            {"pages", WithoutPrefix(v1::PageKind_Name(health.host_page_kind()), "PAGE_KIND_")},
                            {"leases", absl::StrCat(health.lease_count())},
                            {"loads", absl::StrCat(health.load_count())},
                            {"connections", absl::StrCat(health.connection_count())},
                            {"model roots", absl::StrJoin(health.model_roots(), " ")}})
                   .c_str());
  printf("\n");
  PrintGpus(health);
  PrintSets(health.weight_sets());
  if (health.desired_sets().empty() && !health.has_desired_failure()) return;
  printf("\n");
  PrintDesired(health);
}

absl::StatusOr<v1::HealthResponse> AskHealth(const ServiceFlags& service) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Connection> connection, Connect(service));
  v1::HealthResponse response;
  RETURN_IF_ERROR(connection->Call(DeadlineIn(service.timeout), [&](grpc::ClientContext& context) {
    return connection->service().Health(&context, {}, &response);
  }));
  return response;
}

ExitCode RunRegister(const ServiceFlags& service, const RegisterFlags& flags) {
  if (flags.dry_run) return RunDryRun(service, ToRequest(flags), flags.load_timeout);
  const absl::StatusOr<v1::WeightSet> set = Register(service, flags);
  if (!set.ok()) return PrintError(set.status(), service.json);
  if (service.json) {
    PrintJson(*set);
  } else {
    PrintSet(*set);
  }
  return kDone;
}

ExitCode RunUnregister(const ServiceFlags& service, const UnregisterFlags& flags) {
  v1::UnregisterRequest request;
  request.set_fingerprint(flags.fingerprint);
  request.set_force(flags.force);
  const absl::StatusOr<v1::UnregisterResponse> response = Unregister(service, request);
  if (!response.ok()) return PrintError(response.status(), service.json);
  if (service.json) {
    PrintJson(*response);
    return kDone;
  }
  PrintSet(response->weight_set());
  if (response->ended_lease_count() > 0) {
    printf("ended by force: %s\n", FormatCount(response->ended_lease_count(), "lease").c_str());
  }
  return kDone;
}

ExitCode RunList(const ServiceFlags& service) {
  return RunUnary<v1::ListWeightSetsResponse>(
      service,
      [](const Connection& connection, grpc::ClientContext& context, v1::ListWeightSetsResponse* response) {
        return connection.admin_service().ListWeightSets(&context, {}, response);
      },
      [](const v1::ListWeightSetsResponse& response) {
        PrintSets(response.weight_sets());
        PrintPolicies(response.weight_sets());
      });
}

ExitCode RunHealth(const ServiceFlags& service) {
  return RunUnary<v1::HealthResponse>(
      service,
      [](const Connection& connection, grpc::ClientContext& context, v1::HealthResponse* response) {
        return connection.service().Health(&context, {}, response);
      },
      PrintHealth);
}

}  // namespace weightbroker::tool
