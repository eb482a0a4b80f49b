// A service for tests of publishing from torch, behind a header that brings in neither protobuf nor gRPC.
#pragma once

#include <memory>
#include <string>

namespace weightbroker::testing {

class PublishService {
 public:
  // With a model that nobody reads.
  PublishService();
  ~PublishService();
  PublishService(const PublishService&) = delete;
  PublishService& operator=(const PublishService&) = delete;

  std::string socket() const;
  std::string model() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weightbroker::testing
