#include "client/tool/dry_run.h"

#include <google/protobuf/util/time_util.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/src/connection.h"
#include "client/tool/format.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"

namespace weightbroker::tool {
namespace {

using client::Connection;
using google::protobuf::util::TimeUtil;

absl::StatusOr<v1::RegisterPlan> Ask(const ServiceFlags& service, const v1::RegisterRequest& request,
                                     client::Deadline deadline) {
  ASSIGN_OR_RETURN(const auto connection, Connect(service));
  v1::RegisterResponse response;
  RETURN_IF_ERROR(connection->Call(deadline, [&](grpc::ClientContext& context) {
    response.Clear();
    const auto reader = connection->service().Register(&context, request);
    while (reader->Read(&response)) {
    }
    return reader->Finish();
  }));
  if (response.has_plan()) return std::move(*response.mutable_plan());
  // It has begun the load, and there is no taking that back.
  return MakeError(Reason::kProtocolError,
                   "the service answered a dry run as a Register: it is older than this tool, and loads the model");
}

std::string Verdict(const v1::RegisterPlan& plan) {
  if (plan.present()) return "there already: nothing more is needed";
  if (!plan.fits()) return "does not fit";
  if (plan.evictions().empty()) return "fits";
  return absl::StrCat("fits after the eviction of ", FormatCount(plan.evictions_size(), "weight set"));
}

void Print(const v1::RegisterPlan& plan) {
  printf("%s", FormatTable({{"fingerprint", plan.fingerprint()},
                            {"verdict", Verdict(plan)},
                            {"to read", FormatBytes(plan.read_bytes())}})
                   .c_str());
  if (!plan.devices().empty()) {
    std::vector<std::vector<std::string>> rows = {
        {"DEVICE", "TENSORS", "NEED", "HAVE", "LIMITED BY", "TAKEN BY SETS", "EVICTABLE"}};
    for (const v1::DevicePlan& device : plan.devices()) {
      rows.push_back({device.device(), absl::StrCat(device.tensor_count()), FormatBytes(device.need_bytes()),
                      FormatBytes(device.have_bytes()), device.limited_by(), FormatBytes(device.reserved_bytes()),
                      FormatBytes(device.evictable_bytes())});
    }
    printf("\n%s", FormatTable(rows).c_str());
  }
  if (plan.evictions().empty()) return;
  std::vector<std::vector<std::string>> rows = {{"WOULD BE EVICTED", "MEMORY", "LAST USE", "MODEL"}};
  for (const v1::PlannedEviction& eviction : plan.evictions()) {
    rows.push_back({eviction.fingerprint(), FormatBytes(eviction.size_bytes()),
                    TimeUtil::ToString(eviction.last_use_time()), Printable(eviction.model())});
  }
  printf("\n%s", FormatTable(rows).c_str());
}

}  // namespace

ExitCode RunDryRun(const ServiceFlags& service, v1::RegisterRequest request, std::chrono::milliseconds timeout) {
  request.set_dry_run(true);
  const absl::StatusOr<v1::RegisterPlan> plan = Ask(service, request, client::DeadlineIn(timeout));
  if (!plan.ok()) return PrintError(plan.status(), service.json);
  if (service.json) {
    PrintJson(*plan);
  } else {
    Print(*plan);
  }
  return plan->fits() ? kDone : kRefused;
}

}  // namespace weightbroker::tool
