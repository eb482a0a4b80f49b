#include "server/keeper/keeper_state.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/base/wire.h"

namespace weightbroker {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// The fields of each message, in the numbers of their order. Numbers are never given away again.
enum SocketField { kPath = 1, kDevice, kInode, kLockFd, kSocketFd };
enum EntryField { kKey = 1, kValue, kEntryFd };
enum BrokerField { kNumber = 1, kPid, kPidfd, kControlFd, kIsChild, kWelcomed, kVersion };
enum LoaderField { kLoaderPid = 1, kOwner };
enum SupervisorField { kPhase = 1, kSince, kStartAt, kBackoff, kNextPing, kLastPing, kPingSent, kEverReady };
enum AttemptsField { kTakingUp = 1, kEnded, kDropped };
enum EndedField { kEndedKey = 1, kEndedCount };
enum StateField {
  kStateVersion = 1,
  kListener,
  kPrivateSocket,
  kEntry,
  kBroker,
  kLastBrokerNumber,
  kLoader,
  kSupervisor,
  kNotifySocket,
  kWatchdogInterval,
  kFdStore,
  kAttempts
};

uint64_t Unsigned(int64_t value) { return static_cast<uint64_t>(value); }
int64_t Signed(const WireReader& reader) { return static_cast<int64_t>(reader.varint()); }
int Int(const WireReader& reader) { return static_cast<int>(Signed(reader)); }

// steady_clock goes on over execve.
uint64_t FromTime(Supervisor::TimePoint time) {
  return Unsigned(std::chrono::duration_cast<nanoseconds>(time.time_since_epoch()).count());
}
Supervisor::TimePoint ToTime(const WireReader& reader) { return Supervisor::TimePoint(nanoseconds(Signed(reader))); }

std::string Serialize(const SavedSocket& socket) {
  WireWriter writer;
  writer.AddBytes(kPath, socket.path);
  writer.AddVarint(kDevice, Unsigned(socket.device));
  writer.AddVarint(kInode, Unsigned(socket.inode));
  writer.AddVarint(kLockFd, Unsigned(socket.lock_fd));
  writer.AddVarint(kSocketFd, Unsigned(socket.fd));
  return writer.bytes();
}

std::string Serialize(const SavedEntry& entry) {
  WireWriter writer;
  writer.AddBytes(kKey, entry.key);
  writer.AddBytes(kValue, entry.value);
  for (const int fd : entry.fds) writer.AddVarint(kEntryFd, Unsigned(fd));
  return writer.bytes();
}

std::string Serialize(const SavedBroker& broker) {
  WireWriter writer;
  writer.AddVarint(kNumber, Unsigned(broker.number));
  writer.AddVarint(kPid, Unsigned(broker.pid));
  writer.AddVarint(kPidfd, Unsigned(broker.pidfd));
  writer.AddVarint(kControlFd, Unsigned(broker.control_fd));
  writer.AddVarint(kIsChild, broker.is_child ? 1 : 0);
  writer.AddVarint(kWelcomed, broker.welcomed ? 1 : 0);
  writer.AddVarint(kVersion, Unsigned(broker.version));
  return writer.bytes();
}

std::string Serialize(const SavedLoader& loader) {
  WireWriter writer;
  writer.AddVarint(kLoaderPid, Unsigned(loader.pid));
  writer.AddVarint(kOwner, Unsigned(loader.owner));
  return writer.bytes();
}

std::string Serialize(const Supervisor::State& state) {
  WireWriter writer;
  writer.AddVarint(kPhase, static_cast<uint64_t>(state.phase));
  writer.AddVarint(kSince, FromTime(state.since));
  writer.AddVarint(kStartAt, FromTime(state.start_at));
  writer.AddVarint(kBackoff, Unsigned(state.backoff.count()));
  writer.AddVarint(kNextPing, FromTime(state.next_ping));
  writer.AddVarint(kLastPing, Unsigned(state.last_ping));
  if (state.ping_sent.has_value()) writer.AddVarint(kPingSent, FromTime(*state.ping_sent));
  writer.AddVarint(kEverReady, state.ever_ready ? 1 : 0);
  return writer.bytes();
}

std::string Serialize(const EntryStore::Attempts& attempts) {
  WireWriter writer;
  writer.AddBytes(kTakingUp, attempts.taking_up);
  for (const auto& [key, count] : attempts.ended) {
    WireWriter ended;
    ended.AddBytes(kEndedKey, key);
    ended.AddVarint(kEndedCount, Unsigned(count));
    writer.AddBytes(kEnded, ended.bytes());
  }
  writer.AddVarint(kDropped, Unsigned(attempts.dropped));
  return writer.bytes();
}

void ReadField(const WireReader& reader, SavedSocket* socket) {
  switch (reader.field()) {
    case kPath:
      socket->path = reader.bytes();
      break;
    case kDevice:
      socket->device = Signed(reader);
      break;
    case kInode:
      socket->inode = Signed(reader);
      break;
    case kLockFd:
      socket->lock_fd = Int(reader);
      break;
    case kSocketFd:
      socket->fd = Int(reader);
      break;
  }
}

void ReadField(const WireReader& reader, SavedEntry* entry) {
  switch (reader.field()) {
    case kKey:
      entry->key = reader.bytes();
      break;
    case kValue:
      entry->value = reader.bytes();
      break;
    case kEntryFd:
      entry->fds.push_back(Int(reader));
      break;
  }
}

void ReadField(const WireReader& reader, SavedBroker* broker) {
  switch (reader.field()) {
    case kNumber:
      broker->number = Signed(reader);
      break;
    case kPid:
      broker->pid = Signed(reader);
      break;
    case kPidfd:
      broker->pidfd = Int(reader);
      break;
    case kControlFd:
      broker->control_fd = Int(reader);
      break;
    case kIsChild:
      broker->is_child = reader.varint() != 0;
      break;
    case kWelcomed:
      broker->welcomed = reader.varint() != 0;
      break;
    case kVersion:
      broker->version = Int(reader);
      break;
  }
}

void ReadField(const WireReader& reader, SavedLoader* loader) {
  if (reader.field() == kLoaderPid) loader->pid = Signed(reader);
  if (reader.field() == kOwner) loader->owner = Signed(reader);
}

void ReadField(const WireReader& reader, Supervisor::State* state) {
  switch (reader.field()) {
    case kPhase:
      state->phase = static_cast<Supervisor::Phase>(reader.varint());
      break;
    case kSince:
      state->since = ToTime(reader);
      break;
    case kStartAt:
      state->start_at = ToTime(reader);
      break;
    case kBackoff:
      state->backoff = milliseconds(Signed(reader));
      break;
    case kNextPing:
      state->next_ping = ToTime(reader);
      break;
    case kLastPing:
      state->last_ping = Signed(reader);
      break;
    case kPingSent:
      state->ping_sent = ToTime(reader);
      break;
    case kEverReady:
      state->ever_ready = reader.varint() != 0;
      break;
  }
}

template <typename T>
bool ParseMessage(std::string_view bytes, T* out) {
  WireReader reader(bytes);
  while (reader.Next()) ReadField(reader, out);
  return reader.ok();
}

void ReadField(const WireReader& reader, std::pair<std::string, int>* ended) {
  if (reader.field() == kEndedKey) ended->first = reader.bytes();
  if (reader.field() == kEndedCount) ended->second = Int(reader);
}

bool ParseAttempts(std::string_view bytes, EntryStore::Attempts* attempts) {
  WireReader reader(bytes);
  bool ok = true;
  while (reader.Next()) {
    std::pair<std::string, int> ended;
    if (reader.field() == kTakingUp) attempts->taking_up = reader.bytes();
    if (reader.field() == kDropped) attempts->dropped = Int(reader);
    if (reader.field() != kEnded) continue;
    WireReader fields(reader.bytes());
    while (fields.Next()) ReadField(fields, &ended);
    ok = ok && fields.ok();
    attempts->ended.insert(std::move(ended));
  }
  return ok && reader.ok();
}

absl::Status Malformed(const std::string& fault) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the state of the keeper before cannot be read: ", fault),
                   {{"fault", fault}});
}

// False if the field is malformed.
bool ReadStateField(const WireReader& reader, int64_t* version, KeeperState* state) {
  switch (reader.field()) {
    case kStateVersion:
      *version = Signed(reader);
      return true;
    case kListener:
      return ParseMessage(reader.bytes(), &state->listener);
    case kPrivateSocket:
      return ParseMessage(reader.bytes(), &state->private_socket.emplace());
    case kEntry:
      return ParseMessage(reader.bytes(), &state->entries.emplace_back());
    case kBroker:
      return ParseMessage(reader.bytes(), &state->broker.emplace());
    case kLastBrokerNumber:
      state->last_broker_number = Signed(reader);
      return true;
    case kLoader:
      return ParseMessage(reader.bytes(), &state->loaders.emplace_back());
    case kSupervisor:
      return ParseMessage(reader.bytes(), &state->supervisor);
    case kNotifySocket:
      state->notify_socket = reader.bytes();
      return true;
    case kWatchdogInterval:
      state->watchdog_interval = microseconds(Signed(reader));
      return true;
    case kFdStore:
      state->fd_store = reader.bytes();
      return true;
    case kAttempts:
      return ParseAttempts(reader.bytes(), &state->attempts);
  }
  return true;  // of a later version that this one can read all the same
}

}  // namespace

std::vector<int> KeeperState::Fds() const {
  std::vector<int> fds = {listener.lock_fd, listener.fd};
  if (private_socket.has_value()) fds.insert(fds.end(), {private_socket->lock_fd, private_socket->fd});
  for (const SavedEntry& entry : entries) fds.insert(fds.end(), entry.fds.begin(), entry.fds.end());
  if (broker.has_value() && broker->pidfd >= 0) fds.push_back(broker->pidfd);
  if (broker.has_value() && broker->control_fd >= 0) fds.push_back(broker->control_fd);
  return fds;
}

std::string SerializeKeeperState(const KeeperState& state) {
  WireWriter writer;
  writer.AddVarint(kStateVersion, kKeeperStateVersion);
  writer.AddBytes(kListener, Serialize(state.listener));
  if (state.private_socket.has_value()) writer.AddBytes(kPrivateSocket, Serialize(*state.private_socket));
  for (const auto& entry : state.entries) writer.AddBytes(kEntry, Serialize(entry));
  if (state.broker.has_value()) writer.AddBytes(kBroker, Serialize(*state.broker));
  writer.AddVarint(kLastBrokerNumber, Unsigned(state.last_broker_number));
  for (const auto& loader : state.loaders) writer.AddBytes(kLoader, Serialize(loader));
  writer.AddBytes(kSupervisor, Serialize(state.supervisor));
  writer.AddBytes(kNotifySocket, state.notify_socket);
  writer.AddVarint(kWatchdogInterval, Unsigned(state.watchdog_interval.count()));
  writer.AddBytes(kFdStore, state.fd_store);
  writer.AddBytes(kAttempts, Serialize(state.attempts));
  return writer.bytes();
}

absl::StatusOr<KeeperState> ParseKeeperState(std::string_view bytes) {
  KeeperState state;
  int64_t version = 0;
  WireReader reader(bytes);
  while (reader.Next()) {
    if (!ReadStateField(reader, &version, &state)) {
      return Malformed(absl::StrCat("field ", reader.field(), " is malformed"));
    }
  }
  if (!reader.ok()) return Malformed("it ends in the middle of a field");
  if (version < 1 || version > kKeeperStateVersion) {
    return Malformed(absl::StrCat("it has version ", version, "; this keeper reads 1 to ", kKeeperStateVersion));
  }
  return state;
}

}  // namespace weightbroker
