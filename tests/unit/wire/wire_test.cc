#include "common/base/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"
#include "weightbroker/internal/v1/rpc_status.pb.h"

namespace weightbroker {
namespace {

namespace pb = ::weightbroker::internal::v1;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::StatusIs;

absl::Status Example() {
  return MakeError(Reason::kLeased, "it is leased", {{"leases", "3"}, {"empty", ""}, {"model", std::string(300, 'm')}});
}

TEST(ErrorOnTheWire, IsWhatProtobufReads) {
  pb::RpcStatus status;
  ASSERT_TRUE(status.ParseFromString(SerializeRpcStatus(Example())));
  ASSERT_EQ(status.details_size(), 1);
  pb::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(status.details(0).value()));

  EXPECT_EQ(status.code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(status.message(), "it is leased");
  EXPECT_EQ(status.details(0).type_url(), kErrorInfoTypeUrl);
  EXPECT_EQ(info.reason(), "LEASED");
  EXPECT_EQ(info.domain(), "weightbroker");
  EXPECT_EQ(info.metadata().at("leases"), "3");
  EXPECT_EQ(info.metadata().at("empty"), "");
  EXPECT_EQ(info.metadata().at("model"), std::string(300, 'm'));
}

TEST(ErrorOnTheWire, IsReadAsProtobufWroteIt) {
  pb::ErrorInfo info;
  info.set_reason("LEASED");
  info.set_domain("weightbroker");
  (*info.mutable_metadata())["leases"] = "3";
  pb::RpcStatus status;
  status.set_code(9);
  status.set_message("it is leased");
  status.add_details()->set_type_url("type.googleapis.com/other");
  auto* detail = status.add_details();
  detail->set_type_url(kErrorInfoTypeUrl);
  detail->set_value(info.SerializeAsString());

  const absl::Status parsed = ParseRpcStatus(status.SerializeAsString());

  EXPECT_THAT(parsed, StatusIs(Reason::kLeased, "it is leased"));
  EXPECT_THAT(parsed, HasMetadata("leases", "3"));
}

TEST(ErrorOnTheWire, RefusesEveryTruncation) {
  const std::string whole = SerializeRpcStatus(Example());
  pb::RpcStatus status;
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string cut = whole.substr(0, size);
    EXPECT_EQ(HasReason(ParseRpcStatus(cut), Reason::kProtocolError), !status.ParseFromString(cut)) << size;
  }
}

TEST(WireReader, PassesOverFixedWidthFieldsAndStopsAtGroups) {
  WireReader fixed(std::string_view("\x0d\x01\x02\x03\x04\x11\x01\x02\x03\x04\x05\x06\x07\x08\x18\x07", 16));
  EXPECT_TRUE(fixed.Next());
  EXPECT_TRUE(fixed.Next());
  EXPECT_TRUE(fixed.Next());
  EXPECT_EQ(fixed.varint(), 7u);
  EXPECT_FALSE(fixed.Next());
  EXPECT_TRUE(fixed.ok());

  WireReader group(std::string_view("\x0b", 1));
  EXPECT_FALSE(group.Next());
  EXPECT_FALSE(group.ok());
}

}  // namespace
}  // namespace weightbroker
