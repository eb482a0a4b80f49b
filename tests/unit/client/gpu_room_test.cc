#include "client/src/gpu_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "common/base/error.h"
#include "common/memory/cuda_slab.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/fake_gpu_inventory.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/client/fake_service.h"

namespace weightbroker::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::weightbroker::testing::FakeCudaDriver;
using ::weightbroker::testing::FakeGpu;
using ::weightbroker::testing::FakeGpuInventory;
using ::weightbroker::testing::FakeGpuUuid;
using ::weightbroker::testing::FakeService;
using ::weightbroker::testing::HasMetadata;
using ::weightbroker::testing::IsOk;
using ::weightbroker::testing::StatusIs;

constexpr int64_t kMiB = 1 << 20;

std::string Fingerprint(char digit) { return std::string(64, digit); }

// A GPU of 100 MiB, 60 of which a service holds in three sets.
class GpuRoomTest : public ::testing::Test {
 protected:
  struct Set {
    char digit;
    int leases;
    std::string device;
    std::optional<CudaVmmMemory> memory;
  };

  GpuRoomTest() {
    AddSet('a', /*leases=*/1);
    AddSet('b', /*leases=*/0);
    AddSet('c', /*leases=*/0);
    service_.on_list = [this](v1::ListWeightSetsResponse& response) { List(&response); };
    service_.on_unregister = [this](grpc::ServerContext&, v1::UnregisterResponse&) {
      return Unregister(service_.unregistered);
    };
    connection_ = *Connection::Open({.socket_path = service_.socket_path()});
  }

  void AddSet(char digit, int leases, const std::string& device = FakeGpuUuid(1)) {
    sets_.push_back({digit, leases, device, *CudaVmmMemory::Create(context_, 20 * kMiB)});
  }

  void List(v1::ListWeightSetsResponse* response) const {
    for (const Set& set : sets_) {
      if (!set.memory.has_value()) continue;
      v1::WeightSet* listed = response->add_weight_sets();
      listed->set_fingerprint(Fingerprint(set.digit));
      v1::Shard* shard = listed->add_shards();
      shard->set_device(set.device);
      shard->set_size_bytes(20 * kMiB);
      shard->set_lease_count(set.leases);
    }
  }

  grpc::Status Unregister(const v1::UnregisterRequest& request) {
    EXPECT_FALSE(request.force());
    unregistered_.push_back(request.fingerprint().substr(0, 1));
    for (Set& set : sets_) {
      if (Fingerprint(set.digit) == request.fingerprint() && !refuses_) set.memory.reset();
    }
    return refuses_ ? grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "leased since") : grpc::Status::OK;
  }

  absl::Status Make(int64_t need_bytes, bool evict) {
    RoomOptions options;
    options.service = connection_.get();
    options.evict = evict;
    options.inventory = &inventory_;
    options.deadline = DeadlineIn(std::chrono::seconds(20));
    return MakeRoomOnGpu(context_, uuid_, need_bytes, options);
  }

  const std::string uuid_ = FakeGpuUuid(1);
  FakeCudaDriver cuda_{{FakeGpu{.uuid = FakeGpuUuid(1), .total_bytes = 100 * kMiB}}};
  CudaContext context_ = *CudaContext::Retain(cuda_, 0);
  FakeGpuInventory inventory_{{}};
  std::vector<Set> sets_;
  bool refuses_ = false;
  std::vector<std::string> unregistered_;
  FakeService service_;
  std::shared_ptr<Connection> connection_;
};

TEST_F(GpuRoomTest, AsksNobodyWhereThereIsEnough) {
  EXPECT_THAT(Make(40 * kMiB, /*evict=*/true), IsOk());

  EXPECT_THAT(unregistered_, IsEmpty());
}

TEST_F(GpuRoomTest, HasTheOldestSetThatNobodyHoldsLetGoOf) {
  EXPECT_THAT(Make(60 * kMiB, /*evict=*/true), IsOk());

  EXPECT_THAT(unregistered_, ElementsAre("b"));
}

TEST_F(GpuRoomTest, SaysNeedHaveAndHoldersWhereItMayNotEvict) {
  inventory_.SetProcesses(uuid_, {{.pid = 4711, .used_bytes = 30 * kMiB}});

  const absl::Status status = Make(60 * kMiB, /*evict=*/false);

  EXPECT_THAT(status,
              AllOf(StatusIs(Reason::kMemoryExhausted, HasSubstr("aaaaaaaaaaaa of the service (20 MiB, 1 lease)")),
                    HasMetadata("need_bytes", std::to_string(60 * kMiB)),
                    HasMetadata("have_bytes", std::to_string(40 * kMiB)), HasMetadata("device_uuid", uuid_)));
  EXPECT_THAT(GetErrorDetails(status).metadata["holders"], HasSubstr("4711"));
  EXPECT_THAT(unregistered_, IsEmpty());
}

TEST_F(GpuRoomTest, HasNothingLetGoOfWhereAllThatNobodyHoldsWouldNotDo) {
  EXPECT_THAT(Make(100 * kMiB, /*evict=*/true), StatusIs(Reason::kMemoryExhausted, HasSubstr("aaaaaaaaaaaa")));

  EXPECT_THAT(unregistered_, IsEmpty());
}

TEST_F(GpuRoomTest, LeavesSetsOnOtherGpusAlone) {
  sets_[1].device = FakeGpuUuid(2);

  EXPECT_THAT(Make(60 * kMiB, /*evict=*/true), IsOk());

  EXPECT_THAT(unregistered_, ElementsAre("c"));
}

TEST_F(GpuRoomTest, TakesTheServicesRefusal) {
  refuses_ = true;

  EXPECT_THAT(Make(60 * kMiB, /*evict=*/true), StatusIs(Reason::kMemoryExhausted));
}

TEST_F(GpuRoomTest, SaysSoWhereNobodyIsKnown) {
  EXPECT_THAT(MakeRoomOnGpu(context_, uuid_, 60 * kMiB, {}),
              StatusIs(Reason::kMemoryExhausted, HasSubstr("held by: unknown")));
}

}  // namespace
}  // namespace weightbroker::client
