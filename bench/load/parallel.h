// Several threads, each with a buffer of its own that has been touched before any time is taken.
//
//   const Buffers buffers({.count = 4, .size_bytes = 4 << 20, .huge_pages = true});
//   RETURN_IF_ERROR(ForEachInParallel(chunks, buffers, [&](int64_t i, std::span<std::byte> buffer) { ... }));
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace weightbroker::bench {

int CoreCount();

struct BufferShape {
  int count = 1;
  int64_t size_bytes = 0;
  bool huge_pages = false;  // a wish
};

// Aligned to huge pages, and so for O_DIRECT.
class Buffers {
 public:
  explicit Buffers(const BufferShape& shape);

  int count() const { return static_cast<int>(memory_.size()); }
  std::span<std::byte> operator[](int index) const {
    return {memory_[static_cast<size_t>(index)].get(), static_cast<size_t>(size_bytes_)};
  }

 private:
  struct Deleter {
    void operator()(std::byte* data) const;
  };

  int64_t size_bytes_;
  std::vector<std::unique_ptr<std::byte, Deleter>> memory_;
};

// Runs `body(i, buffer)` for i in [0, count), with one thread for each buffer. Returns the first error; no thread is
// left then either.
absl::Status ForEachInParallel(int64_t count, const Buffers& buffers,
                               const std::function<absl::Status(int64_t, std::span<std::byte>)>& body);

}  // namespace weightbroker::bench
