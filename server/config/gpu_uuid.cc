#include "server/config/gpu_uuid.h"

#include <dirent.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/status_macros.h"

namespace weightbroker {
namespace {

constexpr char kPlaceholder[] = "{gpu_uuid}";
constexpr char kUuidLabel[] = "GPU UUID:";

absl::Status Invalid(const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(kPlaceholder, " stands for the UUID of one GPU, but ", why));
}

// PCI addresses of the GPUs that the driver has, sorted: the order in which they are numbered.
std::vector<std::string> ListPciAddresses(const std::string& folder) {
  std::vector<std::string> addresses;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  while (const dirent* const entry = entries != nullptr ? readdir(entries.get()) : nullptr) {
    if (entry->d_name[0] != '.') addresses.emplace_back(entry->d_name);
  }
  std::sort(addresses.begin(), addresses.end());
  return addresses;
}

absl::StatusOr<std::string> UuidOfNumber(const std::string& number, const std::string& proc) {
  const std::string folder = absl::StrCat(proc, "/driver/nvidia/gpus");
  const std::vector<std::string> addresses = ListPciAddresses(folder);
  size_t index = 0;
  if (!absl::SimpleAtoi(number, &index) || index >= addresses.size()) {
    return Invalid(absl::StrCat("--devices is ", number, ", and the driver lists ", addresses.size(), " GPUs in ",
                                folder, ": give the GPU's UUID"));
  }
  const std::string path = absl::StrCat(folder, "/", addresses[index], "/information");
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(kUuidLabel, 0) != 0) continue;
    const std::string uuid(absl::StripAsciiWhitespace(line.substr(sizeof(kUuidLabel) - 1)));
    // The driver writes question marks until somebody has used the GPU.
    if (uuid.rfind("GPU-", 0) == 0 && uuid.find('?') == std::string::npos) return uuid;
  }
  return Invalid(absl::StrCat(path, " does not say what it is: give the GPU's UUID in --devices"));
}

}  // namespace

absl::StatusOr<std::string> ExpandGpuUuid(const std::string& text, const std::vector<std::string>& devices,
                                          const std::string& proc) {
  if (text.find(kPlaceholder) == std::string::npos) return text;
  if (devices.size() != 1) return Invalid(absl::StrCat("--devices names ", devices.size()));
  const std::string& device = devices.front();
  if (device == "all" || device == "host") return Invalid(absl::StrCat("--devices is ", device));
  std::string uuid = device;
  if (device.rfind("GPU-", 0) != 0) {
    ASSIGN_OR_RETURN(uuid, UuidOfNumber(device, proc));
  }
  return absl::StrReplaceAll(text, {{kPlaceholder, uuid}});
}

}  // namespace weightbroker
