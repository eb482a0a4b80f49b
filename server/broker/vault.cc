#include "server/broker/vault.h"

namespace weightbroker {

const std::string& NotInQuarantine() {
  static const std::string* const kNothing = new std::string();
  return *kNothing;
}

namespace {

class EmptyVault : public ShardVault {
 public:
  absl::Status Keep(const ShardToKeep&) override { return absl::OkStatus(); }
  absl::Status Forget(const std::string&, int32_t) override { return absl::OkStatus(); }
  absl::Status KeepLoad(const NewWeightSet&, int32_t) override { return absl::OkStatus(); }
  absl::Status ForgetLoad(const std::string&) override { return absl::OkStatus(); }
  absl::Status KeepGeneration(const std::string&, int64_t) override { return absl::OkStatus(); }
  absl::Status ForgetGeneration(const std::string&) override { return absl::OkStatus(); }
  absl::Status KeepAlias(const KeptAlias&) override { return absl::OkStatus(); }
  absl::Status ForgetAlias(const std::string&) override { return absl::OkStatus(); }
  Adoption TakeAdoption() override { return {}; }
  bool outlives_broker() const override { return false; }
};

}  // namespace

ShardVault& NoVault() {
  static ShardVault* const vault = new EmptyVault;
  return *vault;
}

}  // namespace weightbroker
