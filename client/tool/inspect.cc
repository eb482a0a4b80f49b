#include "client/tool/inspect.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/quant/gate.h"
#include "common/quant/tensor_check.h"

namespace weightbroker {
namespace {

InspectVerdict ToVerdict(const absl::Status& status, const std::string& message_if_ok) {
  if (status.ok()) return {true, "OK", message_if_ok};
  const ErrorDetails details = GetErrorDetails(status);
  return {false, details.reason.empty() ? std::string(ReasonName(Reason::kSystemError)) : details.reason,
          std::string(status.message())};
}

void SetVerdict(InspectVerdict verdict, InspectReport& report) {
  static_cast<InspectVerdict&>(report) = std::move(verdict);
}

std::string FileName(const std::string& path) { return path.substr(path.rfind('/') + 1); }

absl::StatusOr<SafetensorsHeader> ReadHeader(FileSystem& file_system, const std::string& path) {
  ASSIGN_OR_RETURN(const auto file, file_system.Open(path, ReadMode::kBuffered));
  return ReadSafetensorsHeader(*file, FileName(path));
}

absl::Status CheckServable(const std::string& file, const SafetensorsHeader& header) {
  for (const SafetensorsTensor& tensor : header.tensors) RETURN_IF_ERROR(CheckDtype(file, tensor.name, *tensor.dtype));
  if (!header.tensors.empty()) return absl::OkStatus();
  return MakeError(Reason::kCheckpointEmpty, absl::StrCat(file, ": has no tensors, so there is nothing to serve"),
                   {{"file", file}});
}

bool HasFp8(const SafetensorsHeader& header) {
  for (const SafetensorsTensor& tensor : header.tensors) {
    if (tensor.dtype->proto == v1::DATA_TYPE_F8_E4M3) return true;
  }
  return false;
}

// Every check that Register makes of a checkpoint, in its order. Fills in what becomes known on the way.
absl::Status CheckFolder(FileSystem& file_system, const std::string& folder, InspectReport& report) {
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(file_system, folder));
  report.tensors = static_cast<int64_t>(checkpoint.tensors.size());
  report.bytes = checkpoint.total_bytes;
  const auto quantization = CheckQuantization(checkpoint);
  if (!quantization.ok()) {
    const ErrorDetails details = GetErrorDetails(quantization.status());
    if (const auto it = details.metadata.find("method"); it != details.metadata.end()) report.quantization = it->second;
    return quantization.status();
  }
  report.quantization = quantization->method;
  return absl::OkStatus();
}

// The fields in the order in which they are shown.
nlohmann::ordered_json ToJson(const InspectReport& report) {
  nlohmann::ordered_json json = {{"path", report.path},
                                 {"ok", report.ok},
                                 {"reason", report.reason},
                                 {"message", report.message},
                                 {"quantization", report.quantization},
                                 {"tensors", report.tensors},
                                 {"bytes", report.bytes}};
  if (report.checkpoint.has_value()) {
    json["checkpoint_ok"] = report.checkpoint->ok;
    json["checkpoint_reason"] = report.checkpoint->reason;
    json["checkpoint_message"] = report.checkpoint->message;
  }
  return json;
}

}  // namespace

InspectReport InspectFile(FileSystem& file_system, const std::string& path) {
  InspectReport report;
  report.path = path;
  const auto header = ReadHeader(file_system, path);
  SetVerdict(ToVerdict(header.status(), "is a safetensors file"), report);
  if (!header.ok()) {
    report.checkpoint = ToVerdict(header.status(), "");
    return report;
  }
  report.tensors = static_cast<int64_t>(header->tensors.size());
  report.bytes = header->data_size_bytes;
  report.checkpoint =
      ToVerdict(CheckServable(FileName(path), *header),
                HasFp8(*header) ? "can be served beside a config.json that declares block-wise FP8"
                                : "can be served beside a config.json that declares no other quantization");
  return report;
}

InspectReport InspectFolder(FileSystem& file_system, const std::string& folder) {
  InspectReport report;
  report.path = folder;
  const absl::Status status = CheckFolder(file_system, folder, report);
  SetVerdict(ToVerdict(status, "can be served"), report);
  return report;
}

std::string InspectJson(const InspectReport& report) {
  return ToJson(report).dump(/*indent=*/2, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

std::string InspectTable(const InspectReport& report) {
  std::string table;
  const auto json = ToJson(report);
  for (const auto& [field, value] : json.items()) {
    const std::string text = value.is_string()    ? value.get<std::string>()
                             : value.is_boolean() ? (value.get<bool>() ? "yes" : "no")
                                                  : value.dump();
    table += absl::StrFormat("%-20s%s\n", field, OneLine(text));
  }
  return table;
}

}  // namespace weightbroker
