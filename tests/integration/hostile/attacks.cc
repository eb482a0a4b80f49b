#include "tests/integration/hostile/attacks.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/integration/hostile/raw_client.h"
#include "tests/unit/endpoint/ticket_request.h"
#include "weightbroker/v1/weight_broker_admin_service.pb.h"
#include "weightbroker/v1/weight_broker_service.pb.h"

namespace weightbroker::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr char kService[] = "/weightbroker.v1.WeightBrokerService/";
constexpr char kAdmin[] = "/weightbroker.v1.WeightBrokerAdminService/";
constexpr size_t kTicketBytes = 32;
constexpr size_t kFrameHeaderBytes = 9;  // RFC 9113, section 4.1; of fewer the service waits for the rest
constexpr milliseconds kAnswerTime(3000);
constexpr milliseconds kGlance(100);
constexpr milliseconds kBreath(
    1);  // between attempts, so that it is the service that is attacked and not the scheduler

class Until {
 public:
  explicit Until(const AttackPlan& plan) : end_(Clock::now() + plan.duration) {}
  bool over() const { return Clock::now() >= end_; }
  milliseconds left() const {
    return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(end_ - Clock::now()));
  }

 private:
  const Clock::time_point end_;
};

std::string RandomBytes(std::mt19937& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Counts which connections the service closes, until it has closed all or the time is over.
void HoldOpen(std::vector<UniqueFd> connections, const Until& until, AttackReport* report) {
  const auto is_closed = [](const UniqueFd& connection) { return IsClosedWithin(connection.get(), milliseconds(0)); };
  while (true) {
    report->refused += static_cast<int64_t>(std::erase_if(connections, is_closed));
    if (connections.empty() || until.over()) break;
    std::this_thread::sleep_for(std::min(until.left(), kGlance));
  }
  report->open += static_cast<int64_t>(connections.size());
}

// Connections that say `words()` and nothing more.
AttackReport Hold(const AttackPlan& plan, int count, const std::function<std::string()>& words,
                  bool half_close = false) {
  const Until until(plan);
  AttackReport report;
  std::vector<UniqueFd> connections;
  for (int i = 0; i < count && !until.over(); ++i) {
    UniqueFd connection = ConnectTo(plan.socket);
    ++report.attempts;
    if (!connection.valid()) {
      ++report.refused;
      continue;
    }
    SendAll(connection.get(), words());
    if (half_close) shutdown(connection.get(), SHUT_WR);
    connections.push_back(std::move(connection));
  }
  HoldOpen(std::move(connections), until, &report);
  return report;
}

AttackReport Silent(const AttackPlan& plan) {
  return Hold(plan, 200, [] { return std::string(); });
}

AttackReport HalfClosed(const AttackPlan& plan) {
  return Hold(
      plan, 200, [] { return Http2Preface().substr(0, 20); }, true);
}

AttackReport ManyConnections(const AttackPlan& plan) { return Hold(plan, 1000, Http2Preface); }

AttackReport Garbage(const AttackPlan& plan) {
  std::mt19937 random(plan.seed);
  return Hold(plan, 200, [&] {
    const std::string words = RandomBytes(random, kFrameHeaderBytes + random() % 4096);
    return random() % 2 == 0 ? words : Http2Preface() + words;
  });
}

AttackReport ConnectAndClose(const AttackPlan& plan) {
  const Until until(plan);
  AttackReport report;
  constexpr int kConnections = 10'000;
  for (int i = 0; i < kConnections && !until.over(); ++i) {
    if (!ConnectTo(plan.socket).valid()) ++report.refused;
    ++report.attempts;
    if (i % 10 == 9) std::this_thread::sleep_for(kBreath);
  }
  return report;
}

std::string ExportOf(const std::string& fingerprint) {
  v1::ExportRequest request;
  request.set_fingerprint(fingerprint);
  request.set_hold(true);
  return request.SerializeAsString();
}

// Asks for a manifest and does not read it.
AttackReport SlowReader(const AttackPlan& plan) {
  const Until until(plan);
  AttackReport report;
  std::vector<UniqueFd> connections;
  for (int i = 0; i < 20; ++i) {
    UniqueFd connection = ConnectTo(plan.socket);
    ++report.attempts;
    SendAll(connection.get(),
            Http2Preface() + RawCall(1, std::string(kService) + "Export", ExportOf(plan.fingerprint)));
    connections.push_back(std::move(connection));
  }
  HoldOpen(std::move(connections), until, &report);
  return report;
}

// Calls one after the other on one connection, each answered before the next, which is given up now and then: nothing
// is said of flow control here.
template <typename MakeCall>
AttackReport CallAgainAndAgain(const AttackPlan& plan, MakeCall make_call) {
  const Until until(plan);
  AttackReport report;
  while (!until.over()) {
    const UniqueFd connection = ConnectTo(plan.socket);
    SendAll(connection.get(), Http2Preface());
    for (uint32_t stream = 1; stream < 200 && !until.over(); stream += 2) {
      ++report.attempts;
      if (!SendAll(connection.get(), make_call(stream))) break;
      const std::string answer = ReadSome(connection.get(), 1, kAnswerTime);
      if (answer.empty()) break;
      ++report.refused;
    }
  }
  return report;
}

AttackReport EndlessRegister(const AttackPlan& plan) {
  std::mt19937 random(plan.seed);
  return CallAgainAndAgain(plan, [&](uint32_t stream) {
    v1::RegisterRequest request;
    request.mutable_spec()->set_model("models:nothing-" + std::to_string(random()));
    request.mutable_environment()->set_torch_version("any");
    return RawCall(stream, std::string(kService) + "Register", request.SerializeAsString());
  });
}

AttackReport PathEscapes(const AttackPlan& plan) {
  constexpr const char* kPaths[] = {"models:../../etc",
                                    "/etc",
                                    "models:m/../../../proc/self",
                                    "models:/etc/passwd",
                                    "models:link-out",
                                    "models:m/./../..",
                                    "..:..",
                                    "models:\x01\x02"};
  size_t next = 0;
  return CallAgainAndAgain(plan, [&](uint32_t stream) {
    v1::FingerprintRequest request;
    request.mutable_spec()->set_model(kPaths[next++ % std::size(kPaths)]);
    request.mutable_environment()->set_torch_version("any");
    return RawCall(stream, std::string(kService) + "Fingerprint", request.SerializeAsString());
  });
}

// To be started as a user who may not administer.
AttackReport ForbiddenUser(const AttackPlan& plan) {
  return CallAgainAndAgain(plan, [&](uint32_t stream) {
    v1::UnregisterRequest request;
    request.set_fingerprint(plan.fingerprint);
    request.set_force(true);
    return RawCall(stream, std::string(kAdmin) + "Unregister", request.SerializeAsString());
  });
}

AttackReport OverlongMessages(const AttackPlan& plan) {
  return CallAgainAndAgain(plan, [&](uint32_t stream) {
    return RawCall(stream, std::string(kService) + "Health", std::string(1024, 'x'), int64_t{1} << 31);
  });
}

AttackReport OverlongMetadata(const AttackPlan& plan) {
  return CallAgainAndAgain(
      plan, [&](uint32_t stream) { return RawCall(stream, std::string(kService) + "Health", "", -1, 60'000); });
}

AttackReport ForgedTickets(const AttackPlan& plan) {
  const Until until(plan);
  std::mt19937 random(plan.seed);
  AttackReport report;
  while (!until.over()) {
    const UniqueFd connection = ConnectTo(plan.socket);
    ++report.attempts;
    SendAll(connection.get(), TicketRequest(RandomBytes(random, kTicketBytes)));
    ++(IsClosedWithin(connection.get(), kAnswerTime) ? report.refused : report.open);
    std::this_thread::sleep_for(kBreath);
  }
  return report;
}

constexpr Attack kAttacks[] = {
    {"silent", "200 connections that say nothing", Silent},
    {"half_closed", "200 connections that say half of a preface and close one way", HalfClosed},
    {"garbage", "200 connections that say random bytes, some behind a right preface", Garbage},
    {"connections", "1,000 connections that say what HTTP/2 clients say and make no call", ManyConnections},
    {"connect_close", "10,000 connections that are closed at once", ConnectAndClose},
    {"slow_reader", "20 Exports whose manifests are not read", SlowReader},
    {"endless_register", "Registers of models that are not there, one after the other", EndlessRegister},
    {"path_escapes", "Fingerprints of what lies outside the model roots", PathEscapes},
    {"forbidden_user", "Unregisters of a user who may not", ForbiddenUser},
    {"overlong_messages", "requests that are said to have 2 GiB", OverlongMessages},
    {"overlong_metadata", "calls with 60 kB of metadata", OverlongMetadata},
    {"forged_tickets", "tickets of random bytes", ForgedTickets},
};

}  // namespace

std::span<const Attack> Attacks() { return kAttacks; }

const Attack* FindAttack(const std::string& name) {
  for (const Attack& attack : kAttacks) {
    if (name == attack.name) return &attack;
  }
  return nullptr;
}

}  // namespace weightbroker::testing
