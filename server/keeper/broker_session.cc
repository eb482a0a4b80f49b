#include "server/keeper/broker_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/error.h"
#include "common/base/log.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

using Type = KeeperMessageType;

constexpr uint16_t kOldestVersion = 1;

absl::Status Misuse(const std::string& fault) {
  return MakeError(Reason::kProtocolError, absl::StrCat("the broker misuses the keeper's protocol: ", fault),
                   {{"fault", fault}});
}

std::string Describe(const KeeperMessage& message) {
  return absl::StrCat("\"", std::string(KeeperMessageTypeName(message.type)), "\" (type ",
                      static_cast<int>(message.type), ")");
}

// Each argument with a NUL after it.
std::vector<std::string> ParseArguments(const std::string& value) {
  std::vector<std::string> arguments = absl::StrSplit(value, '\0');
  arguments.pop_back();  // what is after the last NUL
  return arguments;
}

}  // namespace

std::string WhyNotWelcome(const KeeperMessage& hello) {
  if (hello.version >= kOldestVersion) return "";
  return absl::StrCat("the broker speaks version ", hello.version, " of the keeper's protocol; this keeper speaks ",
                      kOldestVersion, " to ", kKeeperProtocolVersion, ": use a broker of the same release");
}

void BrokerSession::ResumeWelcomed(uint16_t version) {
  welcomed_ = true;
  connection_.set_version(version);
}

absl::Status BrokerSession::OnReadable(TimePoint now) {
  RETURN_IF_ERROR(connection_.Flush(now));
  while (connection_.idle()) {
    ASSIGN_OR_RETURN(std::optional<ReceivedPacket> packet, connection_.Receive());
    if (!packet.has_value()) return absl::OkStatus();
    RETURN_IF_ERROR(Handle(*std::move(packet), now));
    RETURN_IF_ERROR(connection_.Flush(now));
  }
  return absl::OkStatus();
}

void BrokerSession::HandleTheRest(TimePoint now) {
  ended_ = true;
  while (true) {
    absl::StatusOr<std::optional<ReceivedPacket>> packet = connection_.Receive();
    if (!packet.ok() || !packet->has_value() || !Handle(**std::move(packet), now).ok()) return;
  }
}

absl::Status BrokerSession::Handle(ReceivedPacket packet, TimePoint now) {
  const KeeperMessage& message = packet.message;
  if (!welcomed_) {
    if (message.type != Type::kHello) return Misuse(absl::StrCat(Describe(message), " came before \"hello\""));
    return Welcome(message);
  }
  if (context_.entries->has_partial() && message.type != Type::kPut && message.type != Type::kPong) {
    return Misuse(absl::StrCat(Describe(message), " came between two parts of an entry"));
  }
  switch (message.type) {
    case Type::kTakingUp:
      context_.entries->TakingUp(message.key);
      return absl::OkStatus();
    case Type::kReady:
      context_.entries->OnBrokerReady();
      context_.supervisor->OnReady(now);
      return absl::OkStatus();
    case Type::kPut:
      return Put(std::move(packet));
    case Type::kDrop:
      Drop(message);
      return absl::OkStatus();
    case Type::kSpawnLoader:
      SpawnLoader(packet);
      return absl::OkStatus();
    case Type::kDetachLoader:
      DetachLoader(message);
      return absl::OkStatus();
    case Type::kPong:
      context_.supervisor->OnPong(message.request_id);
      return absl::OkStatus();
    case Type::kHello:
    case Type::kWelcome:
    case Type::kEntry:
    case Type::kEndOfEntries:
    case Type::kAck:
    case Type::kNack:
    case Type::kSpawned:
    case Type::kExited:
    case Type::kPing:
      return Misuse(absl::StrCat(Describe(message), " is not the broker's to send now"));
  }
  Nack(message.request_id, absl::StrCat("this keeper does not know messages of type ", static_cast<int>(message.type)));
  return absl::OkStatus();
}

absl::Status BrokerSession::Welcome(const KeeperMessage& hello) {
  if (const std::string why = WhyNotWelcome(hello); !why.empty()) {
    Nack(hello.request_id, why);
    // Best effort: the connection ends here whether or not the broker reads why.
    connection_.Flush(TimePoint::max()).IgnoreError();
    Log(LogLevel::kError, "broker.refused", {{"broker", absl::StrCat(number_)}, {"cause", why}});
    return MakeError(Reason::kKeeperRefused, why);
  }
  welcomed_ = true;
  connection_.set_version(std::min(hello.version, kKeeperProtocolVersion));
  const std::vector<SharedEntry> entries = context_.entries->entries();
  connection_.Send(
      {.type = Type::kWelcome, .number = static_cast<int64_t>(entries.size()), .status = context_.entries->dropped()},
      {}, context_.listening_fd);
  for (const SharedEntry& entry : entries) connection_.SendEntry(entry);
  connection_.Send({.type = Type::kEndOfEntries});
  Log(LogLevel::kInfo, "broker.welcomed",
      {{"broker", absl::StrCat(number_)},
       {"version", absl::StrCat(connection_.version())},
       {"entries", absl::StrCat(entries.size())},
       {"fds", absl::StrCat(context_.entries->fd_count())}});
  return absl::OkStatus();
}

absl::Status BrokerSession::Put(ReceivedPacket packet) {
  ASSIGN_OR_RETURN(const PutResult result, context_.entries->AddPart(packet.message, std::move(packet.fds)));
  const std::string& key = packet.message.key;
  switch (result.state) {
    case PutState::kPartial:
      break;
    case PutState::kStored:
      context_.fd_store->OnStored(result.stored, result.replaced);
      Log(LogLevel::kInfo, "entry.stored",
          {{"key", key},
           {"fds", absl::StrCat(result.stored->fds.size())},
           {"value_bytes", absl::StrCat(result.stored->value.size())},
           {"replaced", result.replaced != nullptr ? "true" : "false"}});
      Ack(packet.message.request_id);
      break;
    case PutState::kRefused:
      Log(LogLevel::kWarning, "entry.refused", {{"key", key}, {"cause", result.refusal}});
      Nack(packet.message.request_id, result.refusal);
      break;
  }
  return absl::OkStatus();
}

void BrokerSession::Drop(const KeeperMessage& message) {
  const SharedEntry dropped = context_.entries->Drop(message.key);
  context_.fd_store->OnDropped(dropped);
  if (dropped != nullptr) Log(LogLevel::kInfo, "entry.dropped", {{"key", message.key}});
  Ack(message.request_id);
}

void BrokerSession::SpawnLoader(const ReceivedPacket& packet) {
  if (ended_) return;
  const int64_t request_id = packet.message.request_id;
  const std::string& value = packet.message.value;
  if (packet.fds.size() != 1 || (!value.empty() && value.back() != '\0')) {
    Nack(request_id, "a loader is started with one descriptor, and each argument has a NUL after it");
    return;
  }
  absl::StatusOr<StartedLoader> loader = context_.loaders->Spawn(number_, ParseArguments(value), packet.fds[0].get());
  if (!loader.ok()) {
    const std::string cause(loader.status().message());
    Log(LogLevel::kError, "loader.not_started", {{"cause", cause}});
    Nack(request_id, cause);
    return;
  }
  Log(LogLevel::kInfo, "loader.started", {{"loader_pid", absl::StrCat(loader->pid)}});
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(loader->control_socket));
  fds.push_back(std::move(loader->pidfd));
  connection_.Send({.type = Type::kSpawned, .request_id = request_id, .number = loader->pid}, std::move(fds));
}

void BrokerSession::DetachLoader(const KeeperMessage& message) {
  const auto pid = static_cast<pid_t>(message.number);
  if (!context_.loaders->Detach(number_, pid)) {
    Nack(message.request_id, absl::StrCat("process ", pid, " is no loader of this broker: it may have ended"));
    return;
  }
  Log(LogLevel::kInfo, "loader.detached", {{"loader_pid", absl::StrCat(pid)}});
  Ack(message.request_id);
}

void BrokerSession::Ack(int64_t request_id) { connection_.Send({.type = Type::kAck, .request_id = request_id}); }

void BrokerSession::Nack(int64_t request_id, const std::string& message) {
  connection_.Send(
      {.type = Type::kNack, .request_id = request_id, .value = std::string(CutUtf8(message, kMaxKeeperValueBytes))});
}

void BrokerSession::SendPing(int64_t number) { connection_.Send({.type = Type::kPing, .request_id = number}); }

void BrokerSession::SendExited(pid_t pid, int wait_status) {
  connection_.Send({.type = Type::kExited, .number = pid, .status = wait_status});
}

}  // namespace weightbroker
