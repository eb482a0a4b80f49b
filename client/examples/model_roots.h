// The flag of an example engine that says where models named name:relative/path lie.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

namespace example {

// Adds --model_root, which may be repeated. `roots` outlives the parse.
inline void AddModelRootFlag(CLI::App& app, const std::string& help, std::map<std::string, std::string>* roots) {
  app.add_option_function<std::vector<std::string>>(
      "--model_root",
      [roots](const std::vector<std::string>& words) {
        for (const std::string& word : words) {
          const size_t equals = word.find('=');
          if (equals == std::string::npos) throw CLI::ValidationError("--model_root", "needs name=/folder");
          (*roots)[word.substr(0, equals)] = word.substr(equals + 1);
        }
      },
      help);
}

}  // namespace example
