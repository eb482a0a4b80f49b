#include <google/protobuf/descriptor.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using testing::CheckpointBuilder;
using ::testing::ElementsAre;
using testing::Eventually;
using testing::FakeLoader;
using testing::FakeLoaderSpawner;
using testing::FromGrpc;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::LoadsWell;
using testing::OpenExport;
using testing::Scrape;
using testing::ServiceTest;
using ::testing::SizeIs;
using testing::StatusIs;
using testing::WriteFile;

constexpr char kService[] = "weightbroker.v1.WeightBrokerService";

class LifecycleServiceTest : public ServiceTest {
 protected:
  absl::StatusOr<HealthCheckResponse::ServingStatus> Check(const std::string& service) {
    grpc::ClientContext context;
    HealthCheckRequest request;
    request.set_service(service);
    HealthCheckResponse response;
    const absl::Status status = FromGrpc(health_->Check(&context, request, &response));
    if (!status.ok()) return status;
    return response.status();
  }

  std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> Watch(grpc::ClientContext* context,
                                                                 const std::string& service) {
    HealthCheckRequest request;
    request.set_service(service);
    return health_->Watch(context, request);
  }

  // A load that waits until `go_on_` is set.
  testing::FakeLoaderSpawner::Script Waits() {
    return [this](FakeLoader& loader) {
      while (!go_on_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      LoadsWell()(loader);
    };
  }

  // With this desired state.
  void StartWith(const std::string& desired) {
    WriteFile(folder_ / "sets.json", desired);
    BrokerOptions options;
    options.desired_file = folder_ / "sets.json";
    options.metrics_port = 0;
    Start(LoadsWell(), std::move(options));
  }

  std::atomic<bool> go_on_{false};
};

HealthCheckResponse::ServingStatus ReadStatus(grpc::ClientReader<HealthCheckResponse>& reader) {
  HealthCheckResponse response;
  EXPECT_TRUE(reader.Read(&response));
  return response.status();
}

// ---- Health.

TEST_F(LifecycleServiceTest, IsLiveAtOnceAndReadyWhenWhatWasAskedForIsResident) {
  Start(Waits());
  EXPECT_EQ(Health().status(), v1::HealthResponse::STATUS_IDLE);
  EXPECT_EQ(Check("").value(), HealthCheckResponse::SERVING);
  EXPECT_EQ(Check("weightbroker.v1.WeightBrokerGroupService").value(), HealthCheckResponse::SERVING);
  EXPECT_EQ(Check(kService).value(), HealthCheckResponse::NOT_SERVING);
  v1::RegisterRequest request = RegisterRequestFor();
  request.set_wait(false);
  ASSERT_THAT(Register(request), IsOk());
  EXPECT_EQ(Health().status(), v1::HealthResponse::STATUS_LOADING);
  EXPECT_EQ(Check(kService).value(), HealthCheckResponse::NOT_SERVING);
  go_on_ = true;
  ASSERT_THAT(Register(), IsOk());
  EXPECT_EQ(Health().status(), v1::HealthResponse::STATUS_READY);
  EXPECT_EQ(Check(kService).value(), HealthCheckResponse::SERVING);
}

// ---- What it is configured to hold.

TEST_F(LifecycleServiceTest, IsServingWhenAllThatIsDesiredIsResidentAndSaysUntilThenWhatIsMissing) {
  StartWith(R"({"version": 1,
                "sets": [{"name": "first", "model": "models:m", "torch_version": "any"},
                         {"name": "later", "model": "models:later", "torch_version": "any"}],
                "aliases": {"m@live": "first"}})");
  grpc::ClientContext context;
  const auto reader = Watch(&context, kService);
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::NOT_SERVING);
  ASSERT_TRUE(Eventually([this] {
    const v1::HealthResponse health = Health();
    return health.desired_sets(0).state() == v1::DesiredSet::STATE_RESIDENT &&
           health.desired_sets(1).state() == v1::DesiredSet::STATE_FAILED && health.desired_aliases(0).in_place();
  }));
  EXPECT_EQ(Health().status(), v1::HealthResponse::STATUS_LOADING);
  EXPECT_EQ(Health().desired_sets(1).failure().reason(), "MODEL_NOT_FOUND");
  EXPECT_EQ(Check(kService).value(), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Check("").value(), HealthCheckResponse::SERVING);
  EXPECT_THAT(Scrape(broker_->metrics_port()), HasSubstr("weightbroker_ready 0\n"));
  std::filesystem::create_directories(folder_ / "models/later");
  CheckpointBuilder().Tensor("b", "BF16", {4, 4}).Write(folder_ / "models/later");
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::SERVING);
  EXPECT_EQ(Health().status(), v1::HealthResponse::STATUS_READY);
  EXPECT_THAT(Scrape(broker_->metrics_port()), HasSubstr("weightbroker_desired_sets{state=\"resident\"} 2\n"));
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(LifecycleServiceTest, TellsWatchersThatMoreIsDesiredThanThereIs) {
  StartWith(R"({"version": 1, "sets": [{"name": "first", "model": "models:m", "torch_version": "any"}]})");
  ASSERT_TRUE(Eventually([this] { return Check(kService).value() == HealthCheckResponse::SERVING; }));
  grpc::ClientContext context;
  const auto reader = Watch(&context, kService);
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::SERVING);
  WriteFile(folder_ / "sets.json",
            R"({"version": 1, "sets": [{"name": "first", "model": "models:m", "torch_version": "any"},
                                        {"name": "later", "model": "models:later", "torch_version": "any"}]})");
  broker_->ReloadDesired();
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::NOT_SERVING);
  WriteFile(folder_ / "sets.json", R"({"version": 1, "sets": 1})");
  broker_->ReloadDesired();
  EXPECT_THAT(Health().desired_failure().message(), HasSubstr("/sets"));
  EXPECT_THAT(Health().desired_sets(), SizeIs(2));
  WriteFile(folder_ / "sets.json", R"({"version": 1, "sets": []})");
  broker_->ReloadDesired();
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::SERVING);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(LifecycleServiceTest, DoesNotStartWithADesiredStateThatIsWrong) {
  WriteFile(folder_ / "sets.json", "{}");
  FakeLoaderSpawner spawner(LoadsWell());
  const Listener listener = Listener::Create({.path = socket_path_}).value();
  BrokerOptions options;
  options.desired_file = folder_ / "sets.json";
  options.spawner = &spawner;
  EXPECT_THAT(Broker::Start(std::move(options), listener.fd()),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("version")));
}

TEST_F(LifecycleServiceTest, ReportsItsDetailedState) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  const v1::HealthResponse health = Health();
  EXPECT_EQ(health.version(), "1.2.3");
  EXPECT_EQ(health.process_id(), getpid());
  EXPECT_EQ(health.available_bytes(), int64_t{1} << 40);
  EXPECT_GE(health.connection_count(), 1);
  EXPECT_THAT(health.model_roots(), ElementsAre("models"));
  EXPECT_NE(health.host_page_kind(), v1::PAGE_KIND_UNSPECIFIED);
  EXPECT_GT(health.start_time().seconds(), 0);
  EXPECT_THAT(health.weight_sets(), SizeIs(1));
}

TEST_F(LifecycleServiceTest, WatchTellsEachChange) {
  Start(Waits());
  grpc::ClientContext context;
  const auto reader = Watch(&context, kService);
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::NOT_SERVING);
  go_on_ = true;
  const auto set = Register();
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::SERVING);
  ASSERT_THAT(Unregister(set->fingerprint()), IsOk());
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::NOT_SERVING);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(LifecycleServiceTest, HealthOfAnUnknownServiceIsNotFoundAndWatchedAsUnknown) {
  Start();
  EXPECT_THAT(Check("no.such.Service"), StatusIs(Reason::kServiceUnknown, HasSubstr("no.such.Service")));
  grpc::ClientContext context;
  const auto reader = Watch(&context, "no.such.Service");
  EXPECT_EQ(ReadStatus(*reader), HealthCheckResponse::SERVICE_UNKNOWN);
  context.TryCancel();
  reader->Finish();
}

TEST_F(LifecycleServiceTest, HealthCanBeDescribedByReflection) {
  const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName("grpc.health.v1.Health");
  ASSERT_NE(service, nullptr);
  EXPECT_NE(service->FindMethodByName("Watch"), nullptr);
}

// ---- Shutting down.

TEST_F(LifecycleServiceTest, ShutdownTellsExportsAndFinishesEveryStreamWithinSeconds) {
  std::atomic<int> loads{0};
  Start([&](FakeLoader& loader) {
    if (++loads == 1) return LoadsWell()(loader);
    loader.WaitForTheEnd();
  });
  ASSERT_THAT(Register(), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  v1::RegisterRequest other = RegisterRequestFor();
  *other.mutable_environment() = testing::TorchVersion("2.6.0");
  grpc::ClientContext register_context;
  const auto registering = stub_->Register(&register_context, other);
  v1::RegisterResponse progress;
  ASSERT_TRUE(registering->Read(&progress));
  grpc::ClientContext watch_context;
  const auto watching = Watch(&watch_context, "");
  EXPECT_EQ(ReadStatus(*watching), HealthCheckResponse::SERVING);

  const auto start = std::chrono::steady_clock::now();
  std::thread shutdown([&] { broker_->Shutdown(); });
  const auto event = open.ReadNext();
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->event().kind(), v1::ExportEvent::KIND_DRAINING);
  EXPECT_THAT(open.Finish(), IsOk());
  while (registering->Read(&progress)) {
  }
  EXPECT_THAT(FromGrpc(registering->Finish()), StatusIs(Reason::kDraining));
  EXPECT_EQ(ReadStatus(*watching), HealthCheckResponse::NOT_SERVING);
  EXPECT_THAT(FromGrpc(watching->Finish()), StatusIs(Reason::kDraining));
  shutdown.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(900));
  EXPECT_EQ(spawner_->running_count(), 0);
}

TEST_F(LifecycleServiceTest, ShutdownDoesNotWaitLongForACallerThatDoesNotRead) {
  Start(LoadsWell(100'000));  // more than flow control lets out unread
  ASSERT_THAT(Register(), IsOk());
  grpc::ClientContext context;
  const auto reader = stub_->Export(&context, ExportRequestFor());
  ASSERT_TRUE(Eventually([&] { return Health().lease_count() == 1; }));
  const auto start = std::chrono::steady_clock::now();
  broker_->Shutdown();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(3000));
  context.TryCancel();
  reader->Finish();
}

TEST_F(LifecycleServiceTest, AnEngineMayComeAndGoWhileItShutsDown) {
  Start();
  ASSERT_THAT(Register(), IsOk());
  std::atomic<bool> stop{false};
  std::vector<std::thread> engines;
  for (int i = 0; i < 4; ++i) {
    engines.emplace_back([&] {
      while (!stop) OpenExport(*stub_, ExportRequestFor()).ReadShard();
    });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  stop = true;
  broker_.reset();
  listener_.reset();  // whoever connects again is told at once
  for (std::thread& engine : engines) engine.join();
}

// ---- Metrics.

TEST_F(LifecycleServiceTest, CountersMoveAndALiveScrapeSatisfiesPromtool) {
  BrokerOptions options;
  options.metrics_port = 0;
  Start(LoadsWell(), std::move(options));
  ASSERT_THAT(Register(), IsOk());
  OpenExport open(*stub_, ExportRequestFor());
  ASSERT_TRUE(open.ReadShard());
  EXPECT_THAT(OpenExport(*stub_, ExportRequestFor("2.6.0")).Finish(), StatusIs(Reason::kFingerprintMismatch));
  std::string text;  // a load is counted just after it has been told
  EXPECT_TRUE(Eventually([&] {
    text = Scrape(broker_->metrics_port());
    return text.find("weightbroker_loads_total{result=\"resident\"} 1\n") != std::string::npos;
  }));
  EXPECT_THAT(text, HasSubstr("weightbroker_weight_sets{state=\"RESIDENT\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_resident_tensors 2\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_leases 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_exports_total{result=\"granted\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_exports_total{result=\"refused\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_refusals_total{reason=\"FINGERPRINT_MISMATCH\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_fingerprint_mismatches_total{field=\"environment.torch_version\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_rpcs_total{code=\"OK\",method=\"Register\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("weightbroker_rpc_duration_seconds_count{method=\"Export\"} 2\n"));

  const std::string path = folder_ / "metrics.txt";
  std::ofstream(path) << text;
  EXPECT_EQ(system(absl::StrCat("promtool check metrics < ", path).c_str()), 0);
}

TEST_F(LifecycleServiceTest, ATakenMetricsPortIsAClearError) {
  BrokerOptions options;
  options.metrics_port = 0;
  Start(LoadsWell(), std::move(options));
  BrokerOptions second;
  second.spawner = spawner_.get();
  second.metrics_port = broker_->metrics_port();
  const auto other = Listener::Create({.path = folder_ / "other.sock"});
  ASSERT_THAT(other, IsOk());
  EXPECT_THAT(Broker::Start(std::move(second), other->fd()).status(),
              StatusIs(Reason::kSystemError, HasSubstr("metrics cannot be served")));
}

}  // namespace
}  // namespace weightbroker
