#include "server/broker/exporter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/base/socket.h"

namespace weightbroker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Collects what the watch tells.
class ExporterWatchTest : public ::testing::Test {
 protected:
  struct Pair {
    std::shared_ptr<const Exporter> exporter;
    UniqueFd other_end;
  };

  static Pair MakePair() {
    SocketPair sockets = CreateSeqpacketPair().value();
    return {std::make_shared<const Exporter>(std::move(sockets.first)), std::move(sockets.second)};
  }

  void OnEnded(const std::string& fingerprint) {
    MutexLock lock(mutex_);
    told_.push_back(fingerprint);
    changed_.NotifyAll();
  }

  std::vector<std::string> WaitForNews(size_t count) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MutexLock lock(mutex_);
    while (told_.size() < count && changed_.WaitUntil(mutex_, deadline)) {
    }
    return told_;
  }

  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> told_ ABSL_GUARDED_BY(mutex_);
  ExporterWatch watch_{[this](const std::string& fingerprint) { OnEnded(fingerprint); }, std::chrono::milliseconds(1)};
};

TEST_F(ExporterWatchTest, AnExporterIsAliveUntilItsEndOfTheSocketCloses) {
  Pair pair = MakePair();
  EXPECT_TRUE(pair.exporter->alive());
  pair.other_end.reset();
  EXPECT_FALSE(pair.exporter->alive());
}

TEST_F(ExporterWatchTest, TellsOnceOfOneThatEnds) {
  Pair first = MakePair();
  Pair second = MakePair();
  watch_.Add(first.exporter, "a");
  watch_.Add(second.exporter, "b");
  first.other_end.reset();
  EXPECT_THAT(WaitForNews(1), ElementsAre("a"));
  second.other_end.reset();
  EXPECT_THAT(WaitForNews(2), ElementsAre("a", "b"));
}

TEST_F(ExporterWatchTest, TellsOfOneThatHadEndedBefore) {
  Pair pair = MakePair();
  pair.other_end.reset();
  watch_.Add(pair.exporter, "a");
  EXPECT_THAT(WaitForNews(1), ElementsAre("a"));
}

TEST_F(ExporterWatchTest, TellsOnceOfAProcessWithAWayForEachRank) {
  Pair first = MakePair();
  Pair second = MakePair();
  Pair last = MakePair();
  watch_.Add(first.exporter, "a");
  watch_.Add(second.exporter, "a");
  watch_.Add(last.exporter, "b");
  first.other_end.reset();
  second.other_end.reset();
  EXPECT_THAT(WaitForNews(1), ElementsAre("a"));
  last.other_end.reset();
  EXPECT_THAT(WaitForNews(2), ElementsAre("a", "b"));
}

TEST_F(ExporterWatchTest, SaysNothingOfOneThatIsGivenUpAndKeepsNoneOfItsSockets) {
  Pair given_up = MakePair();
  Pair pair = MakePair();
  watch_.Add(given_up.exporter, "a");
  watch_.Add(pair.exporter, "b");
  given_up.exporter.reset();
  EXPECT_TRUE(ReceiveMessage(given_up.other_end.get(), std::chrono::seconds(20))->closed);
  pair.other_end.reset();
  EXPECT_THAT(WaitForNews(1), ElementsAre("b"));
}

}  // namespace
}  // namespace weightbroker
