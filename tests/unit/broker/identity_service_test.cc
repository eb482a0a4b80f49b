// Export by spec against files that have stayed, changed or gone.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/inotify.h>
#include <sys/stat.h>

#include "tests/support/temporary_folder.h"
#include "tests/unit/broker/service_fixture.h"

namespace weightbroker {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::HasMetadata;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::LoadsWell;
using ::testing::Not;
using testing::OpenExport;
using testing::ReadFile;
using testing::Scrape;
using testing::ServiceTest;
using testing::StatusIs;
using testing::WriteFile;

class IdentityServiceTest : public ServiceTest {
 protected:
  void StartWith(bool exports_unverified) {
    BrokerOptions options;
    options.exports_unverified = exports_unverified;
    options.metrics_port = 0;
    Start(LoadsWell(), std::move(options));
    const auto set = Register();
    ASSERT_THAT(set, IsOk());
    fingerprint_ = set->fingerprint();
  }

  // Of an Export by spec, which has to be granted.
  v1::IdentityState ExportedState(const v1::ExportRequest& request) {
    OpenExport open(*stub_, request);
    EXPECT_TRUE(open.ReadShard());
    EXPECT_EQ(open.header().fingerprint(), fingerprint_);
    return open.header().identity_state();
  }

  absl::Status FailureOf(const v1::ExportRequest& request) { return OpenExport(*stub_, request).Finish(); }

  std::string Shard() const { return model_ + "/model.safetensors"; }

  std::string fingerprint_;
};

TEST_F(IdentityServiceTest, SaysThatTheFilesAreWhatTheyWere) {
  StartWith(/*exports_unverified=*/false);
  EXPECT_EQ(ExportedState(ExportRequestFor()), v1::IDENTITY_STATE_VERIFIED);
}

TEST_F(IdentityServiceTest, DoesNotLookAtFilesForASetThatIsNamedByItsFingerprint) {
  StartWith(/*exports_unverified=*/false);
  fs::remove_all(model_);
  v1::ExportRequest request;
  request.set_fingerprint(fingerprint_);
  request.set_hold(true);
  EXPECT_EQ(ExportedState(request), v1::IDENTITY_STATE_UNSPECIFIED);
}

// The kernel reports every opening of a file in the folder, whoever opens it.
TEST_F(IdentityServiceTest, LooksAtTheFilesByStatAlone) {
  StartWith(/*exports_unverified=*/false);
  const UniqueFd watch(inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  ASSERT_GE(inotify_add_watch(watch.get(), model_.c_str(), IN_OPEN | IN_ACCESS), 0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ExportedState(ExportRequestFor()), v1::IDENTITY_STATE_VERIFIED);

  char events[4096];
  EXPECT_EQ(read(watch.get(), events, sizeof(events)), -1) << "something was opened";
  EXPECT_EQ(errno, EAGAIN);
  ReadFile(Shard());
  EXPECT_GT(read(watch.get(), events, sizeof(events)), 0) << "the watch does not see what it should";
}

TEST_F(IdentityServiceTest, RefusesAShardOfWhichAByteHasChangedThoughSizeAndMtimeAreRestored) {
  StartWith(/*exports_unverified=*/true);
  struct stat before = {};
  ASSERT_EQ(stat(Shard().c_str(), &before), 0);
  std::string bytes = ReadFile(Shard());
  bytes.back() ^= 1;
  const UniqueFd file(open(Shard().c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_EQ(pwrite(file.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  const timespec times[] = {{0, UTIME_OMIT}, before.st_mtim};
  ASSERT_EQ(futimens(file.get(), times), 0);

  EXPECT_THAT(FailureOf(ExportRequestFor()),
              AllOf(StatusIs(Reason::kFingerprintMismatch, HasSubstr("checkpoint.files.model.safetensors.ctime_ns")),
                    HasMetadata("difference_count", "1")));
}

TEST_F(IdentityServiceTest, RefusesAShardThatWasReplacedByRename) {
  StartWith(/*exports_unverified=*/true);
  WriteFile(model_ + "/new", ReadFile(Shard()));
  fs::rename(model_ + "/new", Shard());

  EXPECT_THAT(FailureOf(ExportRequestFor()),
              StatusIs(Reason::kFingerprintMismatch, HasSubstr("checkpoint.files.model.safetensors.inode")));
}

TEST_F(IdentityServiceTest, RefusesAConfigThatHasChangedByWhiteSpaceOnly) {
  StartWith(/*exports_unverified=*/true);
  WriteFile(model_ + "/config.json", ReadFile(model_ + "/config.json") + "\n");

  EXPECT_THAT(FailureOf(ExportRequestFor()),
              StatusIs(Reason::kFingerprintMismatch, HasSubstr("checkpoint.config.json.sha256")));
}

TEST_F(IdentityServiceTest, RefusesFilesThatAreGoneSayingWhatToDo) {
  StartWith(/*exports_unverified=*/false);
  fs::remove(Shard());
  ::testing::internal::CaptureStderr();

  EXPECT_THAT(FailureOf(ExportRequestFor()),
              AllOf(StatusIs(Reason::kModelNotFound, AllOf(HasSubstr(fingerprint_), HasSubstr("--unverified_exports"))),
                    HasMetadata("identity", "unverified")));

  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("export.unverified"));
  EXPECT_THAT(Scrape(broker_->metrics_port()),
              HasSubstr("weightbroker_unverified_exports_total{result=\"refused\"} 1\n"));
}

TEST_F(IdentityServiceTest, ExportsFilesThatAreGoneAsUnverifiedWhereTheOperatorAllowsIt) {
  StartWith(/*exports_unverified=*/true);
  fs::remove(Shard());
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(ExportedState(ExportRequestFor()), v1::IDENTITY_STATE_UNVERIFIED);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("export.unverified"), HasSubstr("identity=unverified"), HasSubstr(fingerprint_)));

  fs::remove_all(model_);
  EXPECT_EQ(ExportedState(ExportRequestFor()), v1::IDENTITY_STATE_UNVERIFIED);
  fs::remove_all(folder_ / "models");
  EXPECT_EQ(ExportedState(ExportRequestFor()), v1::IDENTITY_STATE_UNVERIFIED);
  EXPECT_THAT(Scrape(broker_->metrics_port()),
              HasSubstr("weightbroker_unverified_exports_total{result=\"allowed\"} 3\n"));
}

TEST_F(IdentityServiceTest, DoesNotTakeOtherWeightsForThoseWhoseFilesAreGone) {
  StartWith(/*exports_unverified=*/true);
  fs::remove(Shard());
  EXPECT_THAT(FailureOf(ExportRequestFor("2.6.0")), StatusIs(Reason::kCheckpointIncomplete));
  v1::ExportRequest other_dtype = ExportRequestFor();
  other_dtype.mutable_spec()->set_dtype("F32");
  EXPECT_THAT(FailureOf(other_dtype), StatusIs(Reason::kCheckpointIncomplete));
  v1::ExportRequest other_model = ExportRequestFor();
  other_model.mutable_spec()->set_model("models:other");
  EXPECT_THAT(FailureOf(other_model), StatusIs(Reason::kModelNotFound));
}

TEST_F(IdentityServiceTest, RefusesFilesOfWhichSomeAreGoneAndOthersHaveChanged) {
  StartWith(/*exports_unverified=*/true);
  fs::remove(Shard());
  WriteFile(model_ + "/config.json", "{}");
  EXPECT_THAT(FailureOf(ExportRequestFor()),
              StatusIs(Reason::kCheckpointIncomplete, Not(HasSubstr("unverified_exports"))));
}

TEST_F(IdentityServiceTest, TakesFilesThatCameBackWithAnotherCtimeForOthers) {
  StartWith(/*exports_unverified=*/true);
  fs::rename(Shard(), folder_ / "aside");
  EXPECT_EQ(ExportedState(ExportRequestFor()), v1::IDENTITY_STATE_UNVERIFIED);
  // Renaming changes the ctime, by which an edit is told, too.
  fs::rename(folder_ / "aside", Shard());
  EXPECT_THAT(FailureOf(ExportRequestFor()), StatusIs(Reason::kFingerprintMismatch, HasSubstr("ctime_ns")));
}

}  // namespace
}  // namespace weightbroker
