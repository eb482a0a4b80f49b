#include "server/keeper/signals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/support/status_matchers.h"

namespace weightbroker {
namespace {

using ::weightbroker::testing::IsOk;

TEST(SignalReader, GivesSignalsThatHaveComeInsteadOfDyingOfThem) {
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  auto signals = SignalReader::Create({SIGUSR1, SIGUSR2});
  ASSERT_THAT(signals, IsOk());
  EXPECT_EQ(signals->Read(), std::nullopt);

  raise(SIGUSR2);

  EXPECT_EQ(signals->Read(), SIGUSR2);
  EXPECT_EQ(signals->Read(), std::nullopt);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace
}  // namespace weightbroker
