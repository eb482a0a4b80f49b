// What keeper and broker say to each other: packets over a SOCK_SEQPACKET Unix socket, version 1.
//
// The keeper is a store of named entries, each a short value and some file descriptors, and a supervisor of processes.
// It does not know what an entry means: the broker writes down what the next broker must know (a resident shard: its
// slabs, manifest and record; a load under way: its request; a generation: its number), and reads all of it back when
// it starts.
//
//   broker                                     keeper
//   kHello {version} ------------------------>
//          <------------------- kWelcome {version, entry count, dropped} + the listening socket
//          <------------------- kEntry {key, value} + fds             once for each part of each entry
//          <------------------- kEndOfEntries
//   kTakingUp {key} ------------------------->                         about to make sense of an entry; empty: of none
//   kReady ---------------------------------->                         it serves; back-off starts anew
//   kPut {key, value, part, parts} + fds ---->                         replaces the entry when the last part is there
//          <------------------- kAck {request_id}                      or kNack with a message; one for all its parts
//   kDrop {key} ----------------------------->  kAck                   also if there is no such entry
//   kSpawnLoader {value: extra arguments} + request memfd --->
//          <------------------- kSpawned {pid} + control socket, pidfd  or kNack
//   kDetachLoader {pid} --------------------->  kAck                   it is not killed when this broker ends
//          <------------------- kExited {pid, wait status}             whenever a spawned process has ended
//          <------------------- kPing;  kPong ------------------------>  one that is late is killed and replaced
//
// The parts of one kPut follow each other with nothing but kPong between them. Until the last of them is there the old
// entry stands, and if the broker goes before that, the parts are forgotten.
//
// An entry that several brokers in a row were taking up when they ended is dropped: the next would most likely end over
// it, too. kWelcome says how many have been dropped so since a broker was last ready.
//
// Versions: each side sends the highest it knows, and both then speak the lower one; a side that cannot closes with
// kNack. Types and fields are only ever added. All integers are little-endian. The header is fixed; keys are printable
// ASCII. What is malformed ends the connection, never the keeper.
//
// Encoding and decoding are pure functions and thread-safe. libc and absl::Status only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace weightbroker {

inline constexpr uint16_t kKeeperProtocolVersion = 1;
inline constexpr size_t kKeeperHeaderBytes = 44;
inline constexpr size_t kMaxKeeperKeyBytes = 200;
inline constexpr size_t kMaxKeeperValueBytes =
    32 * 1024;                                      // of one packet; an entry's value is that of its parts joined
inline constexpr int kMaxKeeperFdsPerPacket = 250;  // under the kernel's 253

// X(enumerator, name in logs and in the hooks of tests, number on the wire)
#define WEIGHTBROKER_KEEPER_MESSAGES(X) \
  X(kHello, "hello", 1)                 \
  X(kWelcome, "welcome", 2)             \
  X(kEntry, "entry", 3)                 \
  X(kEndOfEntries, "end_of_entries", 4) \
  X(kReady, "ready", 5)                 \
  X(kPut, "put", 6)                     \
  X(kDrop, "drop", 7)                   \
  X(kAck, "ack", 8)                     \
  X(kNack, "nack", 9)                   \
  X(kSpawnLoader, "spawn_loader", 10)   \
  X(kSpawned, "spawned", 11)            \
  X(kExited, "exited", 12)              \
  X(kPing, "ping", 13)                  \
  X(kPong, "pong", 14)                  \
  X(kTakingUp, "taking_up", 15)         \
  X(kDetachLoader, "detach_loader", 16)

enum class KeeperMessageType : uint16_t {
#define WEIGHTBROKER_KEEPER_MESSAGE_ENUMERATOR(enumerator, name, number) enumerator = number,
  WEIGHTBROKER_KEEPER_MESSAGES(WEIGHTBROKER_KEEPER_MESSAGE_ENUMERATOR)
#undef WEIGHTBROKER_KEEPER_MESSAGE_ENUMERATOR
};

// Its name in the table; "unknown" for one that this version does not have.
std::string_view KeeperMessageTypeName(KeeperMessageType type);

struct KeeperMessage {
  KeeperMessageType type = KeeperMessageType::kHello;
  uint16_t version = kKeeperProtocolVersion;
  int64_t request_id = 0;  // chosen by the asking side, repeated in the answer
  int64_t number = 0;      // kWelcome: entry count; kSpawned, kDetachLoader, kExited: process id
  int32_t part = 0;        // kPut, kEntry: which part of the entry this packet is, from 0
  int32_t parts = 1;       // kPut, kEntry: how many there are
  int32_t status = 0;      // kExited: as waitpid gives it; kWelcome: how many entries brokers had died of
  std::string key = {};
  std::string value = {};  // kNack: the message for people; kSpawnLoader: each argument with a NUL after it
};

// INVALID_ARGUMENT for a key or value over its limit, a key that is not printable ASCII, a part that is not of its
// parts.
absl::StatusOr<std::string> EncodeKeeperMessage(const KeeperMessage& message);

// PROTOCOL_ERROR, saying what is wrong, for anything that EncodeKeeperMessage does not make. An unknown type decodes
// (the receiver answers kNack), and so does a packet of a higher version with more behind its value, so that a newer
// peer can be told so.
absl::StatusOr<KeeperMessage> DecodeKeeperMessage(std::string_view packet);

}  // namespace weightbroker
