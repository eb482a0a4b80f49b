#include "client/tool/export_command.h"

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/src/connection.h"
#include "client/tool/export_look.h"
#include "client/tool/format.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/base/strings.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using Json = nlohmann::ordered_json;

absl::StatusOr<std::vector<ShardLook>> LookAtSet(const ServiceFlags& service, const SetFlags& flags) {
  ASSIGN_OR_RETURN(const auto connection, Connect(service));
  ASSIGN_OR_RETURN(const v1::WeightSet set, FindResidentSet(*connection, flags, client::DeadlineIn(service.timeout)));
  std::vector<ShardLook> looks;
  for (const int32_t rank : RanksOf(set, flags)) {
    v1::ExportRequest request;
    request.set_fingerprint(set.fingerprint());
    request.set_rank(rank);
    ASSIGN_OR_RETURN(ShardLook look, LookAtShard(*connection, request, client::DeadlineIn(service.timeout)));
    looks.push_back(std::move(look));
  }
  return looks;
}

std::string DtypeText(const v1::Tensor& tensor) {
  return WithoutPrefix(v1::DataType_Name(tensor.dtype()), "DATA_TYPE_");
}

// "PARAMETER", "BUFFER", "NON_PERSISTENT_BUFFER"; empty where nobody said.
std::string KindText(const v1::Tensor& tensor) {
  if (tensor.kind() == v1::TENSOR_KIND_UNSPECIFIED) return "";
  return WithoutPrefix(v1::TensorKind_Name(tensor.kind()), "TENSOR_KIND_");
}

std::string OrDash(const std::string& text) { return text.empty() ? "-" : text; }

std::vector<std::string> DescribeTensor(const v1::Tensor& tensor) {
  return {Printable(tensor.name()),
          DtypeText(tensor),
          absl::StrCat("[", absl::StrJoin(tensor.shape(), ","), "]"),
          absl::StrCat(tensor.slab()),
          absl::StrCat(tensor.offset_bytes()),
          absl::StrCat(tensor.size_bytes()),
          OrDash(KindText(tensor)),
          absl::BytesToHexString(tensor.digest()),
          OrDash(Printable(tensor.alias_of()))};
}

void PrintShard(const ShardLook& look) {
  std::vector<std::vector<std::string>> slabs = {{"SLAB", "BYTES", "HANDLE", "PAGES"}};
  for (const v1::Slab& slab : look.header.slabs()) {
    slabs.push_back({absl::StrCat(slabs.size() - 1), absl::StrCat(slab.size_bytes()),
                     WithoutPrefix(v1::HandleKind_Name(slab.handle_kind()), "HANDLE_KIND_"),
                     WithoutPrefix(v1::PageKind_Name(slab.page_kind()), "PAGE_KIND_")});
  }
  std::vector<std::vector<std::string>> tensors = {
      {"TENSOR", "DTYPE", "SHAPE", "SLAB", "OFFSET", "BYTES", "KIND", "DIGEST", "ALIAS OF"}};
  for (const v1::Tensor& tensor : look.tensors) tensors.push_back(DescribeTensor(tensor));
  printf("rank %d on %s: %s\n%s\n%s", look.header.rank(), look.header.device().c_str(),
         FormatCount(look.header.tensor_count(), "tensor").c_str(), FormatTable(slabs).c_str(),
         FormatTable(tensors).c_str());
}

void PrintTables(const std::vector<ShardLook>& looks) {
  for (const ShardLook& look : looks) {
    if (&look == &looks.front()) {
      printf("%s generation %lld\n", look.header.fingerprint().c_str(),
             static_cast<long long>(look.header.generation()));
    }
    printf("\n");
    PrintShard(look);
  }
}

Json TensorJson(const v1::Tensor& tensor) {
  return {{"name", tensor.name()},
          {"dtype", DtypeText(tensor)},
          {"shape", std::vector<int64_t>(tensor.shape().begin(), tensor.shape().end())},
          {"strides", std::vector<int64_t>(tensor.strides().begin(), tensor.strides().end())},
          {"slab", tensor.slab()},
          {"offset_bytes", tensor.offset_bytes()},
          {"size_bytes", tensor.size_bytes()},
          {"kind", KindText(tensor)},
          {"alias_of", tensor.alias_of()},
          {"digest", absl::BytesToHexString(tensor.digest())},
          {"metadata", std::map<std::string, std::string>(tensor.metadata().begin(), tensor.metadata().end())}};
}

Json ShardJson(const ShardLook& look) {
  Json slabs = Json::array();
  for (const v1::Slab& slab : look.header.slabs()) {
    slabs.push_back({{"size_bytes", slab.size_bytes()},
                     {"handle_kind", WithoutPrefix(v1::HandleKind_Name(slab.handle_kind()), "HANDLE_KIND_")},
                     {"page_kind", WithoutPrefix(v1::PageKind_Name(slab.page_kind()), "PAGE_KIND_")}});
  }
  Json tensors = Json::array();
  for (const v1::Tensor& tensor : look.tensors) tensors.push_back(TensorJson(tensor));
  return {{"rank", look.header.rank()},
          {"device", look.header.device()},
          {"slabs", std::move(slabs)},
          {"tensors", std::move(tensors)}};
}

void PrintSetJson(const std::vector<ShardLook>& looks) {
  Json ranks = Json::array();
  for (const ShardLook& look : looks) ranks.push_back(ShardJson(look));
  const Json json = {{"fingerprint", looks.front().header.fingerprint()},
                     {"generation", looks.front().header.generation()},
                     {"ranks", std::move(ranks)}};
  printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
}

}  // namespace

ExitCode RunExport(const ServiceFlags& service, const SetFlags& flags) {
  const absl::StatusOr<std::vector<ShardLook>> looks = LookAtSet(service, flags);
  if (!looks.ok()) return PrintError(looks.status(), service.json);
  if (service.json) {
    PrintSetJson(*looks);
  } else {
    PrintTables(*looks);
  }
  return kDone;
}

}  // namespace weightbroker::tool
