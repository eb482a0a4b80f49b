#include "client/tool/verify_command.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/src/connection.h"
#include "client/tool/compare.h"
#include "client/tool/format.h"
#include "client/tool/progress.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "weightbroker/client.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using Json = nlohmann::ordered_json;

// What was found out of one rank.
struct RankReport {
  int32_t rank = 0;
  Comparison comparison;
};

struct VerifyReport {
  v1::WeightSet set;
  std::string files_fingerprint;  // of the model's files as they are now
  std::vector<v1::FingerprintDifference> file_differences;
  std::vector<RankReport> ranks;

  bool files_are_the_same() const { return files_fingerprint == set.fingerprint(); }
  bool equal() const {
    for (const RankReport& rank : ranks) {
      if (!rank.comparison.equal()) return false;
    }
    return true;
  }
};

WeightSpec ToPublic(const v1::WeightSpec& proto) {
  WeightSpec spec;
  spec.model = proto.model();
  spec.tensor_parallel_size = proto.tensor_parallel_size();
  spec.quantization = proto.quantization();
  spec.dtype = proto.dtype();
  spec.layout = proto.layout();
  spec.pipeline_parallel_size = proto.pipeline_parallel_size();
  spec.expert_parallel_size = proto.expert_parallel_size();
  spec.data_parallel_size = proto.data_parallel_size();
  spec.mtp_layers = proto.mtp_layers();
  spec.unquantized_modules = {proto.unquantized_modules().begin(), proto.unquantized_modules().end()};
  spec.engine = proto.engine();
  spec.engine_version = proto.engine_version();
  return spec;
}

Status ToPublic(const absl::Status& status) {
  const ErrorDetails details = GetErrorDetails(status);
  return Status(static_cast<StatusCode>(status.code()), details.reason, std::string(status.message()),
                details.metadata);
}

// One set, rank by rank. Used once.
class Verification {
 public:
  Verification(const ServiceFlags& service, const VerifyFlags& flags) : service_(service), flags_(flags) {}

  Result<VerifyReport> Run() {
    if (Status status = Find(); !status.ok()) return status;
    for (const int32_t rank : RanksOf(report_.set, flags_.set)) {
      auto checked = flags_.digests_only ? CheckDigests(rank) : Compare(rank);
      if (!checked.ok()) return checked.status();
      report_.ranks.push_back(*std::move(checked));
    }
    return std::move(report_);
  }

 private:
  Status Find() {
    const auto connection = Connect(service_);
    if (!connection.ok()) return ToPublic(connection.status());
    auto set = FindResidentSet(**connection, flags_.set, client::DeadlineIn(service_.timeout));
    if (!set.ok()) return ToPublic(set.status());
    report_.set = *std::move(set);
    if (const absl::Status status = CheckIsInHostMemory(); !status.ok()) return ToPublic(status);
    if (flags_.digests_only) return Status();
    if (report_.set.spec().layout() == "engine") return ToPublic(HasNoFiles());
    return CompareFiles(**connection);
  }

  // What lies on a GPU is compared by an engine there, with MappedWeights::Verify.
  absl::Status CheckIsInHostMemory() const {
    for (const v1::Shard& shard : report_.set.shards()) {
      if (shard.handle_kind() == v1::HANDLE_KIND_HOST_MEMFD) continue;
      return MakeError(Reason::kHandleKindUnsupported,
                       absl::StrCat("rank ", shard.rank(), " of the weight set ", report_.set.fingerprint(),
                                    " lies on the device ", shard.device(),
                                    ", and this tool reads host memory only; an engine on that device can verify the "
                                    "digests with MappedWeights::Verify"),
                       {{"rank", absl::StrCat(shard.rank())}, {"device", shard.device()}});
    }
    return absl::OkStatus();
  }

  absl::Status HasNoFiles() const {
    return MakeError(Reason::kLayoutUnsupported,
                     absl::StrCat("the weight set ", report_.set.fingerprint(),
                                  " was published by an engine, so there are no files to compare it with; --digests "
                                  "compares it with the digests that were taken when it was published"),
                     {{"fingerprint", report_.set.fingerprint()}, {"layout", "engine"}});
  }

  // Whether the service would take the files, as they are now, for the ones that it loaded.
  Status CompareFiles(const Connection& connection) {
    v1::FingerprintRequest request;
    *request.mutable_spec() = report_.set.spec();
    *request.mutable_environment() = report_.set.environment();
    v1::FingerprintResponse response;
    const absl::Status status =
        connection.Call(client::DeadlineIn(service_.timeout), [&](grpc::ClientContext& context) {
          response.Clear();
          return connection.service().Fingerprint(&context, request, &response);
        });
    if (!status.ok()) return ToPublic(status);
    report_.files_fingerprint = response.fingerprint();
    if (response.compared_with() == report_.set.fingerprint()) {
      report_.file_differences = {response.differences().begin(), response.differences().end()};
    }
    return Status();
  }

  ClientOptions OptionsFor(Mode mode) const {
    ClientOptions options;
    options.mode = mode;
    options.torch_version = report_.set.environment().torch_version();
    options.socket_path = service_.socket;
    return options;
  }

  // By fingerprint: the very set that was found, though its files may have changed since.
  Result<MappedWeights> Attach(int32_t rank) const {
    const Result<Client> client = Client::Create(OptionsFor(Mode::kClient));
    if (!client.ok()) return client.status();
    AttachOptions attach;
    attach.fallback = Fallback::kFail;
    attach.fingerprint = report_.set.fingerprint();
    attach.rank = rank;
    attach.deadline = service_.timeout;
    return client->Attach(ToPublic(report_.set.spec()), attach);
  }

  Result<MappedWeights> LoadFromDisk(int32_t rank) const {
    const Result<Client> client = Client::Create(OptionsFor(Mode::kOff));
    if (!client.ok()) return client.status();
    ProgressPrinter progress;
    AttachOptions attach;
    attach.rank = rank;
    attach.on_progress = [&progress](const LoadProgress& now) { progress.Show(now); };
    return client->Attach(ToPublic(report_.set.spec()), attach);
  }

  Result<RankReport> Compare(int32_t rank) const {
    const Result<MappedWeights> resident = Attach(rank);
    if (!resident.ok()) return resident.status();
    const Result<MappedWeights> disk = LoadFromDisk(rank);
    if (!disk.ok()) return disk.status();
    RankReport report{rank, CompareTensors(resident->tensors(), disk->tensors())};
    // Whether it is the memory that has changed its digests say; and then the service is told.
    if (!report.comparison.equal()) (void)resident->Verify();
    return report;
  }

  Result<RankReport> CheckDigests(int32_t rank) const {
    const Result<MappedWeights> resident = Attach(rank);
    if (!resident.ok()) return resident.status();
    if (Status status = resident->Verify(); !status.ok()) return status;
    RankReport report{rank, {}};
    report.comparison.tensors = static_cast<int64_t>(resident->tensors().size());
    report.comparison.bytes = resident->total_bytes();
    return report;
  }

  const ServiceFlags& service_;
  const VerifyFlags& flags_;
  VerifyReport report_;
};

std::string DescribeDifference(const Difference& difference) {
  const std::string tensor = Quote(difference.tensor);
  if (difference.what != "bytes") return absl::StrCat("tensor ", tensor, ": ", difference.what);
  return absl::StrFormat("tensor %s: byte %d is 0x%02x in memory and 0x%02x on disk", tensor, difference.offset_bytes,
                         difference.resident_byte, difference.disk_byte);
}

// What is wrong, and what to do.
std::string DescribeFault(const VerifyReport& report) {
  if (report.files_are_the_same()) {
    return "the resident bytes are not those of the files, which the service takes for unchanged: stop the engines "
           "that use this set, unregister it and register it again";
  }
  return "the files have changed since they were loaded: register the model again to have the new ones";
}

std::string Message(const VerifyReport& report, const VerifyFlags& flags) {
  if (report.equal()) return flags.digests_only ? "every digest is right" : "equal byte for byte";
  return DescribeFault(report);
}

std::string FilesText(const VerifyReport& report, const VerifyFlags& flags) {
  if (flags.digests_only) return "not read";
  return report.files_are_the_same() ? "those that were loaded" : "changed since they were loaded";
}

void PrintTables(const VerifyReport& report, const VerifyFlags& flags) {
  printf("%s\n", FormatTable({{"fingerprint", report.set.fingerprint()},
                              {"model", Printable(report.set.spec().model())},
                              {"files", FilesText(report, flags)},
                              {"equal", report.equal() ? "yes" : "no"},
                              {"message", Message(report, flags)}})
                     .c_str());
  std::vector<std::vector<std::string>> rows = {
      {"RANK", "TENSORS", "BYTES", "DIFFERING TENSORS", "DIFFERING BYTES", "FIRST DIFFERENCE"}};
  for (const RankReport& rank : report.ranks) {
    const Comparison& found = rank.comparison;
    rows.push_back({absl::StrCat(rank.rank), absl::StrCat(found.tensors), absl::StrCat(found.bytes),
                    absl::StrCat(found.differing_tensors), absl::StrCat(found.differing_bytes),
                    found.first.has_value() ? DescribeDifference(*found.first) : "-"});
  }
  printf("%s", FormatTable(rows).c_str());
  if (report.file_differences.empty()) return;
  std::vector<std::vector<std::string>> differences = {{"FILES DIFFER IN", "NOW", "WHEN LOADED"}};
  for (const v1::FingerprintDifference& part : report.file_differences) {
    differences.push_back({Printable(part.field()), Printable(part.requested()), Printable(part.resident())});
  }
  printf("\n%s", FormatTable(differences).c_str());
}

Json RankJson(const RankReport& rank) {
  const Comparison& found = rank.comparison;
  Json json = {{"rank", rank.rank},
               {"tensors", found.tensors},
               {"bytes", found.bytes},
               {"differing_tensors", found.differing_tensors},
               {"differing_bytes", found.differing_bytes},
               {"first_difference", nullptr}};
  if (!found.first.has_value()) return json;
  json["first_difference"] = {{"tensor", found.first->tensor}, {"what", found.first->what}};
  if (found.first->what != "bytes") return json;
  json["first_difference"]["offset_bytes"] = found.first->offset_bytes;
  json["first_difference"]["resident_byte"] = found.first->resident_byte;
  json["first_difference"]["disk_byte"] = found.first->disk_byte;
  return json;
}

void PrintReportJson(const VerifyReport& report, const VerifyFlags& flags) {
  Json ranks = Json::array();
  for (const RankReport& rank : report.ranks) ranks.push_back(RankJson(rank));
  const std::string reason(report.equal() ? "OK" : ReasonName(Reason::kDigestMismatch));
  Json json = {{"ok", report.equal()},
               {"reason", reason},
               {"message", Message(report, flags)},
               {"fingerprint", report.set.fingerprint()},
               {"model", report.set.spec().model()},
               {"files_unchanged", flags.digests_only ? Json(nullptr) : Json(report.files_are_the_same())},
               {"ranks", std::move(ranks)}};
  printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

}  // namespace

ExitCode RunVerify(const ServiceFlags& service, const VerifyFlags& flags) {
  const Result<VerifyReport> report = Verification(service, flags).Run();
  if (!report.ok()) return PrintError(report.status(), service.json);
  if (service.json) {
    PrintReportJson(*report, flags);
  } else {
    PrintTables(*report, flags);
  }
  return report->equal() ? kDone : kRefused;
}

}  // namespace weightbroker::tool
