#include "client/examples/example_support.h"

#include <openssl/evp.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

namespace example {
namespace {

constexpr char kChecksumHelp[] =
    "The checksum is the SHA-256 over, for each tensor that is no alias, in byte-wise order of names: the name in "
    "UTF-8, "
    "then the tensor's bytes. In Python:\n"
    "  h = hashlib.sha256()\n"
    "  for name in sorted(tensors, key=lambda n: n.encode()):\n"
    "    h.update(name.encode()); h.update(tensors[name])\n"
    "  print(h.hexdigest())\n"
    "Exit codes: 0 done, 2 usage, 3 refused, 4 unavailable.";

using DigestContext = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

std::string Checksum(const std::vector<View>& views) {
  const DigestContext context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr);
  for (const View& view : views) {
    if (view.is_alias) continue;
    EVP_DigestUpdate(context.get(), view.name.data(), view.name.size());
    EVP_DigestUpdate(context.get(), view.bytes.data(), view.bytes.size());
  }
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_DigestFinal_ex(context.get(), digest, &size);
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) {
    char digits[3];
    snprintf(digits, sizeof(digits), "%02x", digest[i]);
    hex += digits;
  }
  return hex;
}

void TouchEveryPage(const std::vector<View>& views) {
  constexpr size_t kPageBytes = 4096;
  for (const View& view : views) {
    for (size_t i = 0; i < view.bytes.size(); i += kPageBytes) {
      [[maybe_unused]] const volatile char byte = *static_cast<const volatile char*>(view.bytes.data() + i);
    }
  }
}

}  // namespace

void AddFlags(CLI::App& app, Flags* flags) {
  app.footer(kChecksumHelp);
  app.add_option("--socket", flags->socket, "The service's socket")->envname("WEIGHTBROKER_SOCKET");
  app.add_option("--model", flags->model, "The model: an absolute folder, or name:relative/path")->required();
  app.add_option("--torch_version", flags->torch_version, "The engine's torch version, or \"any\"")->required();
  app.add_option("--tp", flags->tensor_parallel_size, "The number of ranks that each weight is split over")
      ->check(CLI::PositiveNumber);
  app.add_option("--layout", flags->layout, "hf or fused; default: hf");
  app.add_option("--quantization", flags->quantization,
                 "none, fp8 or fp8_block; default: what the checkpoint declares");
  app.add_option("--rank", flags->rank, "This engine's rank, from 0")->check(CLI::NonNegativeNumber);
  app.add_flag("--register", flags->register_if_missing, "Have the service load the model if it has not");
  app.add_flag("--json", flags->json, "Print one line of JSON instead of a table");
  app.add_option("--hold_seconds", flags->hold_seconds, "Keep the weights mapped, after printing the line \"attached\"")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--keep_reading", flags->keep_reading, "Meanwhile, read everything again and again, and compare");
  app.add_flag("--write_fault", flags->write_fault, "Write to a tensor, to see that it ends this process alone");
  app.add_option("--dump_dir", flags->dump_dir, "Write each tensor's bytes to a file of its name in this folder")
      ->check(CLI::ExistingDirectory);
  app.add_option("--loop", flags->loop, "Attach, read and release so many times")->check(CLI::PositiveNumber);
}

void ReadAll(const std::vector<View>& views, Report* report) {
  for (const View& view : views) {
    ++report->tensors;
    if (view.is_alias) {
      ++report->aliases;
    } else {
      report->bytes += static_cast<int64_t>(view.bytes.size());
    }
  }
  const double start = Now();
  TouchEveryPage(views);
  const double touched = Now();
  report->checksum = Checksum(views);
  report->first_touch_seconds = touched - start;
  report->checksum_seconds = Now() - touched;
}

bool DumpAll(const std::vector<View>& views, const std::string& folder) {
  for (const View& view : views) {
    const std::string name(view.name);
    const bool is_file_name = !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos;
    std::ofstream file;
    if (is_file_name) file.open(folder + "/" + name, std::ios::binary | std::ios::trunc);
    file.write(view.bytes.data(), static_cast<std::streamsize>(view.bytes.size()));
    file.close();
    if (is_file_name && file) continue;
    fprintf(stderr, "cannot write tensor \"%s\" to a file in %s\n", name.c_str(), folder.c_str());
    return false;
  }
  return true;
}

void Print(const Report& report, bool json) {
  if (json) {
    const nlohmann::ordered_json line = {{"ok", true},
                                         {"program", report.program},
                                         {"process_id", getpid()},
                                         {"source", report.source},
                                         {"why_not_attached", report.why_not_attached},
                                         {"device", report.device},
                                         {"fingerprint", report.fingerprint},
                                         {"generation", report.generation},
                                         {"tensors", report.tensors},
                                         {"aliases", report.aliases},
                                         {"bytes", report.bytes},
                                         {"attach_seconds", report.attach_seconds},
                                         {"first_touch_seconds", report.first_touch_seconds},
                                         {"checksum_seconds", report.checksum_seconds},
                                         {"checksum", report.checksum}};
    printf("%s\n", line.dump().c_str());
  } else {
    printf("%-12s %s%s%s\n", "source", report.source.c_str(), report.why_not_attached.empty() ? "" : ": not attached, ",
           report.why_not_attached.c_str());
    printf("%-12s %s\n", "device", report.device.c_str());
    printf("%-12s %s, generation %lld\n", "fingerprint", report.fingerprint.c_str(),
           static_cast<long long>(report.generation));
    printf("%-12s %lld, %lld of them aliases\n", "tensors", static_cast<long long>(report.tensors),
           static_cast<long long>(report.aliases));
    printf("%-12s %lld\n", "bytes", static_cast<long long>(report.bytes));
    printf("%-12s %.6f s\n", "attach", report.attach_seconds);
    printf("%-12s %.6f s\n", "first touch", report.first_touch_seconds);
    printf("%-12s %s (%.3f s)\n", "checksum", report.checksum.c_str(), report.checksum_seconds);
  }
  fflush(stdout);
}

int PrintFailure(const std::string& reason, const std::string& message,
                 const std::map<std::string, std::string>& metadata, bool unavailable, bool json) {
  fprintf(stderr, "%s [%s]\n", message.c_str(), reason.c_str());
  if (json) {
    const nlohmann::ordered_json line = {
        {"ok", false}, {"reason", reason}, {"message", message}, {"metadata", metadata}};
    printf("%s\n", line.dump().c_str());
    fflush(stdout);
  }
  return unavailable ? 4 : 3;
}

int Hold(const Flags& flags, const std::vector<View>& views, const Report& report) {
  printf("attached\n");
  fflush(stdout);
  const double end = Now() + flags.hold_seconds;
  if (!flags.keep_reading) std::this_thread::sleep_for(std::chrono::seconds(flags.hold_seconds));
  while (Now() < end) {
    if (Checksum(views) == report.checksum) continue;
    fprintf(stderr, "the weights have changed\n");
    return 1;
  }
  return 0;
}

int WriteToWeights(const std::vector<View>& views) {
  for (const View& view : views) {
    if (view.bytes.empty()) continue;
    fprintf(stderr, "writing to tensor \"%s\"\n", std::string(view.name).c_str());
    *const_cast<volatile char*>(view.bytes.data()) = 1;
    fprintf(stderr, "the write went through: the memory is not read-only\n");
    return 1;
  }
  fprintf(stderr, "no tensor has any bytes\n");
  return 1;
}

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace example
