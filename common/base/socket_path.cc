#include "common/base/socket_path.h"

#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"

namespace weightbroker {

absl::StatusOr<DefaultSocket> FindDefaultSocket() {
  constexpr char kName[] = "/weightbroker/weightbroker.sock";
  const char* chosen = getenv("WEIGHTBROKER_SOCKET");
  if (chosen != nullptr && *chosen != '\0') return DefaultSocket{chosen, false};
  if (geteuid() == 0) return DefaultSocket{absl::StrCat("/run", kName), true};
  const char* runtime_folder = getenv("XDG_RUNTIME_DIR");
  if (runtime_folder != nullptr && *runtime_folder == '/')
    return DefaultSocket{absl::StrCat(runtime_folder, kName), true};
  return MakeError(
      Reason::kSocketPathInvalid,
      "no socket path: give --socket, or set WEIGHTBROKER_SOCKET or XDG_RUNTIME_DIR (only root has a default "
      "without them)");
}

absl::StatusOr<std::string> DefaultSocketPath() {
  auto found = FindDefaultSocket();
  if (!found.ok()) return found.status();
  return std::move(found)->path;
}

absl::Status CheckSocketPath(const std::string& path) {
  const auto invalid = [&path](const std::string& why) {
    return MakeError(Reason::kSocketPathInvalid, absl::StrCat("socket path \"", path, "\" ", why),
                     {{"socket", path}, {"length_bytes", absl::StrCat(path.size())}});
  };
  if (path.empty()) return invalid("is empty");
  if (path[0] == '@' || path[0] == '\0') {
    return invalid("is abstract: it would have no owner and no permissions; give a path in the file system");
  }
  if (path[0] != '/') return invalid("is relative: give an absolute path");
  if (path.find('\0') != std::string::npos) return invalid("contains a NUL byte");
  if (path.back() == '/') return invalid("names a folder: add the socket's file name");
  if (path.size() > kMaxSocketPathBytes) {
    return invalid(absl::StrCat("has ", path.size(), " bytes, and a Unix socket's path may have ", kMaxSocketPathBytes,
                                ": choose a shorter one"));
  }
  return absl::OkStatus();
}

}  // namespace weightbroker
