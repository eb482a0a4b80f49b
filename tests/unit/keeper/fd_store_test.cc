// FdStore and ServiceManager against a service manager made of a map, with the rules of systemd's descriptor store.
#include "server/keeper/fd_store.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdlib>

#include "tests/support/status_matchers.h"
#include "tests/unit/keeper/fake_service_manager.h"
#include "tests/unit/keeper/fds.h"

namespace weightbroker {
namespace {

using testing::ContentsOf;
using ::testing::ElementsAre;
using testing::FakeServiceManager;
using testing::MakeMemfd;
using ::testing::SizeIs;

class FdStoreTest : public ::testing::Test {
 protected:
  SharedEntry MakeEntry(const std::string& key, const std::string& value, std::vector<UniqueFd> fds) {
    return std::make_shared<const StoredEntry>(StoredEntry{key, value, std::move(fds)});
  }
  static UniqueFd Duplicate(const UniqueFd& fd) { return UniqueFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)); }

  // What a keeper that is started anew would find.
  std::vector<AdoptedEntry> AdoptAnew() {
    FdStore next(&manager_);
    std::vector<NamedFd> inherited = systemd_.HandOver();
    return next.Adopt(&inherited);
  }

  FakeServiceManager systemd_;
  ServiceManager manager_{systemd_.path(), std::chrono::microseconds(0)};
  FdStore store_{&manager_};
};

std::vector<UniqueFd> One(UniqueFd fd) {
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(fd));
  return fds;
}

TEST_F(FdStoreTest, GivesTheNextKeeperEveryEntryWithItsDescriptorsInOrder) {
  std::vector<UniqueFd> fds;
  for (int i = 0; i < 12; ++i) fds.push_back(MakeMemfd("slab " + std::to_string(i)));
  const SharedEntry a = MakeEntry("a", std::string("v\0w", 3), std::move(fds));
  const SharedEntry b = MakeEntry("b", "", {});
  store_.OnStored(a, nullptr);
  store_.OnStored(b, nullptr);
  const std::vector<AdoptedEntry> adopted = AdoptAnew();
  ASSERT_THAT(adopted, SizeIs(2));
  EXPECT_EQ(adopted[0].entry.key, "a");
  EXPECT_EQ(adopted[0].entry.value, std::string("v\0w", 3));
  ASSERT_THAT(adopted[0].entry.fds, SizeIs(12));
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(ContentsOf(adopted[0].entry.fds[i].get()), "slab " + std::to_string(i));
  }
  EXPECT_EQ(adopted[1].entry.key, "b");
}

TEST_F(FdStoreTest, KeepsADescriptorThatTheNewEntrySharesWithTheOldOne) {
  const UniqueFd slab = MakeMemfd("slab");
  const SharedEntry old_entry = MakeEntry("a", "old", One(Duplicate(slab)));
  store_.OnStored(old_entry, nullptr);
  const SharedEntry new_entry = MakeEntry("a", "new", One(Duplicate(slab)));
  store_.OnStored(new_entry, old_entry);
  const std::vector<AdoptedEntry> adopted = AdoptAnew();
  ASSERT_THAT(adopted, SizeIs(1));
  EXPECT_EQ(adopted[0].entry.value, "new");
  EXPECT_EQ(ContentsOf(adopted[0].entry.fds[0].get()), "slab");
}

TEST_F(FdStoreTest, LeavesNothingButTheIndexWhenAllIsDropped) {
  const SharedEntry a = MakeEntry("a", "", One(MakeMemfd("one")));
  const SharedEntry b = MakeEntry("b", "", One(MakeMemfd("two")));
  store_.OnStored(a, nullptr);
  store_.OnStored(b, nullptr);
  store_.OnDropped(a);
  EXPECT_THAT(AdoptAnew(), SizeIs(1));
  store_.OnDropped(b);
  EXPECT_THAT(systemd_.HandOver(), SizeIs(1));
  EXPECT_THAT(AdoptAnew(), SizeIs(0));
}

TEST_F(FdStoreTest, GoesOnAfterAdoptionWithoutStoringAnythingTwice) {
  const SharedEntry a = MakeEntry("a", "", One(MakeMemfd("one")));
  store_.OnStored(a, nullptr);

  FdStore next(&manager_);
  std::vector<NamedFd> inherited = systemd_.HandOver();
  std::vector<AdoptedEntry> adopted = next.Adopt(&inherited);
  ASSERT_THAT(adopted, SizeIs(1));
  const auto again = std::make_shared<const StoredEntry>(std::move(adopted[0].entry));
  next.Register(again, adopted[0].names);
  next.RemoveStrangers();
  EXPECT_THAT(systemd_.HandOver(), SizeIs(2));  // the descriptor and one index
  next.OnDropped(again);
  EXPECT_THAT(systemd_.HandOver(), SizeIs(1));
}

TEST_F(FdStoreTest, GoesOnAfterExecveWithoutStoringAnythingTwice) {
  const SharedEntry a = MakeEntry("a", "", One(MakeMemfd("one")));
  store_.OnStored(a, nullptr);
  FdStore next(&manager_);
  next.Resume(store_.Serialize(), {a});
  const SharedEntry b = MakeEntry("b", "", One(MakeMemfd("two")));
  next.OnStored(b, nullptr);
  next.OnDropped(a);
  const std::vector<AdoptedEntry> adopted = AdoptAnew();
  ASSERT_THAT(adopted, SizeIs(1));
  EXPECT_EQ(ContentsOf(adopted[0].entry.fds[0].get()), "two");
  EXPECT_THAT(systemd_.HandOver(), SizeIs(2));
}

TEST_F(FdStoreTest, DropsAnEntryOfWhichADescriptorIsMissingAndKeepsTheOthers) {
  const SharedEntry a = MakeEntry("a", "", One(MakeMemfd("one")));
  const SharedEntry b = MakeEntry("b", "", One(MakeMemfd("two")));
  store_.OnStored(a, nullptr);
  store_.OnStored(b, nullptr);
  manager_.RemoveFd("wb-fd-1");
  const std::vector<AdoptedEntry> adopted = AdoptAnew();
  ASSERT_THAT(adopted, SizeIs(1));
  EXPECT_EQ(adopted[0].entry.key, "b");
}

TEST_F(FdStoreTest, UsesTheIndexBeforeWhenTheNewestCannotBeRead) {
  store_.OnStored(MakeEntry("a", "value", {}), nullptr);
  manager_.StoreFd("wb-index-99", MakeMemfd("not an index").get());
  const std::vector<AdoptedEntry> adopted = AdoptAnew();
  ASSERT_THAT(adopted, SizeIs(1));
  EXPECT_EQ(adopted[0].entry.value, "value");
}

TEST_F(FdStoreTest, RemovesWhatNoIndexNamesButNotWhatIsSomebodyElses) {
  manager_.StoreFd("wb-fd-7", MakeMemfd("left over").get());
  manager_.StoreFd("wb-listen", MakeMemfd("a socket").get());
  std::vector<NamedFd> inherited = systemd_.HandOver();
  EXPECT_TRUE(store_.Adopt(&inherited).empty());
  ASSERT_THAT(inherited, SizeIs(1));
  EXPECT_EQ(inherited[0].name, "wb-listen");
  store_.RemoveStrangers();
  EXPECT_THAT(systemd_.Names(), ElementsAre("wb-index-1", "wb-listen"));
}

TEST(FdStoreWithoutServiceManager, DoesNothing) {
  const ServiceManager nobody("", std::chrono::microseconds(0));
  FdStore store(&nobody);
  const auto entry = std::make_shared<const StoredEntry>(StoredEntry{"a", "", {}});
  store.OnStored(entry, nullptr);
  store.OnDropped(entry);
  store.RemoveStrangers();
}

TEST(ServiceManager, TakesItsVariablesOutOfTheEnvironmentOfItsChildren) {
  setenv("NOTIFY_SOCKET", "@somewhere", 1);
  setenv("WATCHDOG_USEC", "3000000", 1);
  setenv("WATCHDOG_PID", std::to_string(getpid()).c_str(), 1);
  const ServiceManager manager = ServiceManager::FromEnvironment();
  EXPECT_TRUE(manager.present());
  EXPECT_EQ(manager.notify_socket(), "@somewhere");
  EXPECT_EQ(manager.watchdog_interval(), std::chrono::microseconds(1'500'000));
  EXPECT_EQ(getenv("NOTIFY_SOCKET"), nullptr);
  EXPECT_EQ(getenv("WATCHDOG_USEC"), nullptr);
}

TEST(ServiceManager, LeavesAWatchdogThatIsNotForThisProcessAlone) {
  setenv("WATCHDOG_USEC", "3000000", 1);
  setenv("WATCHDOG_PID", "1", 1);
  EXPECT_EQ(ServiceManager::FromEnvironment().watchdog_interval().count(), 0);
}

TEST(ServiceManager, TakesNoDescriptorsThatWereMeantForAnotherProcess) {
  setenv("LISTEN_PID", "1", 1);
  setenv("LISTEN_FDS", "3", 1);
  EXPECT_TRUE(ServiceManager::TakeInheritedFds().empty());
  EXPECT_EQ(getenv("LISTEN_FDS"), nullptr);
}

}  // namespace
}  // namespace weightbroker
