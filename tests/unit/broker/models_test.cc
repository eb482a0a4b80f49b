// What lies where, and what is kept of it: model resolver, identity cache, worker pool.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "server/broker/identity_cache.h"
#include "server/broker/model_resolver.h"
#include "server/broker/worker_pool.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_folder.h"

namespace weightbroker {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::CheckpointBuilder;
using testing::FaultyFileSystem;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TemporaryFolder;

class ModelResolverTest : public ::testing::Test {
 protected:
  ModelResolverTest() : base_(fs::canonical(folder_.path()).string()) {
    for (const char* name : {"models/llama", "models2/llama", "outside", "blobs"}) fs::create_directories(Path(name));
  }

  std::string Path(const std::string& name) const { return base_ + "/" + name; }

  ModelResolver Make() const {
    return ModelResolver::Create(RealFileSystem(), {{"models", Path("models")}, {"blobs", Path("blobs")}}).value();
  }

  const TemporaryFolder folder_;
  const std::string base_;
};

TEST_F(ModelResolverTest, TakesANameAndARelativePathOrAnAbsolutePath) {
  EXPECT_EQ(Make().Resolve("models:llama").value(), Path("models/llama"));
  EXPECT_EQ(Make().Resolve(Path("models/llama")).value(), Path("models/llama"));
  EXPECT_EQ(Make().Resolve("models:./llama/../llama").value(), Path("models/llama"));
}

TEST_F(ModelResolverTest, RefusesASiblingWhoseNameBeginsLikeARoot) {
  EXPECT_THAT(Make().Resolve(Path("models2/llama")), StatusIs(Reason::kModelOutsideRoots));
}

TEST_F(ModelResolverTest, RefusesDotDotOutOfTheRoot) {
  EXPECT_THAT(Make().Resolve("models:../outside"), StatusIs(Reason::kModelOutsideRoots));
}

TEST_F(ModelResolverTest, RefusesASymbolicLinkOutOfTheRootNamingBoth) {
  fs::create_symlink(Path("outside"), Path("models/link"));
  EXPECT_THAT(Make().Resolve("models:link"),
              StatusIs(Reason::kModelOutsideRoots, AllOf(HasSubstr(Path("outside")), HasSubstr("models:link"))));
}

TEST_F(ModelResolverTest, FollowsASymbolicLinkFromOneRootIntoAnother) {
  fs::create_directories(Path("blobs/x"));
  fs::create_symlink(Path("blobs/x"), Path("models/link"));
  EXPECT_EQ(Make().Resolve("models:link").value(), Path("blobs/x"));
}

TEST_F(ModelResolverTest, ResolvesRootsThatAreSymbolicLinksThemselves) {
  fs::create_directory_symlink(Path("models"), Path("alias"));
  const auto resolver = ModelResolver::Create(RealFileSystem(), {{"a", Path("alias")}});
  ASSERT_THAT(resolver, IsOk());
  EXPECT_EQ(resolver->Resolve("a:llama").value(), Path("models/llama"));
  EXPECT_EQ(resolver->Resolve(Path("alias/llama")).value(), Path("models/llama"));
}

TEST_F(ModelResolverTest, DoesNotTellWhatIsOutsideTheRoots) {
  EXPECT_THAT(Make().Resolve(Path("outside")), StatusIs(Reason::kModelOutsideRoots));
  EXPECT_THAT(Make().Resolve(Path("nothing")), StatusIs(Reason::kModelOutsideRoots));
  EXPECT_THAT(Make().Resolve("models:../nothing"), StatusIs(Reason::kModelOutsideRoots));
}

TEST_F(ModelResolverTest, SaysThatAModelIsNotThere) {
  EXPECT_THAT(Make().Resolve("models:nothing"), StatusIs(Reason::kModelNotFound));
}

TEST_F(ModelResolverTest, SaysWhereAModelThatIsGoneWas) {
  fs::create_directory_symlink(Path("models"), Path("alias"));
  const auto resolver = ModelResolver::Create(RealFileSystem(), {{"a", Path("alias")}});
  ASSERT_THAT(resolver, IsOk());
  EXPECT_EQ(resolver->ResolveGone("a:llama").value(), Path("models/llama")) << "it is there";
  EXPECT_EQ(resolver->ResolveGone("a:gone/8b/").value(), Path("models/gone/8b"));
  EXPECT_EQ(resolver->ResolveGone(Path("alias/gone")).value(), Path("models/gone"));
  EXPECT_THAT(resolver->ResolveGone("a:../outside/gone"), StatusIs(Reason::kModelOutsideRoots));
  EXPECT_THAT(resolver->ResolveGone(Path("nothing")), StatusIs(Reason::kModelOutsideRoots));
  EXPECT_THAT(resolver->ResolveGone("b:llama"), StatusIs(Reason::kModelRootUnknown));
}

TEST_F(ModelResolverTest, RefusesAFileInPlaceOfAFolder) {
  testing::WriteFile(Path("models/file"), "x");
  EXPECT_THAT(Make().Resolve("models:file"), StatusIs(Reason::kModelNotFound, HasSubstr("not a folder")));
}

TEST_F(ModelResolverTest, RefusesAnUnknownRootNamingThoseThereAre) {
  EXPECT_THAT(Make().Resolve("other:llama"), StatusIs(Reason::kModelRootUnknown, HasSubstr("models=")));
}

TEST_F(ModelResolverTest, RefusesWordsThatAreNoModel) {
  for (const std::string& model :
       {std::string(), std::string("llama"), std::string(":llama"), std::string("models:a\nb"),
        std::string("models:a\0b", 10), std::string(5000, 'a')}) {
    EXPECT_THAT(Make().Resolve(model), StatusIs(Reason::kInvalidArgument)) << model;
  }
}

TEST_F(ModelResolverTest, LetsTheRootFolderContainEverything) {
  const auto resolver = ModelResolver::Create(RealFileSystem(), {{"all", "/"}});
  ASSERT_THAT(resolver, IsOk());
  EXPECT_EQ(resolver->Resolve(Path("outside")).value(), Path("outside"));
}

TEST_F(ModelResolverTest, RefusesRootsThatCannotBeUsed) {
  testing::WriteFile(Path("file"), "x");
  const auto create = [](const std::vector<ModelRoot>& roots) {
    return ModelResolver::Create(RealFileSystem(), roots).status();
  };
  EXPECT_THAT(create({{"a", "relative"}}), StatusIs(Reason::kConfigurationInvalid, HasSubstr("absolute")));
  EXPECT_THAT(create({{"a", Path("nothing")}}), StatusIs(Reason::kConfigurationInvalid));
  EXPECT_THAT(create({{"a", Path("file")}}), StatusIs(Reason::kConfigurationInvalid, HasSubstr("not a folder")));
  EXPECT_THAT(create({{"a:b", Path("models")}}), StatusIs(Reason::kConfigurationInvalid));
  EXPECT_THAT(create({{"a", Path("models")}, {"a", Path("blobs")}}),
              StatusIs(Reason::kConfigurationInvalid, HasSubstr("another root")));
}

TEST_F(ModelResolverTest, OpensNothingThatASymbolicLinkInAModelLeadsToOutsideTheRoots) {
  testing::WriteFile(Path("outside/secret"), "x");
  testing::WriteFile(Path("blobs/fine"), "x");
  fs::create_symlink(Path("outside/secret"), Path("models/llama/secret"));
  fs::create_symlink(Path("blobs/fine"), Path("models/llama/fine"));
  const ModelResolver resolver = Make();
  RootedFileSystem files(RealFileSystem(), resolver);
  EXPECT_THAT(files.Open(Path("models/llama/secret"), ReadMode::kBuffered).status(),
              StatusIs(Reason::kModelOutsideRoots, HasSubstr("models/llama/secret")));
  EXPECT_THAT(files.Stat(Path("models/llama/secret")), StatusIs(Reason::kModelOutsideRoots));
  EXPECT_THAT(files.ListFolder(Path("outside")), StatusIs(Reason::kModelOutsideRoots));
  EXPECT_THAT(files.Open(Path("models/llama/fine"), ReadMode::kBuffered).status(), IsOk());
  EXPECT_THAT(files.ListFolder(Path("models/llama")), IsOk());
}

// ---- Identities.

class IdentityCacheTest : public ::testing::Test {
 protected:
  IdentityCacheTest() : folder_path_(fs::canonical(folder_.path()).string()) {
    CheckpointBuilder().Tensor("a", "BF16", {4}).Write(folder_path_);
  }

  const TemporaryFolder folder_;
  const std::string folder_path_;
  FaultyFileSystem files_{RealFileSystem()};
  IdentityCache cache_{files_, RealFileSystem(), /*max_folders=*/2};
};

TEST_F(IdentityCacheTest, ReadsAFolderOnceAndThenOnlyItsStats) {
  const auto first = cache_.Get(folder_path_);
  ASSERT_THAT(first, IsOk());
  const int64_t reads = files_.reads();
  EXPECT_GT(reads, 0);
  EXPECT_EQ(cache_.Get(folder_path_).value(), *first);
  EXPECT_EQ(files_.reads(), reads);
}

TEST_F(IdentityCacheTest, ReadsAFolderAgainWhenAFileHasChanged) {
  const auto first = cache_.Get(folder_path_);
  CheckpointBuilder().Tensor("a", "BF16", {8}).Write(folder_path_);
  const auto second = cache_.Get(folder_path_);
  ASSERT_THAT(second, IsOk());
  EXPECT_NE(*first, *second);
}

TEST_F(IdentityCacheTest, ReadsAFolderAgainWhenAFileHasCome) {
  const auto first = cache_.Get(folder_path_);
  testing::WriteFile(folder_path_ + "/hf_quant_config.json", "{}");
  const auto second = cache_.Get(folder_path_);
  ASSERT_THAT(second, IsOk());
  EXPECT_EQ((*second)->files.size(), (*first)->files.size() + 1);
}

TEST_F(IdentityCacheTest, TakesOverWhatAnotherCacheHasRead) {
  const auto identity = cache_.Get(folder_path_).value();
  const int64_t reads = files_.reads();
  IdentityCache next(files_, files_);
  next.Seed(identity);
  EXPECT_EQ(next.Get(folder_path_).value(), identity);
  EXPECT_EQ(files_.reads(), reads);
}

TEST_F(IdentityCacheTest, BelievesNothingOfAnotherCacheThatIsNotSoAnyMore) {
  const auto identity = cache_.Get(folder_path_).value();
  testing::WriteFile(folder_path_ + "/hf_quant_config.json", "{}");
  IdentityCache next(files_, files_);
  next.Seed(identity);
  EXPECT_NE(next.Get(folder_path_).value(), identity);
}

TEST_F(IdentityCacheTest, KeepsNoErrors) {
  fs::rename(folder_path_ + "/config.json", folder_path_ + "/gone");
  EXPECT_THAT(cache_.Get(folder_path_), StatusIs(Reason::kCheckpointIncomplete));
  fs::rename(folder_path_ + "/gone", folder_path_ + "/config.json");
  EXPECT_THAT(cache_.Get(folder_path_), IsOk());
}

TEST_F(IdentityCacheTest, ForgetsTheFolderThatWasNotUsedForLongest) {
  const TemporaryFolder others[2];
  ASSERT_THAT(cache_.Get(folder_path_), IsOk());
  for (const TemporaryFolder& other : others) {
    const std::string path = fs::canonical(other.path()).string();
    CheckpointBuilder().Tensor("a", "BF16", {4}).Write(path);
    ASSERT_THAT(cache_.Get(path), IsOk());
  }
  const int64_t reads = files_.reads();
  ASSERT_THAT(cache_.Get(folder_path_), IsOk());
  EXPECT_GT(files_.reads(), reads);
}

TEST_F(IdentityCacheTest, ReadsAFolderOnceForManyCallersAtOnce) {
  std::vector<std::thread> callers;
  std::vector<std::shared_ptr<const CheckpointIdentity>> found(4);
  for (size_t i = 0; i < found.size(); ++i) {
    callers.emplace_back([&, i] { found[i] = cache_.Get(folder_path_).value(); });
  }
  for (std::thread& caller : callers) caller.join();
  for (const auto& identity : found) EXPECT_EQ(identity, found[0]);
}

// ---- Workers.

TEST(WorkerPool, DoesWhatItIsGivenAndAllThatWaitsBeforeItStops) {
  std::atomic<int> done{0};
  WorkerPool pool(2, 100);
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(pool.TrySubmit([&] { ++done; }));
  pool.Stop();
  EXPECT_EQ(done, 50);
  EXPECT_FALSE(pool.TrySubmit([] {}));
}

TEST(WorkerPool, RefusesWorkBeyondWhatMayWait) {
  std::atomic<bool> started{false};
  std::atomic<bool> go_on{false};
  WorkerPool pool(1, 1);
  ASSERT_TRUE(pool.TrySubmit([&] {
    started = true;
    while (!go_on) std::this_thread::yield();
  }));
  while (!started) std::this_thread::yield();
  EXPECT_TRUE(pool.TrySubmit([] {}));
  EXPECT_FALSE(pool.TrySubmit([] {}));
  go_on = true;
}

}  // namespace
}  // namespace weightbroker
