#include "weightbroker/mapped_weights.h"

#include <utility>

#include "client/src/slab_mapping.h"
#include "client/src/status_conversion.h"
#include "client/src/weights_state.h"

namespace weightbroker {

MappedWeights::MappedWeights(std::unique_ptr<client::WeightsState> state) : state_(std::move(state)) {}
MappedWeights::MappedWeights(MappedWeights&&) noexcept = default;
MappedWeights& MappedWeights::operator=(MappedWeights&&) noexcept = default;
MappedWeights::~MappedWeights() = default;

const Tensor* MappedWeights::Find(std::string_view name) const {
  return client::FindTensor(state_->manifest.tensors, name);
}

const std::vector<Tensor>& MappedWeights::tensors() const { return state_->manifest.tensors; }

int64_t MappedWeights::total_bytes() const { return state_->manifest.total_bytes; }

const Device& MappedWeights::device() const { return state_->memory->device(); }

const Source& MappedWeights::source() const { return state_->source; }

const AttachTimes& MappedWeights::attach_times() const { return state_->times; }

std::shared_ptr<const void> MappedWeights::KeepAlive() const { return state_; }

const std::string& MappedWeights::fingerprint() const { return state_->fingerprint; }

int64_t MappedWeights::generation() const { return state_->generation; }

bool MappedWeights::lease_lost() const { return state_->lease != nullptr && state_->lease->lost(); }

Status MappedWeights::lease_status() const {
  return state_->lease == nullptr ? Status() : client::ToPublic(state_->lease->status());
}

Status MappedWeights::Verify(int threads) const { return client::ToPublic(client::VerifyAndReport(*state_, threads)); }

}  // namespace weightbroker
