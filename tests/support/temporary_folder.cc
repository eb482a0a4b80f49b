#include "tests/support/temporary_folder.h"

#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace weightbroker::testing {
namespace {

[[noreturn]] void Stop(const std::string& what) {
  std::fprintf(stderr, "test support: %s failed\n", what.c_str());
  std::abort();
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::string path = (std::filesystem::temp_directory_path() / "weightbroker_test.XXXXXX").string();
  if (mkdtemp(path.data()) == nullptr) Stop("mkdtemp " + path);
  path_ = std::filesystem::canonical(path).string();
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void WriteFile(const std::string& path, std::string_view contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  if (!file.flush()) Stop("write " + path);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Stop("read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace weightbroker::testing
