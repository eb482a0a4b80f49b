// replay TARGET FOLDER...: feeds every file of the folders to one fuzz program, in the order of their names. Ends by a
// signal where an input breaks a rule; the input is named before it is fed.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>

#include "tests/fuzz/target.h"

namespace weightbroker {
namespace {

std::map<std::string, FuzzFunction>& Targets() {
  static auto* const targets = new std::map<std::string, FuzzFunction>();
  return *targets;
}

int Replay(FuzzFunction function, const std::set<std::filesystem::path>& files) {
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::fprintf(stderr, "%s\n", path.filename().c_str());
    function(input);
  }
  std::printf("%zu inputs\n", files.size());
  return files.empty() ? 1 : 0;
}

}  // namespace

bool AddFuzzTarget(const char* name, FuzzFunction function) { return Targets().emplace(name, function).second; }

}  // namespace weightbroker

int main(int argc, char** argv) {
  const auto target = argc < 2 ? weightbroker::Targets().end() : weightbroker::Targets().find(argv[1]);
  if (target == weightbroker::Targets().end()) {
    std::fprintf(stderr, "usage: replay TARGET FOLDER...; targets:");
    for (const auto& [name, function] : weightbroker::Targets()) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "\n");
    return 2;
  }
  std::set<std::filesystem::path> files;
  for (int i = 2; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.insert(entry.path());
  }
  return weightbroker::Replay(target->second, files);
}
