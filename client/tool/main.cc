// weightbroker: the command-line tool for operators.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tool/alias_command.h"
#include "client/tool/desired_command.h"
#include "client/tool/export_command.h"
#include "client/tool/fingerprint_command.h"
#include "client/tool/groups_command.h"
#include "client/tool/inspect.h"
#include "client/tool/mkcheckpoint_command.h"
#include "client/tool/output.h"
#include "client/tool/pages.h"
#include "client/tool/plan_command.h"
#include "client/tool/scrub_command.h"
#include "client/tool/service_commands.h"
#include "client/tool/spec_flags.h"
#include "client/tool/status_command.h"
#include "client/tool/top_command.h"
#include "client/tool/validators.h"
#include "client/tool/verify_command.h"
#include "common/base/alias_name.h"
#include "common/base/error.h"
#include "common/base/file.h"
#include "common/base/quote.h"

namespace weightbroker::tool {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 done, 1 not ready (status, desired), 2 usage, 3 refused or different, 4 unavailable. With --json, "
    "stdout has "
    "one JSON value; an "
    "error is {\"ok\": false, \"reason\", \"message\", \"metadata\"}. docs/tool.md describes each.";

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
    AddStatus();
    AddDesired();
    AddTop();
    AddUnregister();
    AddAlias();
    AddFingerprint();
    AddExport();
    AddVerify();
    AddScrub();
    AddMakeCheckpoint();
    AddGroups();
    AddPages();
  }

  int Run(int argc, char** argv) {
    if (const int code = CheckCommand(argc, argv); code != kDone) return code;
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      if (error.get_exit_code() != 0 && WantsJson(argc, argv)) return RefuseUsage(error.what());
      const bool done = app_.exit(error) == 0;
      if (!done) HintAtOrder(argc, argv);
      return done ? kDone : kUsage;
    }
    service_.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_seconds_ * 1000));
    register_.load_timeout = std::chrono::milliseconds(static_cast<int64_t>(load_timeout_seconds_ * 1000));
    top_.interval = std::chrono::milliseconds(static_cast<int64_t>(top_interval_seconds_ * 1000));
    return Finished(run_());
  }

 private:
  // What the command came to, unless what it printed could not be written.
  static int Finished(int code) {
    if (fflush(stdout) == 0 && ferror(stdout) == 0) return code;
    fprintf(stderr, "error: stdout: what was to be printed could not be written: %s\n", strerror(errno));
    return code == kDone ? kRefused : code;
  }

  static bool WantsJson(int argc, char** argv) {
    return std::any_of(argv + 1, argv + argc, [](const std::string_view word) { return word == "--json"; });
  }

  static int RefuseUsage(const std::string& what) {
    PrintError(MakeError(Reason::kInvalidArgument, what), /*json=*/true);
    return Finished(kUsage);
  }

  // CLI11 says of a word that is no command that it was not expected, and not what is.
  int CheckCommand(int argc, char** argv) const {
    if (argc < 2 || argv[1][0] == '-') return kDone;
    std::vector<std::string> names;
    for (const CLI::App* command : app_.get_subcommands(nullptr)) names.push_back(command->get_name());
    if (std::find(names.begin(), names.end(), argv[1]) != names.end()) return kDone;
    const std::string what =
        absl::StrCat("there is no command ", Quote(argv[1]), "; these are: ", absl::StrJoin(names, ", "));
    if (WantsJson(argc, argv)) return RefuseUsage(what);
    fprintf(stderr, "%s\nRun with --help for more information.\n", what.c_str());
    return kUsage;
  }

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
    command->add_option(
        "--socket", service_.socket,
        "The service's socket (default: $WEIGHTBROKER_SOCKET, else /run/weightbroker/weightbroker.sock as "
        "root, else $XDG_RUNTIME_DIR/weightbroker/weightbroker.sock)");
    command->add_option("--timeout", timeout_seconds_, "Seconds to wait for an answer")
        ->check(Seconds())
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
        ->required()
        ->check(Utf8());
    command->add_option("--torch_version", register_.torch_version, "The engine's torch version, or \"any\"")
        ->required()
        ->check(Utf8());
    AddSpecFlags(command, &register_.spec);
    command->add_option("--ranks", register_.ranks, "The ranks that this service is to hold, as 0,1; default: all")
        ->delimiter(',');
    command->add_option("--devices", register_.devices, "The device of each of them; default: the service chooses")
        ->delimiter(',')
        ->check(Utf8());
    command
        ->add_option("--handle_kinds", register_.handle_kinds,
                     "Kinds of handles, best first; default: the service chooses")
        ->delimiter(',')
        ->check(CLI::IsMember({"HOST_MEMFD", "CUDA_VMM_FD", "CUDA_IPC"}));
    command->add_flag("--pinned", register_.pinned, "Never evict it, under this broker or a later one");
    command->add_flag("--dry_run", register_.dry_run,
                      "Only say what it would need, what there is, and what would be evicted for it");
    command->add_flag("!--no_wait", register_.wait, "Return as soon as the load is under way");
    command->add_option("--load_timeout", load_timeout_seconds_, "Seconds to wait for the load")
        ->check(Seconds())
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

  void AddStatus() {
    CLI::App* command =
        app_.add_subcommand("status", "Say in one line and by the exit code whether weights are ready: 0, else 1 or 4");
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunStatus(service_); }; });
  }

  void AddTop() {
    CLI::App* command = app_.add_subcommand("top", "Show the weight sets, leases and loads again and again");
    command->add_option("--interval", top_interval_seconds_, "Seconds between two looks")
        ->check(Seconds())
        ->capture_default_str();
    command->add_option("--count", top_.count, "How many looks; 0: until it is interrupted")
        ->check(WholeNumberFrom(0))
        ->capture_default_str();
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunTop(service_, top_); }; });
  }

  void AddUnregister() {
    CLI::App* command = app_.add_subcommand("unregister", "Release a weight set's memory");
    command->add_option("fingerprint", unregister_.fingerprint, "The fingerprint, or at least 8 digits of it")
        ->required()
        ->check(FingerprintDigits());
    command->add_flag("--force", unregister_.force, "Also while engines hold leases; they keep what they have mapped");
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunUnregister(service_, unregister_); }; });
  }

  void AddAlias() {
    CLI::App* command = app_.add_subcommand("alias", "Have a name stand for one weight set, and move it to another");
    command->require_subcommand(1);
    CLI::App* set = command->add_subcommand("set", "Have an alias name a resident weight set");
    AddAliasName(set);
    set->add_option("fingerprint", alias_.fingerprint, "The fingerprint, or at least 8 digits of it")
        ->required()
        ->check(FingerprintDigits());
    AddExpected(set);
    set->add_flag("--release_previous", alias_.release_previous,
                  "Release what it named before, once the last lease on that has ended");
    AddServiceFlags(set);
    set->callback([this] { run_ = [this] { return RunAliasSet(service_, alias_); }; });
    CLI::App* remove = command->add_subcommand("delete", "Remove an alias; what it names stays");
    AddAliasName(remove);
    AddExpected(remove);
    AddServiceFlags(remove);
    remove->callback([this] { run_ = [this] { return RunAliasDelete(service_, alias_); }; });
    CLI::App* list = command->add_subcommand("list", "List the aliases");
    AddServiceFlags(list);
    list->callback([this] { run_ = [this] { return RunAliasList(service_); }; });
  }

  // Without a command of its own it asks the service.
  void AddDesired() {
    CLI::App* command =
        app_.add_subcommand("desired", "Show what the service is configured to hold, against what it holds");
    command->require_subcommand(0, 1);
    AddServiceFlags(command);
    CLI::App* check = command->add_subcommand("check", "Check such a file offline, as the service would");
    check->add_option("file", desired_file_, "The file, as --desired of the service names it")->required();
    check->add_flag("--json", service_.json, "Print JSON instead of a line");
    command->callback([this, check] {
      if (check->parsed()) {
        run_ = [this] { return RunDesiredCheck(desired_file_, service_.json); };
      } else {
        run_ = [this] { return RunDesired(service_); };
      }
    });
  }

  void AddAliasName(CLI::App* command) {
    command->add_option("alias", alias_.alias, "The name, NAME@TAG, as llama@live")->required()->check(AliasName());
  }

  void AddExpected(CLI::App* command) {
    command
        ->add_option("--expected", alias_.expected_fingerprint,
                     "The fingerprint that it must name now, or at least 8 digits of it, or \"none\"; else nothing "
                     "is changed")
        ->check(FingerprintDigitsOrNone());
  }

  // Which weights a command is about, where a fingerprint says it or a model and what goes with it.
  static void AddSetFlags(CLI::App* command, SetFlags* flags) {
    command
        ->add_option("weights", flags->weights,
                     "A fingerprint, or at least 8 digits of it; or an alias; or a model, with --torch_version and the "
                     "flags below")
        ->required()
        ->check(Utf8());
    command->add_option("--torch_version", flags->torch_version, "With a model: the engine's torch version, or \"any\"")
        ->check(Utf8());
    command->add_option("--rank", flags->rank, "One rank; default: all that the service holds")
        ->check(WholeNumberFrom(0));
    AddSpecFlags(command, &flags->spec);
    command->parse_complete_callback([flags] {
      if (IsFingerprint(flags->weights) || IsAliasName(flags->weights)) return;
      if (!IsModel(flags->weights)) {
        throw CLI::ValidationError(
            "weights", absl::StrCat(Quote(flags->weights),
                                    " is no fingerprint, of which 8 to 64 lower-case hexadecimal "
                                    "digits are needed, no alias, which is NAME@TAG, and no model, which is "
                                    "name:relative/path or a folder"));
      }
      if (flags->torch_version.empty()) throw CLI::RequiredError("--torch_version");
    });
  }

  void AddFingerprint() {
    CLI::App* command = app_.add_subcommand(
        "fingerprint", "Show what a model's fingerprint is made of, and how what is resident differs from it");
    command
        ->add_option("model", fingerprint_.weights,
                     "name:relative/path under a model root, or an absolute folder; or an alias")
        ->required()
        ->check(Utf8());
    command
        ->add_option("--torch_version", fingerprint_.torch_version,
                     "With a model: the engine's torch version, or \"any\"")
        ->check(Utf8());
    command->parse_complete_callback([this] {
      if (!IsAliasName(fingerprint_.weights) && fingerprint_.torch_version.empty()) {
        throw CLI::RequiredError("--torch_version");
      }
    });
    AddSpecFlags(command, &fingerprint_.spec);
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunFingerprint(service_, fingerprint_); }; });
  }

  void AddExport() {
    CLI::App* command = app_.add_subcommand("export", "List the tensors of a resident weight set; takes no lease");
    AddSetFlags(command, &export_);
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunExport(service_, export_); }; });
  }

  void AddVerify() {
    CLI::App* command =
        app_.add_subcommand("verify", "Load a resident weight set from disk, too, and compare the two byte for byte");
    AddSetFlags(command, &verify_.set);
    command->add_flag("--digests", verify_.digests_only, "Read no files: compare with the digests taken at the load");
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunVerify(service_, verify_); }; });
  }

  void AddScrub() {
    CLI::App* command = app_.add_subcommand(
        "scrub", "Have the service check resident bytes against their digests; what differs is never exported again");
    CLI::Option* fingerprint =
        command
            ->add_option("fingerprint", scrub_.fingerprint,
                         "The fingerprint, or at least 8 digits of it; default: all that is resident")
            ->check(FingerprintDigits());
    command->add_option("--rank", scrub_.rank, "One rank; default: all that the service holds")
        ->check(WholeNumberFrom(0))
        ->needs(fingerprint);
    command
        ->add_option("--bandwidth", scrub_.bytes_per_second,
                     "The most bytes a second, as 1GiB; default: the service's --scrub_bandwidth")
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunScrub(service_, scrub_); }; });
  }

  void AddMakeCheckpoint() {
    CLI::App* command = app_.add_subcommand("mkcheckpoint", "Write a checkpoint of random weights, right or wrong");
    MakeCheckpointFlags& flags = make_checkpoint_;
    command->add_option("folder", flags.folder, "Where to write it: an empty folder, or one to be made");
    command->add_option("--model", flags.model.model, "One of --list_models, or an architecture's name")
        ->capture_default_str();
    command->add_flag("--published", flags.model.published, "With a published model's numbers; default: small ones");
    CLI::Option* layers =
        command->add_option("--layers", flags.model.layers, "How many layers")->check(WholeNumberFrom(1));
    command->add_option("--experts", flags.model.experts, "How many experts a layer has")->check(WholeNumberFrom(1));
    command->add_option("--bytes", flags.model.bytes, "As many layers as come nearest to it, as 2GiB or 500MB")
        ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
        ->excludes(layers);
    command
        ->add_option_function<std::vector<std::string>>(
            "--set", [this](const std::vector<std::string>& settings) { SetNumbers(settings); },
            "Another number of the config, as hidden_size=1024")
        ->delimiter(',');
    command->add_flag("--fp8", flags.model.fp8, "In block-wise FP8 with scales; default: BF16");
    command->add_option("--shards", flags.model.shard_count, "How many files; default: of at most 5 GB each")
        ->check(WholeNumberFrom(1));
    command->add_option("--seed", flags.seed, "What the contents are made from")->capture_default_str();
    command->add_flag("--sparse", flags.sparse, "Holes in place of contents: takes no room on disk");
    command->add_option("--fault", flags.fault, "Plant one of --list_faults in it");
    command->add_flag("--list_faults", list_faults_, "Show the faults that can be planted");
    command->add_flag("--list_models", list_models_, "Show the models that there are");
    command->add_flag("--json", flags.json, "Print JSON instead of a table");
    command->callback([this] { run_ = ChooseMakeCheckpoint(); });
  }

  void AddGroups() {
    CLI::App* command = app_.add_subcommand("groups", "List the engine groups with their members, or remove one");
    CLI::Option* remove =
        command->add_option("--remove", groups_.remove, "Forget the group of this name")->check(Utf8());
    command->add_flag("--force", groups_.force, "Also while it has members, who go on by themselves")->needs(remove);
    AddServiceFlags(command);
    command->callback([this] { run_ = [this] { return RunGroups(service_, groups_); }; });
  }

  void AddPages() {
    app_.add_subcommand("completion", "Print bash's completion of this tool, to be sourced")->callback([this] {
      run_ = [this] { return PrintPage(BashCompletion(app_)); };
    });
    app_.add_subcommand("man", "Print the man page: weightbroker man | man -l -")->callback([this] {
      run_ = [this] { return PrintPage(ManPage(app_, WEIGHTBROKER_VERSION)); };
    });
  }

  static ExitCode PrintPage(const std::string& page) {
    fputs(page.c_str(), stdout);
    return kDone;
  }

  std::function<ExitCode()> ChooseMakeCheckpoint() {
    if (list_faults_) return [this] { return RunListFaults(make_checkpoint_.json); };
    if (list_models_) return [this] { return RunListModels(make_checkpoint_.json); };
    if (make_checkpoint_.folder.empty()) throw CLI::RequiredError("folder");
    return [this] { return RunMakeCheckpoint(make_checkpoint_); };
  }

  void SetNumbers(const std::vector<std::string>& settings) {
    for (const std::string& setting : settings) {
      const size_t equals = setting.find('=');
      int64_t value = 0;
      if (equals == std::string::npos || !CLI::detail::lexical_cast(setting.substr(equals + 1), value)) {
        throw CLI::ValidationError("--set", setting + " is not of the form key=integer");
      }
      make_checkpoint_.model.numbers[setting.substr(0, equals)] = value;
    }
  }

  CLI::App app_{"Makes model weights resident in a weightbroker service, and shows what is there."};
  InspectFlags inspect_;
  PlanFlags plan_;
  ServiceFlags service_;
  RegisterFlags register_;
  UnregisterFlags unregister_;
  AliasFlags alias_;
  std::string desired_file_;
  TopFlags top_;
  double top_interval_seconds_ = 2;
  SetFlags fingerprint_;
  SetFlags export_;
  VerifyFlags verify_;
  ScrubFlags scrub_;
  MakeCheckpointFlags make_checkpoint_;
  GroupsFlags groups_;
  bool list_faults_ = false;
  bool list_models_ = false;
  double timeout_seconds_ = 10;
  double load_timeout_seconds_ = 3600;
  std::function<ExitCode()> run_;
};

}  // namespace
}  // namespace weightbroker::tool

int main(int argc, char** argv) { return weightbroker::tool::CommandLine().Run(argc, argv); }
