#include "common/desired/desired_state.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/alias_name.h"
#include "common/base/error.h"
#include "common/base/json.h"
#include "common/base/near_names.h"
#include "common/base/quote.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxFileBytes = 1 << 20;
constexpr size_t kMaxSets = 1024;
constexpr size_t kMaxAliases = 1024;
constexpr size_t kMaxNameBytes = 64;
constexpr size_t kMaxTextBytes = 4096;
constexpr size_t kMaxListLength = 4096;
constexpr int32_t kMaxNumber = 1 << 20;
constexpr char kNameCharacters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";

// What the values of a key may be.
struct TextField {
  std::string DesiredSet::*member;
  const char* words;  // comma-separated; empty for any text
};
struct NumberField {
  int32_t DesiredSet::*member;
};
struct TextsField {
  std::vector<std::string> DesiredSet::*member;
  const char* words;
};
struct DevicesField {
  std::vector<std::string> DesiredSet::*member;
};
struct NumbersField {
  std::vector<int32_t> DesiredSet::*member;
};

struct Field {
  const char* key;
  bool required;
  std::variant<TextField, NumberField, TextsField, NumbersField, DevicesField> kind;
};

// Every key of a set. docs/desired-state.md and the schema have the same.
constexpr Field kFields[] = {
    {"name", true, TextField{&DesiredSet::name, ""}},
    {"model", true, TextField{&DesiredSet::model, ""}},
    {"torch_version", true, TextField{&DesiredSet::torch_version, ""}},
    {"tensor_parallel_size", false, NumberField{&DesiredSet::tensor_parallel_size}},
    {"pipeline_parallel_size", false, NumberField{&DesiredSet::pipeline_parallel_size}},
    {"expert_parallel_size", false, NumberField{&DesiredSet::expert_parallel_size}},
    {"data_parallel_size", false, NumberField{&DesiredSet::data_parallel_size}},
    {"quantization", false, TextField{&DesiredSet::quantization, "auto,none,fp8,fp8_block"}},
    {"unquantized_modules", false, TextsField{&DesiredSet::unquantized_modules, ""}},
    {"dtype", false, TextField{&DesiredSet::dtype, "auto,BF16,F16,F32"}},
    {"layout", false, TextField{&DesiredSet::layout, "hf,fused"}},
    {"mtp_layers", false, TextField{&DesiredSet::mtp_layers, "keep,drop"}},
    {"ranks", false, NumbersField{&DesiredSet::ranks}},
    {"devices", false, DevicesField{&DesiredSet::devices}},
    {"handle_kinds", false, TextsField{&DesiredSet::handle_kinds, "HOST_MEMFD,CUDA_VMM_FD,CUDA_IPC"}},
};

// One place in the file, for what is to be said of it.
class Place {
 public:
  explicit Place(const std::string& file) : file_(file) {}

  Place At(const std::string& key) const {
    return Place(file_, absl::StrCat(pointer_, "/", absl::StrReplaceAll(key, {{"~", "~0"}, {"/", "~1"}})));
  }
  Place At(size_t index) const { return Place(file_, absl::StrCat(pointer_, "/", index)); }

  absl::Status Error(const std::string& what, const std::string& found, const std::string& allowed) const {
    return DesiredStateError(file_, pointer_, what, found, allowed);
  }
  absl::Status WrongType(const Json& value, const std::string& allowed) const {
    return Error(absl::StrCat("must be ", allowed, ", and is ", value.type_name()), value.type_name(), allowed);
  }

 private:
  Place(const std::string& file, std::string pointer) : file_(file), pointer_(std::move(pointer)) {}

  const std::string& file_;
  std::string pointer_;
};

std::vector<std::string> Keys() {
  std::vector<std::string> keys;
  for (const Field& field : kFields) keys.emplace_back(field.key);
  return keys;
}

absl::Status CheckKeys(const Json& object, const std::vector<std::string>& known, const Place& place) {
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::string nearest = absl::StrJoin(NearNames(key, known, 1), "");
    return place.At(key).Error(absl::StrCat("there is no such key; the nearest is \"", nearest, "\""), Printable(key),
                               absl::StrJoin(known, ", "));
  }
  return absl::OkStatus();
}

absl::Status CheckThere(const Json& object, const char* key, const Place& place) {
  if (object.contains(key)) return absl::OkStatus();
  return place.Error(absl::StrCat("has no key \"", key, "\", which is required"), "nothing", key);
}

absl::StatusOr<std::string> ReadText(const Json& value, const std::string& words, const Place& place) {
  if (!value.is_string()) return place.WrongType(value, "a string");
  std::string text = value.get<std::string>();
  const std::vector<std::string> allowed = absl::StrSplit(words, ',', absl::SkipEmpty());
  if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
    const std::string list = absl::StrJoin(allowed, ", ");
    return place.Error(absl::StrCat(Quote(text), " is not one of: ", list), Printable(text), list);
  }
  if (text.empty()) return place.Error("is empty: leave the key out where there is nothing to say", "", "a text");
  if (text.size() > kMaxTextBytes) {
    return place.Error(absl::StrCat("is ", text.size(), " bytes long, and ", kMaxTextBytes, " are allowed"),
                       absl::StrCat(text.size()), absl::StrCat(kMaxTextBytes));
  }
  return text;
}

// As the GPUs' driver and nvidia-smi -L spell it: what is spelled otherwise is no device of any service.
bool IsGpuUuid(const std::string& text) {
  constexpr std::string_view kForm = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  constexpr std::string_view kDigits = "0123456789abcdef";
  return std::equal(text.begin(), text.end(), kForm.begin(), kForm.end(), [&](char found, char form) {
    return form == 'x' ? kDigits.find(found) != std::string_view::npos : found == form;
  });
}

absl::StatusOr<std::string> ReadDevice(const Json& value, const Place& place) {
  ASSIGN_OR_RETURN(std::string text, ReadText(value, "", place));
  if (text == "host" || IsGpuUuid(text)) return text;
  const std::string allowed = "\"host\", or a GPU's UUID as nvidia-smi -L shows it";
  return place.Error(absl::StrCat(Quote(text), " is no device: give ", allowed), Printable(text), allowed);
}

absl::StatusOr<int32_t> ReadNumber(const Json& value, int32_t least, const Place& place) {
  const std::string allowed = absl::StrCat("a whole number from ", least, " to ", kMaxNumber);
  if (!value.is_number_integer()) return place.WrongType(value, allowed);
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(kMaxNumber) : false;
  if (!fits || value.get<int32_t>() < least) {
    return place.Error(absl::StrCat("is ", value.dump(), ", and must be ", allowed), value.dump(), allowed);
  }
  return value.get<int32_t>();
}

// An array without a value twice, read by `read`.
template <typename T, typename Read>
absl::StatusOr<std::vector<T>> ReadList(const Json& value, const Place& place, bool may_repeat, Read read) {
  if (!value.is_array() || value.empty()) return place.WrongType(value, "an array of at least one value");
  if (value.size() > kMaxListLength) {
    return place.Error(absl::StrCat("has ", value.size(), " values, and ", kMaxListLength, " are allowed"),
                       absl::StrCat(value.size()), absl::StrCat(kMaxListLength));
  }
  std::vector<T> list;
  for (size_t i = 0; i < value.size(); ++i) {
    ASSIGN_OR_RETURN(T element, read(value[i], place.At(i)));
    if (!may_repeat && std::find(list.begin(), list.end(), element) != list.end()) {
      return place.At(i).Error("is there twice", value[i].dump(), "each value once");
    }
    list.push_back(std::move(element));
  }
  return list;
}

// Puts a value where it belongs in a set.
class FieldReader {
 public:
  FieldReader(const Json& value, const Place& place, DesiredSet* set) : value_(value), place_(place), set_(set) {}

  absl::Status operator()(const TextField& field) const {
    ASSIGN_OR_RETURN(set_->*field.member, ReadText(value_, field.words, place_));
    return absl::OkStatus();
  }
  absl::Status operator()(const NumberField& field) const {
    ASSIGN_OR_RETURN(set_->*field.member, ReadNumber(value_, 1, place_));
    return absl::OkStatus();
  }
  absl::Status operator()(const TextsField& field) const {
    ASSIGN_OR_RETURN(set_->*field.member,
                     ReadList<std::string>(value_, place_, false, [&](const Json& element, const Place& place) {
                       return ReadText(element, field.words, place);
                     }));
    return absl::OkStatus();
  }
  absl::Status operator()(const DevicesField& field) const {
    constexpr bool kMayRepeat = true;  // several ranks may be on one device
    ASSIGN_OR_RETURN(set_->*field.member, ReadList<std::string>(value_, place_, kMayRepeat, ReadDevice));
    return absl::OkStatus();
  }
  absl::Status operator()(const NumbersField& field) const {
    ASSIGN_OR_RETURN(set_->*field.member,
                     ReadList<int32_t>(value_, place_, false, [](const Json& element, const Place& place) {
                       return ReadNumber(element, 0, place);
                     }));
    return absl::OkStatus();
  }

 private:
  const Json& value_;
  const Place& place_;
  DesiredSet* const set_;
};

absl::Status CheckName(const std::string& name, const Place& place) {
  if (name.size() <= kMaxNameBytes && name.find_first_not_of(kNameCharacters) == std::string::npos) {
    return absl::OkStatus();
  }
  const std::string allowed = absl::StrCat(R"(letters, digits, "_", "." and "-", at most )", kMaxNameBytes, " of them");
  return place.Error(absl::StrCat(Quote(name), " is no name for a set: give ", allowed), Printable(name), allowed);
}

absl::StatusOr<DesiredSet> ReadSet(const Json& json, const Place& place) {
  if (!json.is_object()) return place.WrongType(json, "an object");
  RETURN_IF_ERROR(CheckKeys(json, Keys(), place));
  DesiredSet set;
  for (const Field& field : kFields) {
    if (field.required) RETURN_IF_ERROR(CheckThere(json, field.key, place));
    const auto value = json.find(field.key);
    if (value != json.end()) RETURN_IF_ERROR(std::visit(FieldReader(*value, place.At(field.key), &set), field.kind));
  }
  RETURN_IF_ERROR(CheckName(set.name, place.At("name")));
  return set;
}

absl::StatusOr<std::vector<DesiredSet>> ReadSets(const Json& json, const Place& place) {
  if (!json.is_array()) return place.WrongType(json, "an array");
  if (json.size() > kMaxSets) {
    return place.Error(absl::StrCat("has ", json.size(), " sets, and ", kMaxSets, " are allowed"),
                       absl::StrCat(json.size()), absl::StrCat(kMaxSets));
  }
  std::vector<DesiredSet> sets;
  std::set<std::string> names;
  for (size_t i = 0; i < json.size(); ++i) {
    ASSIGN_OR_RETURN(sets.emplace_back(), ReadSet(json[i], place.At(i)));
    const std::string& name = sets.back().name;
    if (names.insert(name).second) continue;
    return place.At(i).At("name").Error(absl::StrCat("\"", name, "\" is another set's name, too"), name,
                                        "a name for each set");
  }
  return sets;
}

absl::Status CheckAliased(const std::string& name, const std::vector<DesiredSet>& sets, const Place& place) {
  std::vector<std::string> known;
  for (const DesiredSet& set : sets) known.push_back(set.name);
  if (std::find(known.begin(), known.end(), name) != known.end()) return absl::OkStatus();
  const std::string nearest = absl::StrJoin(NearNames(name, known, 1), "");
  return place.Error(absl::StrCat("no set of this file is named ", Quote(name),
                                  nearest.empty() ? "" : absl::StrCat("; the nearest is \"", nearest, "\"")),
                     Printable(name), absl::StrJoin(known, ", "));
}

absl::StatusOr<std::map<std::string, std::string>> ReadAliases(const Json& json, const std::vector<DesiredSet>& sets,
                                                               const Place& place) {
  if (!json.is_object()) return place.WrongType(json, "an object");
  if (json.size() > kMaxAliases) {
    return place.Error(absl::StrCat("has ", json.size(), " aliases, and ", kMaxAliases, " are allowed"),
                       absl::StrCat(json.size()), absl::StrCat(kMaxAliases));
  }
  std::map<std::string, std::string> aliases;
  for (const auto& [alias, value] : json.items()) {
    const Place here = place.At(alias);
    if (!IsAliasName(alias)) {
      const absl::Status why = CheckAliasName(alias);
      return here.Error(std::string(why.message()), Printable(alias), "NAME@TAG");
    }
    ASSIGN_OR_RETURN(aliases[alias], ReadText(value, "", here));
    RETURN_IF_ERROR(CheckAliased(aliases[alias], sets, here));
  }
  return aliases;
}

absl::Status CheckVersion(const Json& json, const Place& place) {
  RETURN_IF_ERROR(CheckThere(json, "version", place));
  const Json& version = json["version"];
  if (version.is_number_integer() && version == kDesiredStateVersion) return absl::OkStatus();
  return place.At("version").Error(
      absl::StrCat("is ", Printable(version.dump()), ", and this program knows version ", kDesiredStateVersion),
      Printable(version.dump()), absl::StrCat(kDesiredStateVersion));
}

}  // namespace

absl::Status DesiredStateError(const std::string& file, const std::string& pointer, const std::string& what,
                               const std::string& found, const std::string& allowed) {
  const std::string where = pointer.empty() ? "" : absl::StrCat(Printable(pointer), ": ");
  return MakeError(Reason::kConfigurationInvalid, absl::StrCat(file, ": ", where, what),
                   {{"source", file}, {"pointer", Printable(pointer)}, {"found", found}, {"allowed", allowed}});
}

absl::StatusOr<DesiredState> ParseDesiredState(std::string_view text, const std::string& file) {
  const Place place(file);
  const auto json = ParseStrictJson(text);
  if (!json.ok()) return place.Error(std::string(json.status().message()), "no such JSON", "one JSON object");
  if (!json->is_object()) return place.WrongType(*json, "an object");
  RETURN_IF_ERROR(CheckVersion(*json, place));
  RETURN_IF_ERROR(CheckKeys(*json, {"version", "sets", "aliases"}, place));
  RETURN_IF_ERROR(CheckThere(*json, "sets", place));
  DesiredState desired;
  ASSIGN_OR_RETURN(desired.sets, ReadSets((*json)["sets"], place.At("sets")));
  const auto aliases = json->find("aliases");
  if (aliases == json->end()) return desired;
  ASSIGN_OR_RETURN(desired.aliases, ReadAliases(*aliases, desired.sets, place.At("aliases")));
  return desired;
}

absl::StatusOr<DesiredState> ReadDesiredFile(FileSystem& files, const std::string& path) {
  const auto text = files.ReadSmallFile(path, kMaxFileBytes);
  if (!text.ok()) {
    const std::string prefix = absl::StrCat(path, ": ");  // the file system names the file, too
    return DesiredStateError(path, "", std::string(absl::StripPrefix(text.status().message(), prefix)),
                             "no file that can be read", absl::StrCat("a file of at most ", kMaxFileBytes, " bytes"));
  }
  return ParseDesiredState(*text, path);
}

}  // namespace weightbroker
