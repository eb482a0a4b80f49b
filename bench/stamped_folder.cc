#include "bench/stamped_folder.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace weightbroker::bench {
namespace {

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

absl::Status FillFolderOnce(const std::string& folder, const std::string& stamp,
                            const std::function<absl::Status()>& write) {
  const std::string path = absl::StrCat(folder, "/bench_checkpoint.json");
  const std::string stamp_there = ReadText(path);
  if (stamp_there == stamp) return absl::OkStatus();
  std::error_code error;
  if (!stamp_there.empty()) std::filesystem::remove_all(folder, error);  // it is ours
  RETURN_IF_ERROR(write());
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << stamp;
  file.close();
  return file ? absl::OkStatus() : SystemError(absl::StrCat("writing ", path), EIO);
}

}  // namespace weightbroker::bench
