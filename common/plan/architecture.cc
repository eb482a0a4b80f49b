#include "common/plan/architecture.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"
#include "common/plan/architecture_parser.h"
#include "common/plan/architecture_rules.h"
#include "common/plan/embedded_architectures.h"

namespace weightbroker {
namespace {

constexpr int64_t kMaxFileBytes = 1 << 20;

}  // namespace

ArchitectureSet::ArchitectureSet() = default;
ArchitectureSet::ArchitectureSet(ArchitectureSet&&) noexcept = default;
ArchitectureSet& ArchitectureSet::operator=(ArchitectureSet&&) noexcept = default;
ArchitectureSet::~ArchitectureSet() = default;

absl::Status ArchitectureSet::Add(const std::string& label, const std::string& text,
                                  std::set<std::string>& added_names) {
  ASSIGN_OR_RETURN(Architecture parsed, ParseArchitecture(label, text));
  const auto architecture = std::make_shared<const Architecture>(std::move(parsed));
  for (const std::string& name : architecture->names) {
    if (!added_names.insert(name).second) {
      const std::string other = by_name_.find(name)->second->label;
      return MakeError(Reason::kArchitectureInvalid,
                       absl::StrCat(Printable(label), ": architectures: ", Quote(name), " is also what ",
                                    Printable(other), " describes"),
                       {{"file", Printable(label)}, {"key", "architectures"}, {"other", Printable(other)}});
    }
    by_name_[name] = architecture;
  }
  return absl::OkStatus();
}

const ArchitectureSet& ArchitectureSet::Embedded() {
  static const ArchitectureSet* const embedded = [] {
    auto* const set = new ArchitectureSet();
    std::set<std::string> names;
    for (const EmbeddedFile& file : EmbeddedArchitectures()) {
      if (const absl::Status status = set->Add(file.label, file.text, names); !status.ok()) {
        std::fprintf(stderr, "an architecture file of this program is wrong: %s\n", status.ToString().c_str());
        std::abort();
      }
    }
    return set;
  }();
  return *embedded;
}

absl::StatusOr<ArchitectureSet> ArchitectureSet::WithFiles(const std::map<std::string, std::string>& texts) {
  ArchitectureSet set;
  set.by_name_ = Embedded().by_name_;
  std::set<std::string> names;
  for (const auto& [label, text] : texts) RETURN_IF_ERROR(set.Add(label, text, names));
  return set;
}

const Architecture* ArchitectureSet::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : it->second.get();
}

std::vector<std::string> ArchitectureSet::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, architecture] : by_name_) names.push_back(name);
  return names;
}

absl::StatusOr<std::map<std::string, std::string>> ReadArchitectureFolder(FileSystem& file_system,
                                                                          const std::string& folder) {
  const auto unreadable = [&](const absl::Status& status) {
    return MakeError(Reason::kArchitectureInvalid,
                     absl::StrCat("the folder of architecture files cannot be read: ", std::string(status.message())),
                     {{"folder", Printable(folder)}});
  };
  const auto names = file_system.ListFolder(folder);
  if (!names.ok()) return unreadable(names.status());
  std::map<std::string, std::string> texts;
  for (const std::string& name : *names) {
    if (!absl::EndsWith(name, ".json")) continue;
    if (ToUtf8(name) != name) return unreadable(absl::InvalidArgumentError(Quote(name) + ": its name is not UTF-8"));
    auto text = file_system.ReadSmallFile(absl::StrCat(folder, "/", name), kMaxFileBytes);
    if (!text.ok()) return unreadable(text.status());
    texts[name] = *std::move(text);
  }
  return texts;
}

}  // namespace weightbroker
