#include "common/base/socket_path.h"

#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {
namespace {

// The variable's value; empty if it is not set.
std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

absl::StatusOr<std::string> DefaultSocketPath() {
  if (std::string named = Variable("WEIGHTBROKER_SOCKET"); !named.empty()) return named;
  if (geteuid() == 0) return "/run/weightbroker/weightbroker.sock";
  const std::string runtime_folder = Variable("XDG_RUNTIME_DIR");
  if (!runtime_folder.empty()) return runtime_folder + "/weightbroker/weightbroker.sock";
  return MakeError(Reason::kSocketPathInvalid,
                   "no socket path is given and neither WEIGHTBROKER_SOCKET nor XDG_RUNTIME_DIR is set: name the socket "
                   "with --socket or WEIGHTBROKER_SOCKET");
}

absl::Status CheckSocketPath(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    return MakeError(Reason::kSocketPathInvalid, absl::StrCat("socket path \"", path.c_str(), "\" ", why),
                     {{"path", path.c_str()}, {"length_bytes", absl::StrCat(path.size())}});
  };
  if (path.empty()) return refuse("is empty");
  if (path[0] == '@' || path[0] == '\0') return refuse("is abstract: anyone could take it; use a path in a folder");
  if (path.find('\0') != std::string::npos) return refuse("has a zero byte in it");
  if (path.size() > kMaxSocketPathBytes) {
    return refuse(absl::StrCat("has ", path.size(), " bytes but a Unix socket's path has at most ", kMaxSocketPathBytes,
                               ": use a shorter folder"));
  }
  return absl::OkStatus();
}

}  // namespace weightbroker
