// What the calls for aliases do. They block on the vault.
#pragma once

#include "absl/status/status.h"
#include "server/broker/call_record.h"
#include "server/broker/service_context.h"
#include "weightbroker/v1/weight_broker_admin_service.pb.h"

namespace weightbroker {

// Fail as Registry::FindByPrefix, SetAlias and DeleteAlias do. Each change is a log line and counted.
absl::Status AnswerSetAlias(const ServiceContext& context, const CallRecord& record, const v1::SetAliasRequest& request,
                            v1::SetAliasResponse* response);
absl::Status AnswerDeleteAlias(const ServiceContext& context, const CallRecord& record,
                               const v1::DeleteAliasRequest& request, v1::DeleteAliasResponse* response);

void WriteAlias(const KeptAlias& alias, v1::Alias* proto);

}  // namespace weightbroker
