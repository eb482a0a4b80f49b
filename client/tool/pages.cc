#include "client/tool/pages.h"

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weightbroker::tool {
namespace {

constexpr char kDescription[] =
    "weightbroker shows and changes what a running service holds, checks model folders without one, and writes "
    "checkpoints to try things with. Flags stand behind the command. The service is found by --socket, else by "
    "$WEIGHTBROKER_SOCKET, else at /run/weightbroker/weightbroker.sock for root, else under $XDG_RUNTIME_DIR.";

constexpr char kCompletionEnd[] = R"(  *) words= ;;
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}
complete -o filenames -F _weightbroker weightbroker
)";

// Text that no macro is made of.
std::string Roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c == '\n' ? ' ' : c;
    }
  }
  return !out.empty() && (out[0] == '.' || out[0] == '\'') ? "\\&" + out : out;
}

// "--rank", "-h"; empty for what is told by its place.
std::vector<std::string> FlagsOf(const CLI::Option& option) {
  std::vector<std::string> flags;
  for (const std::string& name : option.get_snames()) flags.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) flags.push_back("--" + name);
  return flags;
}

std::string DescribeOption(const CLI::Option& option) {
  const std::vector<std::string> flags = FlagsOf(option);
  std::string name = flags.empty() ? option.get_name(/*positional=*/true) : absl::StrJoin(flags, ", ");
  if (!flags.empty() && option.get_expected_max() > 0)
    name += " " + absl::AsciiStrToUpper(option.get_lnames().empty() ? "value" : option.get_lnames()[0]);
  std::string text = option.get_description();
  if (!option.get_default_str().empty()) absl::StrAppend(&text, " (default: ", option.get_default_str(), ")");
  return absl::StrCat(".TP\n.B ", Roff(name), "\n", Roff(text), "\n");
}

}  // namespace

std::string ManPage(const CLI::App& app, const std::string& version) {
  std::string page = absl::StrCat(".TH WEIGHTBROKER 1 \"\" \"weightbroker ", version, "\" \"User Commands\"\n",
                                  ".SH NAME\nweightbroker \\- ", Roff(app.get_description()),
                                  "\n.SH SYNOPSIS\n.B weightbroker\n.I command\n[\\fIflags\\fR]\n.SH DESCRIPTION\n",
                                  Roff(kDescription), "\n.SH COMMANDS\n");
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    absl::StrAppend(&page, ".SS ", Roff(command->get_name()), "\n", Roff(command->get_description()), "\n");
    for (const CLI::Option* option : command->get_options()) page += DescribeOption(*option);
  }
  absl::StrAppend(&page, ".SH EXIT STATUS\n", Roff(app.get_footer()),
                  "\n.SH SEE ALSO\nThe documents that are installed with it, in share/doc/weightbroker.\n");
  return page;
}

std::string BashCompletion(const CLI::App& app) {
  std::vector<std::string> commands;
  std::string cases;
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    std::vector<std::string> words;
    for (const CLI::Option* option : command->get_options()) {
      for (const std::string& flag : FlagsOf(*option)) words.push_back(flag);
    }
    commands.push_back(command->get_name());
    absl::StrAppend(&cases, "  ", command->get_name(), ") words=\"", absl::StrJoin(words, " "), "\" ;;\n");
  }
  return absl::StrCat("# Completion for weightbroker: source <(weightbroker completion)\n", "_weightbroker() {\n",
                      "  local word=${COMP_WORDS[COMP_CWORD]} words\n  if [[ $COMP_CWORD -eq 1 ]]; then\n",
                      "    COMPREPLY=($(compgen -W \"", absl::StrJoin(commands, " "),
                      " --help --version\" -- \"$word\"))\n    return\n  fi\n  case ${COMP_WORDS[1]} in\n", cases,
                      kCompletionEnd);
}

}  // namespace weightbroker::tool
