#include "weightbroker/publisher.h"

#include <utility>

#include "client/src/publisher_state.h"
#include "client/src/status_conversion.h"

namespace weightbroker {

Publisher::Publisher(std::shared_ptr<client::PublisherState> state) : state_(std::move(state)) {}

Publisher::~Publisher() = default;

Result<std::byte*> Publisher::Allocate(const TensorToPublish& tensor) {
  const auto room = state_->Allocate(tensor);
  if (!room.ok()) return client::ToPublic(room.status());
  return *room;
}

Status Publisher::Add(const TensorToPublish& tensor, const void* data) {
  return client::ToPublic(state_->Add(tensor, data));
}

Status Publisher::AddAlias(const TensorToPublish& tensor, int64_t offset_bytes) {
  return client::ToPublic(state_->AddAlias(tensor, offset_bytes));
}

void Publisher::UseStream(void* stream) { state_->UseStream(stream); }

Status Publisher::Synchronize() { return client::ToPublic(state_->Synchronize()); }

Device Publisher::device() const { return state_->device(); }

void Publisher::CountCopy(int64_t size_bytes) { state_->CountCopy(size_bytes); }

int64_t Publisher::copied_bytes() const { return state_->copied_bytes(); }

}  // namespace weightbroker
