#include "client/tool/scrub_command.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/src/connection.h"
#include "client/tool/format.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/strings.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using Json = nlohmann::ordered_json;

using Shards = std::vector<v1::ScrubbedShard>;

std::string ResultName(const v1::ScrubbedShard& shard) {
  return WithoutPrefix(v1::ScrubbedShard::Result_Name(shard.result()), "RESULT_");
}

bool IsIntact(const Shards& shards) {
  for (const v1::ScrubbedShard& shard : shards) {
    if (shard.result() != v1::ScrubbedShard::RESULT_INTACT) return false;
  }
  return true;
}

void PrintTables(const Shards& shards) {
  if (shards.empty()) {
    printf("no shard is resident\n");
    return;
  }
  std::vector<std::vector<std::string>> rows = {{"FINGERPRINT", "RANK", "RESULT", "TENSORS", "READ", "SECONDS"}};
  for (const v1::ScrubbedShard& shard : shards) {
    rows.push_back({shard.fingerprint().substr(0, 12), absl::StrCat(shard.rank()), ResultName(shard),
                    absl::StrCat(shard.tensor_count()), FormatBytes(shard.checked_bytes()),
                    FormatSeconds(shard.seconds())});
  }
  printf("%s", FormatTable(rows).c_str());
  for (const v1::ScrubbedShard& shard : shards) {
    for (const v1::DamagedTensor& tensor : shard.damaged()) {
      printf("%s rank %d is damaged: tensor %s, slab %d, bytes %lld to %lld\n",
             shard.fingerprint().substr(0, 12).c_str(), shard.rank(), Quote(tensor.name()).c_str(), tensor.slab(),
             static_cast<long long>(tensor.offset_bytes()),
             static_cast<long long>(tensor.offset_bytes() + tensor.size_bytes() - 1));
    }
    if (shard.has_failure()) {
      printf("%s rank %d was not checked: %s [%s]\n", shard.fingerprint().substr(0, 12).c_str(), shard.rank(),
             shard.failure().message().c_str(), shard.failure().reason().c_str());
    }
  }
}

Json TensorJson(const v1::DamagedTensor& tensor) {
  return {{"name", tensor.name()},
          {"slab", tensor.slab()},
          {"offset_bytes", tensor.offset_bytes()},
          {"size_bytes", tensor.size_bytes()},
          {"expected_digest", absl::BytesToHexString(tensor.expected_digest())},
          {"found_digest", absl::BytesToHexString(tensor.found_digest())}};
}

Json ShardJson(const v1::ScrubbedShard& shard) {
  Json damaged = Json::array();
  for (const v1::DamagedTensor& tensor : shard.damaged()) damaged.push_back(TensorJson(tensor));
  Json json = {{"fingerprint", shard.fingerprint()},
               {"rank", shard.rank()},
               {"result", ResultName(shard)},
               {"tensor_count", shard.tensor_count()},
               {"checked_bytes", shard.checked_bytes()},
               {"seconds", shard.seconds()},
               {"damaged", std::move(damaged)},
               {"failure", nullptr}};
  if (shard.has_failure()) {
    json["failure"] = {{"reason", shard.failure().reason()}, {"message", shard.failure().message()}};
  }
  return json;
}

void PrintReportJson(const Shards& shards) {
  Json list = Json::array();
  for (const v1::ScrubbedShard& shard : shards) list.push_back(ShardJson(shard));
  const Json json = {{"ok", IsIntact(shards)}, {"shards", std::move(list)}};
  printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

// A scrub may take hours; what is waited for with a limit is the service's answering at all.
absl::StatusOr<Shards> Scrub(const Connection& connection, const ScrubFlags& flags, const ServiceFlags& service) {
  if (absl::Status reached = connection.Reach(client::DeadlineIn(service.timeout)); !reached.ok()) return reached;
  v1::ScrubRequest request;
  request.set_fingerprint(flags.fingerprint);
  if (flags.rank.has_value()) request.set_rank(*flags.rank);
  request.set_bytes_per_second(flags.bytes_per_second);
  grpc::ClientContext context;
  const auto reader = connection.admin_service().Scrub(&context, request);
  Shards shards;
  v1::ScrubResponse response;
  while (reader->Read(&response)) {
    if (response.has_shard()) shards.push_back(std::move(*response.mutable_shard()));
  }
  if (absl::Status status = connection.ToStatus(reader->Finish()); !status.ok()) return status;
  return shards;
}

}  // namespace

ExitCode RunScrub(const ServiceFlags& service, const ScrubFlags& flags) {
  const auto connection = Connect(service);
  if (!connection.ok()) return PrintError(connection.status(), service.json);
  const absl::StatusOr<Shards> shards = Scrub(**connection, flags, service);
  if (!shards.ok()) return PrintError(shards.status(), service.json);
  if (service.json) {
    PrintReportJson(*shards);
  } else {
    PrintTables(*shards);
  }
  return IsIntact(*shards) ? kDone : kRefused;
}

}  // namespace weightbroker::tool
