// Command lines and configuration files for tests.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

namespace weightbroker::testing {

// What a program gets as argc and argv.
class Arguments {
 public:
  explicit Arguments(std::vector<std::string> arguments) : arguments_(std::move(arguments)) {
    pointers_.push_back("program");
    for (const std::string& argument : arguments_) pointers_.push_back(argument.c_str());
    pointers_.push_back(nullptr);
  }
  int argc() const { return static_cast<int>(pointers_.size()) - 1; }
  const char* const* argv() const { return pointers_.data(); }

 private:
  const std::vector<std::string> arguments_;
  std::vector<const char*> pointers_;
};

inline void WriteFile(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

}  // namespace weightbroker::testing
