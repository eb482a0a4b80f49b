// weightbroker-hostile: attacks a service by bytes for a while, as another user if it may, and prints as JSON what came
// of it. Exit codes: 0 done, 2 usage.

#include <grp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "common/base/socket.h"
#include "tests/integration/hostile/attacks.h"

int main(int argc, char** argv) {
  using weightbroker::testing::AttackPlan;
  CLI::App app("Attacks a service of weightbroker; for tests.");
  AttackPlan plan;
  std::string name;
  int milliseconds = 5000;
  int uid = -1;
  app.add_option("--socket", plan.socket)->required();
  app.add_option("--attack", name)->required();
  app.add_option("--fingerprint", plan.fingerprint);
  app.add_option("--milliseconds", milliseconds);
  app.add_option("--seed", plan.seed);
  app.add_option("--uid", uid, "Whom to be; default: whoever starts it");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  const auto* const attack = weightbroker::testing::FindAttack(name);
  if (attack == nullptr) {
    fprintf(stderr, "there is no attack %s\n", name.c_str());
    return 2;
  }
  weightbroker::RaiseFdLimit();
  const auto id = static_cast<uid_t>(uid);
  if (uid >= 0 && (setgroups(0, nullptr) != 0 || setgid(id) != 0 || setuid(id) != 0)) {
    perror("becoming another user");
    return 2;
  }
  plan.duration = std::chrono::milliseconds(milliseconds);
  const auto report = attack->run(plan);
  const nlohmann::json json = {{"attack", name},
                               {"attempts", report.attempts},
                               {"refused", report.refused},
                               {"open", report.open},
                               {"seed", plan.seed}};
  printf("%s\n", json.dump().c_str());
  return 0;
}
