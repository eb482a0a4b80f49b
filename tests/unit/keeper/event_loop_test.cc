#include "server/keeper/event_loop.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "common/base/unique_fd.h"

namespace weightbroker {
namespace {

using std::chrono::milliseconds;

struct Pipe {
  UniqueFd read_end;
  UniqueFd write_end;

  Pipe() {
    int fds[2];
    EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
    read_end.reset(fds[0]);
    write_end.reset(fds[1]);
  }
  void Write() { EXPECT_EQ(write(write_end.get(), "x", 1), 1); }
};

TEST(EventLoop, CallsBackForWhatIsReadableOnly) {
  Pipe silent;
  Pipe ready;
  ready.Write();
  EventLoop loop;
  loop.WatchReadable(silent.read_end.get(), [] { FAIL(); });
  loop.WatchReadable(ready.read_end.get(), [&] { loop.Quit(); });

  loop.Run();
}

TEST(EventLoop, CallsBackWhenTheOtherSideHangsUp) {
  Pipe pipe;
  pipe.write_end.reset();
  EventLoop loop;
  loop.WatchReadable(pipe.read_end.get(), [&] { loop.Quit(); });

  loop.Run();
}

TEST(EventLoop, CallsLaterInOrderOfTime) {
  EventLoop loop;
  std::string order;
  loop.CallAfter(milliseconds(20), [&] { order += "b"; });
  loop.CallAfter(milliseconds(1), [&] { order += "a"; });
  loop.CallAfter(milliseconds(30), [&] { loop.Quit(); });

  loop.Run();

  EXPECT_EQ(order, "ab");
}

TEST(EventLoop, LetsACallbackUnwatchItselfAndOthers) {
  Pipe first;
  Pipe second;
  first.Write();
  second.Write();
  EventLoop loop;
  int calls = 0;
  const auto unwatch_all = [&] {
    ++calls;
    loop.Unwatch(first.read_end.get());
    loop.Unwatch(second.read_end.get());
  };
  loop.WatchReadable(first.read_end.get(), unwatch_all);
  loop.WatchReadable(second.read_end.get(), unwatch_all);
  loop.CallAfter(milliseconds(20), [&] { loop.Quit(); });

  loop.Run();

  EXPECT_EQ(calls, 1);
}

TEST(EventLoop, StopsAtOnceWhenItWasToldToBefore) {
  EventLoop loop;
  loop.CallAfter(milliseconds(0), [] { FAIL(); });
  loop.Quit();
  loop.Run();
}

}  // namespace
}  // namespace weightbroker
