#include "client/tool/export_look.h"

#include <utility>

#include "common/base/status_macros.h"

namespace weightbroker::tool {

absl::StatusOr<ShardLook> LookAtShard(const client::Connection& connection, v1::ExportRequest request,
                                      client::Deadline deadline) {
  request.set_hold(false);
  ShardLook look;
  RETURN_IF_ERROR(connection.Call(deadline, [&](grpc::ClientContext& context) {
    look = ShardLook();  // of a try before this one
    const auto reader = connection.service().Export(&context, request);
    v1::ExportResponse response;
    while (reader->Read(&response)) {
      if (response.has_header()) look.header = std::move(*response.mutable_header());
      for (v1::Tensor& tensor : *response.mutable_manifest()->mutable_tensors()) {
        look.tensors.push_back(std::move(tensor));
      }
    }
    return reader->Finish();
  }));
  return look;
}

}  // namespace weightbroker::tool
