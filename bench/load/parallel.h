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

#include "absl/status/status.h"

namespace weightbroker::bench {

int CoreCount();

struct BufferShape {
  int count = 1;
  int64_t size_bytes = 0;
  bool huge_pages = false;  // a wish
};

// Aligned for O_DIRECT if their size is a multiple of its blocks. One behind the other on huge pages, so that those
// that are shorter than a huge page have some too: with base pages the kernel cuts a read of 1 MiB in two.
class Buffers {
 public:
  explicit Buffers(const BufferShape& shape);

  int count() const { return count_; }
  std::span<std::byte> operator[](int index) const {
    const auto size = static_cast<size_t>(size_bytes_);
    return {memory_.get() + static_cast<size_t>(index) * size, size};
  }

 private:
  struct Deleter {
    void operator()(std::byte* data) const;
  };

  int count_;
  int64_t size_bytes_;
  std::unique_ptr<std::byte, Deleter> memory_;
};

// Runs `body(i, buffer)` for i in [0, count), with one thread for each buffer. Returns the first error; no thread is
// left then either.
absl::Status ForEachInParallel(int64_t count, const Buffers& buffers,
                               const std::function<absl::Status(int64_t, std::span<std::byte>)>& body);

}  // namespace weightbroker::bench
