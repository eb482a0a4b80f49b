// Engines that publish weights of their own: the real service, real engines, and every byte compared.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/memfd.h>
#include <signal.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/src/redeem_ticket.h"
#include "common/base/error.h"
#include "tests/integration/survival/survival.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/engine_client.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tensors_of_every_kind.h"

namespace weightbroker::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int kRacers = 16;
constexpr int kKills = 50;

// Of which publish_engine fuses three tensors.
void WriteModel(const Service& service) {
  CheckpointBuilder()
      .Tensor("layer.q_proj.weight", "BF16", {512, 256})
      .Tensor("layer.k_proj.weight", "BF16", {256, 256})
      .Tensor("layer.v_proj.weight", "BF16", {256, 256})
      .Tensor("layer.o_proj.weight", "BF16", {256, 512})
      .Tensor("norm.weight", "F32", {256})
      .Write(service.NewModel("m"));
}

std::vector<std::string> EngineFlags(const Service& service) {
  return service.StubEngineFlags("m", {"--model_folder", service.ModelFolder("m")});
}

WeightSpec EngineSpec(const std::string& engine = "test_engine", int32_t tensor_parallel_size = 1) {
  WeightSpec spec;
  spec.model = Service::Model("m");
  spec.layout = "engine";
  spec.engine = engine;
  spec.engine_version = "7";
  spec.tensor_parallel_size = tensor_parallel_size;
  return spec;
}

Client MakeClient(const Service& service) { return EngineClient(service.socket()); }

class PublishTest : public ::testing::Test {
 protected:
  PublishTest() { WriteModel(service_); }

  const Service service_;
};

// ---- What comes back.

TEST_F(PublishTest, TheFirstStartPublishesAndTheSecondMapsTheSame) {
  const Finished first = RunProgram("publish_engine", EngineFlags(service_));
  const Finished second = RunProgram("publish_engine", EngineFlags(service_));
  ASSERT_TRUE(first.exit.success()) << first.errors;
  ASSERT_TRUE(second.exit.success()) << second.errors;
  EXPECT_EQ(first.json["source"], "published");
  EXPECT_EQ(second.json["source"], "attached");
  EXPECT_EQ(first.json["tensors"], 4);  // the fused one, two others, and the table
  EXPECT_EQ(second.json["checksum"], first.json["checksum"]);
  EXPECT_EQ(second.json["fingerprint"], first.json["fingerprint"]);
}

TEST_F(PublishTest, TensorsOfEveryKindComeBackExactlyWithTheirMetadata) {
  const TensorsOfEveryKind tensors;
  const auto put_all = [&](Publisher& publisher) -> Status {
    Status status = tensors.Put(publisher);
    const float again = 1;
    EXPECT_EQ(publisher.Add(Described("scalar", DataType::kF32, {}), &again).reason(), "MANIFEST_INVALID");
    return status;
  };
  const Client client = MakeClient(service_);
  const auto published = client.AttachOrPublish(EngineSpec(), put_all);
  ASSERT_TRUE(published.ok()) << published.status().ToString();

  // As another engine sees them.
  const auto weights = MakeClient(service_).Attach(EngineSpec(), [] {
    AttachOptions options;
    options.fallback = Fallback::kFail;
    return options;
  }());
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_TRUE(weights->Verify().ok());
  EXPECT_EQ(weights->tensors().size(), TensorsOfEveryKind::kCount);
  tensors.ExpectAll([&](const std::string& name) { return weights->Find(name); }, BytesOf);
}

TEST_F(PublishTest, MemoryThatIsAllocatedIsWrittenToWithoutACopy) {
  int64_t copied_bytes = -1;
  PublishOptions options;
  options.expected_bytes = 1 << 20;
  const auto weights = MakeClient(service_).AttachOrPublish(
      EngineSpec(),
      [&](Publisher& publisher) -> Status {
        auto room = publisher.Allocate(Described("w", DataType::kU8, {1 << 20}));
        if (!room.ok()) return room.status();
        memset(*room, 0x5a, 1 << 20);
        copied_bytes = publisher.copied_bytes();
        return Status();
      },
      options);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(copied_bytes, 0);
  EXPECT_EQ(BytesOf(*weights->Find("w")), std::string(1 << 20, '\x5a'));
}

TEST_F(PublishTest, SlabsAreAddedAsTheyAreNeeded) {
  constexpr int64_t kBytes = 40 << 20;
  const auto weights = MakeClient(service_).AttachOrPublish(EngineSpec(), [&](Publisher& publisher) -> Status {
    for (int i = 0; i < 4; ++i) {
      auto room = publisher.Allocate(Described("w" + std::to_string(i), DataType::kU8, {kBytes}));
      if (!room.ok()) return room.status();
      memset(*room, i + 1, 4096);
    }
    return Status();
  });
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(BytesOf(*weights->Find("w" + std::to_string(i))).substr(0, 4097),
              std::string(4096, static_cast<char>(i + 1)) + std::string(1, '\0'));
  }
  EXPECT_GT(service_.Health()->weight_sets(0).shards(0).slabs_size(), 1);
}

TEST_F(PublishTest, APublishedSetIsAdoptedByTheNextBroker) {
  const Finished first = RunProgram("publish_engine", EngineFlags(service_));
  ASSERT_TRUE(first.exit.success()) << first.errors;
  ASSERT_TRUE(KillBroker(service_, SIGKILL));
  const Finished second = RunProgram("publish_engine", EngineFlags(service_));
  ASSERT_TRUE(second.exit.success()) << second.errors;
  EXPECT_EQ(second.json["source"], "attached");
  EXPECT_EQ(second.json["generation"], first.json["generation"]);
  EXPECT_EQ(second.json["checksum"], first.json["checksum"]);
  EXPECT_TRUE(service_.Health()->weight_sets(0).has_adopt_time());
}

// ---- Who publishes.

TEST_F(PublishTest, OfManyThatRaceOnePublishesAndAllHaveTheSame) {
  std::vector<std::unique_ptr<Program>> racers;
  for (int i = 0; i < kRacers; ++i)
    racers.push_back(std::make_unique<Program>("publish_engine", EngineFlags(service_)));
  int published = 0;
  std::set<std::string> checksums;
  for (const auto& racer : racers) {
    ASSERT_TRUE(racer->Wait().success()) << racer->Errors();
    published += racer->Json()["source"] == "published" ? 1 : 0;
    checksums.insert(racer->Json()["checksum"].get<std::string>());
  }
  EXPECT_EQ(published, 1);
  EXPECT_THAT(checksums, SizeIs(1));
  EXPECT_EQ(service_.Health()->weight_sets_size(), 1);
}

TEST_F(PublishTest, OneThatIsKilledAtAnyMomentLeavesNothingAndTheNextPublishes) {
  const int memfds_before = service_.CountMemfds();
  const auto started = std::chrono::steady_clock::now();
  const Finished whole = RunProgram("publish_engine", EngineFlags(service_));
  const auto duration =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - started);
  ASSERT_TRUE(whole.exit.success()) << whole.errors;
  const std::string fingerprint = whole.json["fingerprint"];
  ASSERT_THAT(service_.Unregister(fingerprint, /*force=*/true), IsOk());

  std::mt19937 random(TestSeed());
  std::uniform_int_distribution<int64_t> moment(0, duration.count());
  int killed = 0;
  for (int i = 0; killed < kKills; ++i) {
    ASSERT_LT(i, 4 * kKills) << "most had ended by the time that they were to be killed";
    Program engine("publish_engine", EngineFlags(service_));
    std::this_thread::sleep_for(std::chrono::microseconds(moment(random)));
    engine.Kill(SIGKILL);
    killed += engine.Wait().signal == SIGKILL ? 1 : 0;
    // Either nothing is left, or it had been committed, and then it is there as a whole.
    ASSERT_TRUE(Eventually([&] { return service_.Health()->load_count() == 0; }));
    const auto released = service_.Unregister(fingerprint, /*force=*/true);
    ASSERT_TRUE(released.ok() || HasReason(released.status(), Reason::kWeightSetUnknown)) << released.status();
    ASSERT_TRUE(Eventually([&] { return service_.CountMemfds() == memfds_before && service_.Loaders().empty(); }))
        << service_.CountMemfds() << " memfds are left of " << memfds_before << " after kill " << i;
    ASSERT_EQ(service_.Health()->reserved_bytes(), 0);
  }
  const Finished next = RunProgram("publish_engine", EngineFlags(service_));
  ASSERT_TRUE(next.exit.success()) << next.errors;
  EXPECT_EQ(next.json["source"], "published");
  EXPECT_EQ(next.json["checksum"], whole.json["checksum"]);
}

TEST_F(PublishTest, OneThatWaitsForAPublisherThatFailsPublishesItself) {
  std::atomic<bool> began{false};
  std::atomic<bool> fail{false};
  std::thread failing([&] {
    const auto weights = MakeClient(service_).AttachOrPublish(EngineSpec(), [&](Publisher&) {
      began = true;
      while (!fail) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return Status(StatusCode::kInternal, "MY_REASON", "my loader is broken");
    });
    EXPECT_EQ(weights.status().reason(), "MY_REASON");
  });
  ASSERT_TRUE(Eventually([&] { return began.load(); }));
  std::atomic<bool> waits{false};
  bool published = false;
  std::thread waiting([&] {
    PublishOptions options;
    options.attach.on_progress = [&](const LoadProgress&) { waits = true; };
    const auto weights = MakeClient(service_).AttachOrPublish(
        EngineSpec(),
        [&](Publisher& publisher) {
          published = true;
          const char byte = 1;
          return publisher.Add(Described("w", DataType::kU8, {1}), &byte);
        },
        options);
    EXPECT_TRUE(weights.ok()) << weights.status().ToString();
  });
  EXPECT_TRUE(Eventually([&] { return waits.load(); }));
  EXPECT_FALSE(published);
  fail = true;
  failing.join();
  waiting.join();
  EXPECT_TRUE(published);
}

TEST_F(PublishTest, EachRankHasItsPublisherAndAllBecomeResidentTogether) {
  const WeightSpec spec = EngineSpec("ranked", 2);
  std::vector<std::thread> engines;
  for (int32_t rank = 0; rank < 2; ++rank) {
    engines.emplace_back([&, rank] {
      PublishOptions options;
      options.attach.rank = rank;
      const auto weights = MakeClient(service_).AttachOrPublish(
          spec, [&](Publisher& publisher) { return publisher.Add(Described("w", DataType::kI32, {1}), &rank); },
          options);
      ASSERT_TRUE(weights.ok()) << weights.status().ToString();
      EXPECT_EQ(memcmp(weights->Find("w")->data, &rank, sizeof(rank)), 0);
    });
  }
  for (std::thread& engine : engines) engine.join();
  ASSERT_THAT(service_.Health()->weight_sets(0).shards(), SizeIs(2));
}

TEST_F(PublishTest, ARankWhoseOtherPublisherLeavesIsNotKept) {
  const WeightSpec spec = EngineSpec("ranked", 2);
  std::atomic<bool> began{false};
  std::atomic<bool> fail{false};
  std::thread failing([&] {
    PublishOptions options;
    options.attach.rank = 1;
    (void)MakeClient(service_).AttachOrPublish(
        spec,
        [&](Publisher&) {
          began = true;
          while (!fail) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return Status(StatusCode::kInternal, "MY_REASON", "my loader is broken");
        },
        options);
  });
  ASSERT_TRUE(Eventually([&] { return began.load(); }));
  std::thread committing([&] {
    PublishOptions options;
    options.attach.load_deadline = std::chrono::seconds(30);
    int loads = 0;
    const auto weights = MakeClient(service_).AttachOrPublish(
        spec,
        [&](Publisher& publisher) {
          ++loads;
          const int32_t value = 0;
          if (loads > 1) return Status(StatusCode::kInternal, "ONCE_IS_ENOUGH", "it was given up");
          return publisher.Add(Described("w", DataType::kI32, {1}), &value);
        },
        options);
    EXPECT_EQ(weights.status().reason(), "ONCE_IS_ENOUGH");
  });
  ASSERT_TRUE(Eventually([&] { return service_.Health()->reserved_bytes() > 0; }));
  fail = true;
  failing.join();
  committing.join();
  EXPECT_TRUE(Eventually([&] { return service_.Health()->reserved_bytes() == 0; }));
}

// ---- What is refused.

TEST_F(PublishTest, SomethingElseThanWasPromisedIsRefusedAndLeavesNothing) {
  PublishOptions options;
  options.promise = {Described("w", DataType::kU8, {2})};
  const char bytes[4] = {};
  const auto commit = [&](const TensorToPublish& tensor) {
    return MakeClient(service_).AttachOrPublish(
        EngineSpec(), [&](Publisher& publisher) { return publisher.Add(tensor, bytes); }, options);
  };
  for (const TensorToPublish& other : {Described("v", DataType::kU8, {2}), Described("w", DataType::kU8, {1, 2}),
                                       Described("w", DataType::kU8, {3})}) {
    EXPECT_EQ(commit(other).status().reason(), "PROMISE_BROKEN");
    ASSERT_TRUE(Eventually([&] { return service_.Health()->reserved_bytes() == 0; }));
  }
  const auto kept = commit(options.promise[0]);
  EXPECT_TRUE(kept.ok()) << kept.status().ToString();
}

TEST_F(PublishTest, AQuantizationThatTheOperatorHasNotAllowedIsRefused) {
  const Service allowing({"--publish_quantizations=test_engine/7/awq"});
  WriteModel(allowing);
  WeightSpec spec = EngineSpec();
  spec.quantization = "awq";
  const auto publish = [](const Service& service, const WeightSpec& wanted) {
    return MakeClient(service).AttachOrPublish(wanted, [](Publisher& publisher) {
      const char byte = 1;
      return publisher.Add(Described("w", DataType::kU8, {1}), &byte);
    });
  };
  const auto refused = publish(service_, spec);
  EXPECT_EQ(refused.status().reason(), "QUANTIZATION_UNSUPPORTED");
  EXPECT_THAT(refused.status().message(), HasSubstr("--publish_quantizations=test_engine/7/awq"));
  const auto allowed = publish(allowing, spec);
  EXPECT_TRUE(allowed.ok()) << allowed.status().ToString();
  spec.engine_version = "8";
  EXPECT_EQ(publish(allowing, spec).status().reason(), "QUANTIZATION_UNSUPPORTED");
}

TEST_F(PublishTest, NobodyButAPublisherCanMakeAnEnginesLayoutResident) {
  v1::RegisterRequest request;
  request.mutable_spec()->set_model(Service::Model("m"));
  request.mutable_spec()->set_layout("engine");
  request.mutable_spec()->set_engine("test_engine");
  request.mutable_spec()->set_engine_version("7");
  EXPECT_THAT(service_.Register(request), StatusIs(Reason::kPublishRequired));
  request.mutable_spec()->clear_engine();
  EXPECT_THAT(service_.Register(request), StatusIs(Reason::kInvalidArgument, HasSubstr("spec.engine")));
  request.mutable_spec()->set_layout("hf");
  request.mutable_spec()->clear_engine_version();
  request.mutable_publish();
  EXPECT_THAT(service_.Register(request), StatusIs(Reason::kInvalidArgument, HasSubstr("only layout engine")));
}

TEST_F(PublishTest, MoreMemoryThanThereIsIsRefusedAndThePublicationGoesOn) {
  const Service small({"--memory_limit", "100MiB"});
  WriteModel(small);
  const auto weights = MakeClient(small).AttachOrPublish(EngineSpec(), [](Publisher& publisher) -> Status {
    const auto too_much = publisher.Allocate(Described("large", DataType::kU8, {200 << 20}));
    EXPECT_EQ(too_much.status().reason(), "MEMORY_EXHAUSTED");
    const char byte = 1;
    return publisher.Add(Described("w", DataType::kU8, {1}), &byte);
  });
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(weights->tensors().size(), 1u);
}

TEST_F(PublishTest, APublisherThatTakesTooLongIsGivenUp) {
  const Service hasty({"--publish_timeout", "200ms"});
  WriteModel(hasty);
  int loads = 0;
  const auto weights = MakeClient(hasty).AttachOrPublish(EngineSpec(), [&](Publisher& publisher) -> Status {
    if (++loads > 1) return Status(StatusCode::kInternal, "ENOUGH", "it was given up");
    EXPECT_TRUE(Eventually([&] { return hasty.Health()->load_count() == 0; }));
    const char byte = 1;
    const Status late = publisher.Add(Described("w", DataType::kU8, {1}), &byte);
    EXPECT_EQ(late.reason(), "PUBLICATION_UNKNOWN");
    return late;
  });
  EXPECT_EQ(weights.status().reason(), "ENOUGH") << "it may try once more";
  EXPECT_EQ(hasty.Health()->reserved_bytes(), 0);
}

// With the stub alone, as an engine without our library would.
TEST_F(PublishTest, MemoryThatAnybodyCanStillWriteToIsNotSealed) {
  const auto connection = *client::Connection::Open({.socket_path = service_.socket()});
  v1::RegisterRequest offer;
  offer.mutable_spec()->set_model(Service::Model("m"));
  offer.mutable_spec()->set_layout("engine");
  offer.mutable_spec()->set_engine("stub");
  offer.mutable_spec()->set_engine_version("1");
  offer.mutable_environment()->set_torch_version("any");
  offer.mutable_publish()->add_slab_bytes(4096);
  grpc::ClientContext context;
  const auto stream = connection->service().Register(&context, offer);
  v1::RegisterResponse response;
  while (stream->Read(&response) && !response.has_publish_grant()) {
  }
  ASSERT_TRUE(response.has_publish_grant());
  const v1::PublishGrant grant = response.publish_grant();
  const auto fds =
      client::RedeemTicket(service_.socket(), grant.slabs().ticket(), 1, client::DeadlineIn(std::chrono::seconds(10)));
  ASSERT_THAT(fds, IsOk());
  const int fd = (*fds)[0].get();
  void* const mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  memset(mapped, 7, 4096);
  EXPECT_NE(ftruncate(fd, 0), 0) << "a publisher can cut off memory that others will map";
  const auto commit = [&] {
    grpc::ClientContext commit_context;
    v1::CommitResponse committed;
    const auto writer = connection->service().Commit(&commit_context, &committed);
    v1::CommitRequest request;
    request.set_publication_token(grant.publication_token());
    v1::Tensor& tensor = *request.add_tensors();
    tensor.set_name("w");
    tensor.set_dtype(v1::DATA_TYPE_U8);
    tensor.add_shape(4096);
    tensor.set_size_bytes(4096);
    writer->Write(request);
    writer->WritesDone();
    return connection->ToStatus(writer->Finish());
  };

  EXPECT_THAT(commit(), StatusIs(Reason::kStillWritable));
  memset(mapped, 8, 4096);  // and it still is
  ASSERT_EQ(munmap(mapped, 4096), 0);
  EXPECT_THAT(commit(), IsOk());

  const char byte = 9;
  EXPECT_EQ(pwrite(fd, &byte, 1, 0), -1);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  const auto weights = service_.AttachRank(
      [] {
        WeightSpec spec = EngineSpec("stub");
        spec.engine_version = "1";
        return spec;
      }(),
      0);
  ASSERT_TRUE(weights.ok()) << weights.status().ToString();
  EXPECT_EQ(BytesOf(*weights->Find("w")), std::string(4096, '\x08'));
}

}  // namespace
}  // namespace weightbroker::testing
