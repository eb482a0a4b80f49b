#include "server/broker/machine_facts.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>

namespace weightbroker {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;

TEST(MachineFacts, AreReadByTheWorkerAndHandedOut) {
  HealthFacts facts(RealClock(), [] { return HealthFacts::Facts{.available_bytes = 42}; });
  WorkerPool worker(1, 8);
  const auto got = MachineFacts(&facts, &worker).Get(minutes(1));
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->available_bytes, 42);
}

TEST(MachineFacts, AreGivenUpWhenTheDriverDoesNotAnswerAndHadOnceItDoes) {
  std::promise<void> driver_answers;
  const auto answered = driver_answers.get_future().share();
  HealthFacts facts(RealClock(), [answered] {
    answered.wait();
    return HealthFacts::Facts{.available_bytes = 42};
  });
  WorkerPool worker(1, 8);
  MachineFacts machine(&facts, &worker);
  EXPECT_FALSE(machine.Get(milliseconds(1)).has_value());
  EXPECT_FALSE(machine.Get(milliseconds(1)).has_value());  // asks no second time
  driver_answers.set_value();
  EXPECT_TRUE(machine.Get(minutes(1)).has_value());
}

TEST(MachineFacts, AreNotThereOnceTheWorkerHasStopped) {
  HealthFacts facts(RealClock(), [] { return HealthFacts::Facts(); });
  WorkerPool worker(1, 8);
  worker.Stop();
  EXPECT_FALSE(MachineFacts(&facts, &worker).Get(minutes(1)).has_value());
}

}  // namespace
}  // namespace weightbroker
