#include "server/broker/stream_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

namespace weightbroker {
namespace {

using std::chrono::milliseconds;

class StuckStream : public WatchedStream {
 public:
  explicit StuckStream(bool stuck) : stuck_(stuck) {}

  bool CutIfStuck(std::chrono::steady_clock::time_point, milliseconds limit) override {
    EXPECT_EQ(limit, milliseconds(30));
    ++looks;
    return stuck_.exchange(false);
  }

  std::atomic<int> looks{0};

 private:
  std::atomic<bool> stuck_;
};

TEST(StreamWatch, CutsStreamsThatAreStuckAndForgetsThoseThatAreOver) {
  std::atomic<int> cut{0};
  StreamWatch watch(
      milliseconds(30), [&] { ++cut; }, milliseconds(1));
  const auto stuck = std::make_shared<StuckStream>(true);
  const auto good = std::make_shared<StuckStream>(false);
  watch.Add(stuck);
  watch.Add(good);
  watch.Add(std::make_shared<StuckStream>(true));  // over at once

  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while ((good->looks < 3 || stuck->looks < 3) && std::chrono::steady_clock::now() < deadline) {
  }

  EXPECT_GE(good->looks, 3);
  EXPECT_EQ(cut, 1);
}

}  // namespace
}  // namespace weightbroker
