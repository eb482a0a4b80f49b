#include "tests/unit/torch/publish_service.h"

#include "tests/integration/service.h"
#include "tests/support/checkpoint_builder.h"

namespace weightbroker::testing {

struct PublishService::State {
  Service service;
};

PublishService::PublishService() : state_(std::make_unique<State>()) {
  CheckpointBuilder().Tensor("unused", "BF16", {4}).Write(state_->service.NewModel("m"));
}

PublishService::~PublishService() = default;

std::string PublishService::socket() const { return state_->service.socket(); }

std::string PublishService::model() const { return Service::Model("m"); }

}  // namespace weightbroker::testing
