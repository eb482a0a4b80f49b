#include "bench/control_plane/attach_steps.h"

#include <optional>
#include <utility>
#include <vector>

#include "bench/bench_support.h"
#include "client/src/connection.h"
#include "client/src/export_stream.h"
#include "client/src/manifest_decoder.h"
#include "client/src/redeem_ticket.h"
#include "client/src/slab_mapping.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

using client::Connection;
using client::ExportStream;
using client::ManifestDecoder;
using client::RawMessage;
using client::SlabMapping;

constexpr std::chrono::seconds kPatience(20);

// Used once.
class SteppedAttach {
 private:
  template <typename Step>
  auto Timed(const char* name, Step step) {
    const double start = NowSeconds();
    auto result = step();
    seconds_[name] += NowSeconds() - start;
    return result;
  }

 public:
  SteppedAttach(const std::string& socket, const std::string& fingerprint)
      : socket_(socket), deadline_(client::DeadlineIn(kPatience)) {
    request_.set_fingerprint(fingerprint);
    request_.set_hold(true);
  }

  absl::StatusOr<std::map<std::string, double>> Run() {
    RETURN_IF_ERROR(Timed("connect", [this] { return Connect(); }));
    RETURN_IF_ERROR(Timed("header", [this] { return ReadHeader(); }));
    RETURN_IF_ERROR(Timed("tickets", [this] { return Redeem(); }));
    RETURN_IF_ERROR(Timed("map", [this] { return Map(); }));
    RETURN_IF_ERROR(ReadManifest());
    RETURN_IF_ERROR(LookUpEveryName());
    return seconds_;
  }

 private:
  absl::Status Connect() {
    ASSIGN_OR_RETURN(connection_, Connection::Open({.socket_path = socket_}));
    return connection_->WaitUntilConnected(deadline_);
  }

  absl::StatusOr<RawMessage> ReadMessage() {
    ASSIGN_OR_RETURN(std::optional<RawMessage> message, stream_->Read(deadline_));
    if (message.has_value()) return *std::move(message);
    RETURN_IF_ERROR(connection_->ToStatus(stream_->end_status()));
    return MakeError(Reason::kProtocolError, "Export ended early");
  }

  absl::Status ReadHeader() {
    stream_ = std::make_unique<ExportStream>(connection_->channel(), request_);
    ASSIGN_OR_RETURN(const RawMessage message, ReadMessage());
    v1::ExportResponse response;
    response.ParseFromArray(message.bytes().data(), static_cast<int>(message.bytes().size()));
    header_ = response.header();
    return absl::OkStatus();
  }

  absl::Status Redeem() {
    ASSIGN_OR_RETURN(
        fds_, client::RedeemTicket(socket_, header_.ticket(), static_cast<size_t>(header_.slabs_size()), deadline_));
    return absl::OkStatus();
  }

  absl::Status Map() {
    for (int i = 0; i < header_.slabs_size(); ++i) {
      ASSIGN_OR_RETURN(SlabMapping slab,
                       SlabMapping::Map(fds_[static_cast<size_t>(i)].get(), header_.slabs(i).size_bytes()));
      slabs_.push_back(std::move(slab));
    }
    return absl::OkStatus();
  }

  absl::Status ReadManifest() {
    std::vector<int64_t> slab_bytes;
    std::vector<client::SlabView> views;
    for (const SlabMapping& slab : slabs_) {
      views.push_back(slab.view());
      slab_bytes.push_back(slab.view().size_bytes);
    }
    ManifestDecoder decoder(std::move(slab_bytes), header_.tensor_count());
    while (!decoder.complete()) {
      ASSIGN_OR_RETURN(RawMessage message, Timed("receive", [this] { return ReadMessage(); }));
      RETURN_IF_ERROR(Timed("decode", [&] { return decoder.Add(std::move(message)); }));
    }
    ASSIGN_OR_RETURN(manifest_, Timed("finish", [&] { return std::move(decoder).Finish(views); }));
    return absl::OkStatus();
  }

  absl::Status LookUpEveryName() {
    const std::vector<Tensor>& tensors = manifest_.tensors;
    const double start = NowSeconds();
    for (const Tensor& tensor : tensors) {
      if (client::FindTensor(tensors, tensor.name) != &tensor) {
        return MakeError(Reason::kProtocolError, "a name does not lead to its tensor");
      }
    }
    seconds_["lookup"] = (NowSeconds() - start) / static_cast<double>(tensors.size());
    return absl::OkStatus();
  }

  const std::string& socket_;
  const client::Deadline deadline_;
  v1::ExportRequest request_;
  std::shared_ptr<Connection> connection_;
  std::unique_ptr<ExportStream> stream_;
  v1::ExportHeader header_;
  std::vector<UniqueFd> fds_;
  std::vector<SlabMapping> slabs_;
  client::Manifest manifest_;
  std::map<std::string, double> seconds_;
};

}  // namespace

absl::StatusOr<std::map<std::string, double>> TimeAttachSteps(const std::string& socket,
                                                              const std::string& fingerprint) {
  return SteppedAttach(socket, fingerprint).Run();
}

}  // namespace weightbroker::bench
