#include "tests/integration/survival/survival.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "tests/support/temporary_folder.h"

namespace weightbroker::testing {

pid_t BrokerOf(const Service& service) {
  for (const pid_t pid : service.Processes()) {
    std::error_code error;
    const auto program = std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe", error);
    if (program.filename().string().starts_with("weightbroker-broker")) return pid;
  }
  return 0;
}

bool WaitForAnotherBroker(const Service& service, pid_t before) {
  return Eventually([&] {
    const pid_t now = BrokerOf(service);
    return now != 0 && now != before;
  });
}

bool KillBroker(const Service& service, int signal) {
  const pid_t broker = BrokerOf(service);
  if (broker == 0) return false;
  kill(broker, signal);
  return WaitForAnotherBroker(service, broker);
}

bool WaitForStatus(const Service& service, v1::HealthResponse::Status status) {
  return Eventually([&] {
    const auto health = service.Health();
    return health.ok() && health->status() == status;
  });
}

int FreePort() {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool bound = bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                     getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0;
  return bound ? ntohs(address.sin_port) : 0;
}

std::string ScrapeMetrics(int port) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return "";
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  if (send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) return "";
  std::string text;
  char buffer[4096];
  for (ssize_t length = 0; (length = read(socket.get(), buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(length));
  }
  const size_t body = text.find("\r\n\r\n");
  return body == std::string::npos ? "" : text.substr(body + 3);  // with a line's end before the first
}

double ReadMetric(int port, const std::string& name) {
  const std::string text = ScrapeMetrics(port);
  const size_t line = text.find("\n" + name + " ");
  return line == std::string::npos ? -1 : atof(text.c_str() + line + name.size() + 2);
}

InstalledBroker::InstalledBroker() : path_(folder_ / "weightbroker-broker") { InstallAnew(); }

void InstalledBroker::InstallAnew() const {
  std::filesystem::copy_file(WEIGHTBROKER_BIN_DIR "/weightbroker-broker", path_ + ".new");
  std::filesystem::rename(path_ + ".new", path_);
}

void WriteLargeModel(const std::string& folder, int64_t bytes) {
  constexpr int kTensors = 16;
  std::string header = "{";
  for (int64_t i = 0; i < kTensors; ++i) {
    header += (i == 0 ? "\"layer." : ",\"layer.") + std::to_string(i) + "\":{\"dtype\":\"U8\",\"shape\":[" +
              std::to_string(bytes / kTensors) + "],\"data_offsets\":[" + std::to_string(i * (bytes / kTensors)) + "," +
              std::to_string((i + 1) * (bytes / kTensors)) + "]}";
  }
  header += "}";
  const uint64_t length = header.size();
  WriteFile(folder + "/model.safetensors",
            std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header);
  WriteFile(folder + "/config.json", R"({"torch_dtype": "bfloat16"})");
  std::filesystem::resize_file(folder + "/model.safetensors",
                               sizeof(length) + header.size() + static_cast<uint64_t>(bytes / kTensors * kTensors));
}

OpenWatch::OpenWatch(const std::string& folder) : inotify_(inotify_init1(IN_CLOEXEC | IN_NONBLOCK)) {
  if (inotify_add_watch(inotify_.get(), folder.c_str(), IN_OPEN) < 0) {
    fprintf(stderr, "%s cannot be watched\n", folder.c_str());
    abort();
  }
}

std::vector<std::string> OpenWatch::Opened() {
  std::vector<std::string> names;
  alignas(inotify_event) char buffer[16 * 1024];
  ssize_t length = 0;
  while ((length = read(inotify_.get(), buffer, sizeof(buffer))) > 0) {
    for (ssize_t at = 0; at < length;) {
      const auto* const event = reinterpret_cast<const inotify_event*>(buffer + at);
      if (event->len > 0) names.emplace_back(event->name);
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  }
  return names;
}

}  // namespace weightbroker::testing
