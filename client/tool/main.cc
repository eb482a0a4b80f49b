// weightbroker: the command-line tool for operators.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>

#include "client/tool/inspect.h"
#include "client/tool/plan_command.h"
#include "client/tool/service_commands.h"
#include "client/tool/spec_flags.h"
#include "common/base/file.h"

namespace weightbroker::tool {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 done, 2 usage, 3 refused, 4 unavailable. With --json, stdout has one JSON value: the API's message "
    "in "
    "protobuf's JSON mapping with the field names of the .proto files, or {\"ok\": false, \"reason\", \"message\", "
    "\"metadata\"}.";

struct InspectFlags {
  std::string folder;
  std::string file;
  bool json = false;
};

ExitCode RunInspect(const InspectFlags& flags) {
  const InspectReport report =
      flags.file.empty() ? InspectFolder(RealFileSystem(), flags.folder) : InspectFile(RealFileSystem(), flags.file);
  fputs((flags.json ? InspectJson(report) : InspectTable(report)).c_str(), stdout);
  return report.ok ? kDone : kRefused;
}

// Everything that the command line can say, and what to do then.
class CommandLine {
 public:
  CommandLine() {
    app_.set_version_flag("--version", WEIGHTBROKER_VERSION);
    app_.require_subcommand(1);
    app_.footer(kFooter);
    AddInspect();
    AddPlan();
    AddRegister();
    AddList();
    AddHealth();
    AddUnregister();
  }

  int Run(int argc, char** argv) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      const bool done = app_.exit(error) == 0;
      if (!done) HintAtOrder(argc, argv);
      return done ? kDone : kUsage;
    }
    service_.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds_ * 1000));
    register_.load_timeout = std::chrono::milliseconds(static_cast<int64_t>(load_timeout_seconds_ * 1000));
    return run_();
  }

 private:
  // A flag of a command is a usage error in front of it, and what CLI11 says of that names the flag only.
  void HintAtOrder(int argc, char** argv) const {
    const std::vector<std::string> words(argv + 1, argv + argc);
    if (words.empty() || words[0].rfind('-', 0) != 0) return;
    for (const CLI::App* command : app_.get_subcommands(nullptr)) {
      const std::string name = command->get_name();
      if (std::find(words.begin(), words.end(), name) == words.end()) continue;
      fprintf(stderr, "hint: flags stand behind the command: weightbroker %s %s ...\n", name.c_str(), words[0].c_str());
    }
  }

  void AddServiceFlags(CLI::App* command) {
    command
        ->add_option("--socket", service_.socket,
                     "The service's socket (default: /run/weightbroker/weightbroker.sock as root, else "
                     "$XDG_RUNTIME_DIR/weightbroker/weightbroker.sock)")
        ->envname("WEIGHTBROKER_SOCKET");
    command->add_option("--timeout", timeout_seconds_, "Seconds to wait for an answer")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    command->add_flag("--json", service_.json, "Print JSON instead of a table");
  }

  void AddInspect() {
    CLI::App* command = app_.add_subcommand("inspect", "Check a model folder or a file offline, as Register would");
    CLI::Option* folder = command->add_option("folder", inspect_.folder, "A model folder");
    CLI::Option* file = command->add_option("--file", inspect_.file, "A single safetensors file");
    file->excludes(folder);
    command->add_flag("--json", inspect_.json, "Print JSON instead of a table");
    command->callback([this] {
      if (inspect_.folder.empty() && inspect_.file.empty()) throw CLI::RequiredError("folder or --file");
      run_ = [this] { return RunInspect(inspect_); };
    });
  }

  void AddPlan() {
    CLI::App* command = app_.add_subcommand("plan", "Show offline which bytes each rank of a model would hold");
    command->add_option("folder", plan_.folder, "A model folder")->required();
    AddSpecFlags(command, &plan_.spec);
    command->add_option("--rank", plan_.rank,
                        "One rank; default: all of them, and the table has the first one's tensors");
    command->add_option("--architecture_dir", plan_.architecture_dir, "A folder of architecture files");
    command->add_flag("--json", plan_.json, "Print JSON instead of a table");
    command->callback([this] { run_ = [this] { return RunPlan(plan_); }; });
  }

  void AddRegister() {
    CLI::App* command = app_.add_subcommand("register", "Have the service make a model resident");
    command->add_option("model", register_.model, "name:relative/path under a model root, or an absolute folder")
        ->required();
    command->add_option("--torch_version", register_.torch_version, "The engine's torch version, or \"any\"")
        ->required();
    AddSpecFlags(command, &register_.spec);
    command->add_option("--ranks", register_.ranks, "The ranks that this service is to hold, as 0,1; default: all")
        ->delimiter(',');
    command->add_option("--devices", register_.devices, "The device of each of them; default: the service chooses")
        ->delimiter(',');
    command->add_flag("!--no_wait", register_.wait, "Return as soon as the load is under way");
    command->add_option("--load_timeout", load_timeout_seconds_, "Seconds to wait for the load")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunRegister(service_, register_); }; });
  }

  void AddList() {
    CLI::App* command = app_.add_subcommand("list", "List the weight sets");
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunList(service_); }; });
  }

  void AddHealth() {
    CLI::App* command = app_.add_subcommand("health", "Show the state of the service");
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunHealth(service_); }; });
  }

  void AddUnregister() {
    CLI::App* command = app_.add_subcommand("unregister", "Release a weight set's memory");
    command->add_option("fingerprint", unregister_.fingerprint, "The fingerprint, or at least 8 digits of it")
        ->required();
    command->add_flag("--force", unregister_.force, "Also while engines hold leases; they keep what they have mapped");
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunUnregister(service_, unregister_); }; });
  }

  CLI::App app_{"Makes model weights resident in a weightbroker service, and shows what is there."};
  InspectFlags inspect_;
  PlanFlags plan_;
  ServiceFlags service_;
  RegisterFlags register_;
  UnregisterFlags unregister_;
  double timeout_seconds_ = 10;
  double load_timeout_seconds_ = 3600;
  std::function<ExitCode()> run_;
};

}  // namespace
}  // namespace weightbroker::tool

int main(int argc, char** argv) { return weightbroker::tool::CommandLine().Run(argc, argv); }
