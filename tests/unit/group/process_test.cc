// Members that are processes of their own, killed and stopped by the test.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "common/group/member.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/group/sitter.h"

namespace weightbroker::group {
namespace {

using std::chrono::milliseconds;
using testing::IsOk;

constexpr uint64_t kFirstEpoch = 1000;
constexpr size_t kEpochs = 100'000;

// What all processes write to: who was active in which epoch, and whether anything happened that must not.
struct Record {
  std::atomic<pid_t> active_in[kEpochs];
  std::atomic<int> faults;
  std::atomic<uint64_t> greatest_epoch;  // what a store would refuse epochs below of
  std::atomic<bool> ending;
};

bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

void NoteActive(Record* record, uint64_t epoch) {
  pid_t nobody = 0;
  const size_t index = epoch - kFirstEpoch;
  if (index >= kEpochs || !record->active_in[index].compare_exchange_strong(nobody, getpid())) ++record->faults;
  uint64_t before = record->greatest_epoch.load();
  while (before < epoch && !record->greatest_epoch.compare_exchange_weak(before, epoch)) {
  }
}

// A member until it is killed or the test ends.
[[noreturn]] void TakePart(int fd, Record* record) {
  auto page = GroupPage::Map(fd);
  if (!page.ok()) _exit(2);
  auto member = GroupMember::Join(*std::move(page));
  if (!member.ok()) _exit(3);
  while (!record->ending) {
    const auto epoch = (*member)->WaitUntilActive(std::chrono::steady_clock::now() + milliseconds(20));
    if (epoch.ok()) {
      NoteActive(record, *epoch);
      while ((*member)->IsActive(*epoch) && !record->ending) std::this_thread::sleep_for(milliseconds(1));
    } else if (HasReason(epoch.status(), Reason::kGroupSuperseded)) {
      if (!(*member)->Rejoin().ok()) ++record->faults;
    } else if (!HasReason(epoch.status(), Reason::kDeadlineExceeded)) {
      ++record->faults;
    }
  }
  _exit(0);
}

class GroupOfProcesses : public ::testing::Test {
 protected:
  // A process that does not get to run for two seconds would be taken for hung, and a test fail.
  explicit GroupOfProcesses(milliseconds timeout = milliseconds(2000)) : fd_(NewPage(kFirstEpoch, timeout)) {
    void* const memory = mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    record_ = new (memory) Record{};
  }

  ~GroupOfProcesses() override {
    record_->ending = true;
    for (const pid_t pid : members_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    munmap(record_, sizeof(Record));
  }

  pid_t Start() {
    const size_t before = page_.Read(SteadyNanoseconds())->members.size();
    const pid_t pid = fork();
    if (pid == 0) TakePart(fd_.get(), record_);
    members_.push_back(pid);
    EXPECT_TRUE(Eventually([&] { return CountMembers() > before; }));
    return pid;
  }

  void Kill(pid_t pid) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    std::erase(members_, pid);
  }

  size_t CountMembers() const { return page_.Read(SteadyNanoseconds())->members.size(); }

  // The process that is active, and not taken for hung; 0 for none.
  pid_t Active() const {
    const auto view = page_.Read(SteadyNanoseconds());
    if (!view.ok() || view->members.empty() || view->members[0].role != MemberRole::kActive) return 0;
    const uint64_t epoch = view->epoch;
    const pid_t noted = record_->active_in[epoch - kFirstEpoch].load();
    return noted == static_cast<pid_t>(view->members[0].process_id) ? noted : 0;
  }

  const UniqueFd fd_;
  const GroupPage page_ = MapPage(fd_);
  Record* record_ = nullptr;
  std::vector<pid_t> members_;
};

TEST_F(GroupOfProcesses, IsTakenOverWhenTheActiveOneIsKilled) {
  const pid_t first = Start();
  ASSERT_TRUE(Eventually([&] { return Active() == first; }));
  const pid_t second = Start();
  Kill(first);
  EXPECT_TRUE(Eventually([&] { return Active() == second; }));
  EXPECT_EQ(page_.Read(SteadyNanoseconds())->died, 1U);
  EXPECT_EQ(record_->faults, 0);
}

TEST_F(GroupOfProcesses, IsTakenOverWhenTheActiveOneAndTheFirstStandbyAreKilledTogether) {
  const pid_t first = Start();
  ASSERT_TRUE(Eventually([&] { return Active() == first; }));
  const pid_t second = Start();
  const pid_t third = Start();
  const pid_t fourth = Start();
  kill(second, SIGKILL);
  Kill(first);
  EXPECT_TRUE(Eventually([&] { return Active() == third || Active() == fourth; }));
  EXPECT_EQ(record_->faults, 0);
  Kill(second);
}

TEST_F(GroupOfProcesses, FencesTheActiveOneThatIsStoppedAndKeepsItOutWhenItGoesOn) {
  const pid_t first = Start();
  ASSERT_TRUE(Eventually([&] { return Active() == first; }));
  const pid_t second = Start();
  kill(first, SIGSTOP);
  ASSERT_TRUE(Eventually([&] { return Active() == second; }));
  const uint64_t epoch = page_.ReadTerm()->epoch();
  kill(first, SIGCONT);
  EXPECT_TRUE(Eventually([&] {
    const auto view = page_.Read(SteadyNanoseconds());
    return view->members.size() == 2 && view->members[1].process_id == static_cast<uint32_t>(first) &&
           view->members[1].role == MemberRole::kStandby && !view->members[1].hung;
  })) << "it has rejoined as a standby";
  EXPECT_EQ(page_.ReadTerm()->epoch(), epoch);
  EXPECT_EQ(page_.Read(SteadyNanoseconds())->hung, 1U);
  EXPECT_EQ(record_->faults, 0);
}

TEST_F(GroupOfProcesses, StartsAnewWhenAllWereKilled) {
  for (int i = 0; i < 3; ++i) Start();
  ASSERT_TRUE(Eventually([&] { return Active() != 0; }));
  const uint64_t epoch = page_.ReadTerm()->epoch();
  while (!members_.empty()) Kill(members_.back());
  EXPECT_EQ(CountMembers(), 0U);
  const pid_t next = Start();
  EXPECT_TRUE(Eventually([&] { return Active() == next; }));
  EXPECT_GT(page_.ReadTerm()->epoch(), epoch);
}

TEST_F(GroupOfProcesses, LosesAMemberThatExecutesAnotherProgram) {
  const pid_t pid = fork();
  if (pid == 0) {
    auto member = GroupMember::Join(MapPage(fd_));
    if (!member.ok()) _exit(3);
    if (!(*member)->WaitUntilActive(std::chrono::steady_clock::now() + std::chrono::seconds(60)).ok()) _exit(4);
    execl("/bin/sleep", "sleep", "600", nullptr);
    _exit(5);
  }
  members_.push_back(pid);
  ASSERT_TRUE(Eventually([&] { return page_.ReadTerm()->seat().has_value(); }));
  EXPECT_TRUE(Eventually([&] { return CountMembers() == 0; })) << "the process goes on, as another program";
  EXPECT_EQ(waitpid(pid, nullptr, WNOHANG), 0);
}

TEST_F(GroupOfProcesses, DoesNotTakeAForkedChildForTheMember) {
  const pid_t pid = fork();
  if (pid == 0) {
    auto member = GroupMember::Join(MapPage(fd_));
    if (!member.ok()) _exit(3);
    const auto epoch = (*member)->WaitUntilActive(std::chrono::steady_clock::now() + std::chrono::seconds(60));
    if (!epoch.ok()) _exit(4);
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      const bool nobody = !(*member)->IsActive(*epoch) && !(*member)->Rejoin().ok() &&
                          !(*member)->WaitUntilActive(std::chrono::steady_clock::now()).ok();
      (*member)->StepDown();
      member->reset();
      _exit(nobody ? 0 : 1);
    }
    int status = 0;
    waitpid(grandchild, &status, 0);
    _exit(status == 0 && (*member)->IsActive(*epoch) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
}

// Where members are taken for hung that are not, too: nothing must come of it.
class HastyGroupOfProcesses : public GroupOfProcesses {
 protected:
  HastyGroupOfProcesses() : GroupOfProcesses(milliseconds(40)) {}
};

// A longer run: WEIGHTBROKER_GROUP_STEPS=1000 WEIGHTBROKER_SEED=... group_process_test.
TEST_F(HastyGroupOfProcesses, HasAtMostOneActiveMemberInEachEpochWhateverIsKilledAndStopped) {
  const char* const steps_text = getenv("WEIGHTBROKER_GROUP_STEPS");
  const int steps = steps_text != nullptr ? atoi(steps_text) : 60;
  const char* const seed_text = getenv("WEIGHTBROKER_SEED");
  const auto seed = seed_text != nullptr ? static_cast<uint32_t>(atoi(seed_text)) : std::random_device()();
  printf("WEIGHTBROKER_SEED=%u, %d steps\n", seed, steps);
  std::mt19937 random(seed);
  const auto pick = [&](size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random); };
  std::vector<pid_t> stopped;
  for (int i = 0; i < 4; ++i) Start();

  uint64_t epoch = kFirstEpoch;
  for (int step = 0; step < steps; ++step) {
    const pid_t active = Active();
    const pid_t pid = active != 0 && pick(2) == 0 ? active : members_[pick(members_.size())];
    switch (pick(3)) {
      case 0:
        std::erase(stopped, pid);
        Kill(pid);
        break;
      case 1:
        kill(pid, SIGSTOP);
        stopped.push_back(pid);
        break;
      default:
        for (const pid_t waiting : stopped) kill(waiting, SIGCONT);
        stopped.clear();
    }
    std::this_thread::sleep_for(milliseconds(pick(30)));
    while (members_.size() - stopped.size() < 3 && members_.size() < 12) Start();
    const auto term = page_.ReadTerm();
    ASSERT_THAT(term, IsOk());
    ASSERT_GE(term->epoch(), epoch);
    epoch = term->epoch();
  }
  for (const pid_t waiting : stopped) kill(waiting, SIGCONT);
  EXPECT_TRUE(Eventually([&] { return Active() != 0; })) << "there is an active member in the end";
  EXPECT_EQ(record_->faults, 0) << "an epoch with two active members, or a member with an error";
  printf("%llu epochs\n", static_cast<unsigned long long>(page_.ReadTerm()->epoch() - kFirstEpoch));
}

}  // namespace
}  // namespace weightbroker::group
