// Which weights of an architecture are split how: data, one small JSON file for each architecture, embedded at build
// from common/plan/architectures/ and extendable by a folder. The format is in docs/architectures.md.
//
//   ASSIGN_OR_RETURN(const ArchitectureSet architectures, ArchitectureSet::WithFiles(texts));   // ARCHITECTURE_INVALID
//   const Architecture* architecture = architectures.Find("Qwen3ForCausalLM");                  // null: none
//
// Thread-safe once built.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file.h"

namespace weightbroker {

struct Architecture;

class ArchitectureSet {
 public:
  // Those that are embedded.
  static const ArchitectureSet& Embedded();

  // Those, and `texts`: label ("falcon.json") to contents. One that names an architecture that is embedded takes its
  // place. ARCHITECTURE_INVALID naming label, key, found and allowed, also for two that name the same one.
  static absl::StatusOr<ArchitectureSet> WithFiles(const std::map<std::string, std::string>& texts);

  ArchitectureSet(ArchitectureSet&&) noexcept;
  ArchitectureSet& operator=(ArchitectureSet&&) noexcept;
  ~ArchitectureSet();

  // By the name that a config lists in "architectures". Null if there is none.
  const Architecture* Find(std::string_view name) const;

  // The names that Find knows, sorted.
  std::vector<std::string> Names() const;

 private:
  ArchitectureSet();
  // `added_names` are those of the files added before, of which none may be named again.
  absl::Status Add(const std::string& label, const std::string& text, std::set<std::string>& added_names);

  std::map<std::string, std::shared_ptr<const Architecture>, std::less<>> by_name_;
};

// The *.json files of `folder`, by name: what WithFiles takes. ARCHITECTURE_INVALID if it cannot be read, or if one is
// over 1 MiB.
absl::StatusOr<std::map<std::string, std::string>> ReadArchitectureFolder(FileSystem& file_system,
                                                                          const std::string& folder);

}  // namespace weightbroker
