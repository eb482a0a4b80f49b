// A folder that is there as long as the object is.
#pragma once

#include <string>
#include <string_view>

namespace weightbroker::testing {

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(std::string_view name) const { return path_ + "/" + std::string(name); }

 private:
  std::string path_;
};

// Whole files; both stop the test program if the system refuses.
void WriteFile(const std::string& path, std::string_view contents);
std::string ReadFile(const std::string& path);

}  // namespace weightbroker::testing
