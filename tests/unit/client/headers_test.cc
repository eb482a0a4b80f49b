// First, before anything else could have included what they need.
#include "weightbroker/client.h"
#include "weightbroker/engine_group.h"
#include "weightbroker/mapped_weights.h"
#include "weightbroker/redeem.h"
#include "weightbroker/status.h"
#include "weightbroker/tensor.h"

#if __cplusplus != 201703L
#error "the public headers are promised for C++17"
#endif
#if defined(GOOGLE_PROTOBUF_VERSION) || defined(GRPC_CPP_VERSION_MAJOR) || defined(GRPCPP_CHANNEL_H) || \
    defined(ABSL_BASE_CONFIG_H_)
#error "a public header brings in protobuf, gRPC or Abseil"
#endif

#include <gtest/gtest.h>

#include <type_traits>

namespace weightbroker {
namespace {

static_assert(!std::is_copy_constructible_v<MappedWeights> && std::is_nothrow_move_constructible_v<MappedWeights>);
static_assert(std::is_nothrow_move_constructible_v<Client>);
static_assert(!std::is_copy_constructible_v<EngineGroupMember>);
static_assert(std::is_nothrow_move_constructible_v<EngineGroupMember>);

TEST(PublicHeaders, RefuseAClientWithoutATorchVersion) {
  const Result<Client> client = Client::Create(ClientOptions());

  ASSERT_FALSE(client.ok());
  EXPECT_EQ(client.status().reason(), "ENVIRONMENT_REQUIRED");
  EXPECT_EQ(client.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace weightbroker
