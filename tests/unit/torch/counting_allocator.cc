#include "tests/unit/torch/counting_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

namespace weightbroker::testing {
namespace {

constexpr uint8_t kAboveTorchs = 1;  // priorities of allocators; torch's own has 0

class CountingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    bytes += static_cast<int64_t>(size);
    return c10::GetDefaultCPUAllocator()->allocate(size);
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  std::atomic<int64_t> bytes{0};
};

// For the whole process: tensors that were allocated by it may outlive any test.
CountingAllocator& Counting() {
  static auto* const allocator = [] {
    auto* made = new CountingAllocator;
    c10::SetAllocator(c10::kCPU, made, kAboveTorchs);
    return made;
  }();
  return *allocator;
}

}  // namespace

CountAllocations::CountAllocations() { Counting().bytes = 0; }

CountAllocations::~CountAllocations() = default;

int64_t CountAllocations::bytes() const { return Counting().bytes; }

}  // namespace weightbroker::testing
