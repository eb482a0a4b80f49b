#include "common/publish/digest_tensors.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "common/base/mutex.h"

namespace weightbroker {
namespace {

constexpr size_t kPieceBytes = 16 << 20;  // a multiple of a word, so that pieces' sums can be merged

struct Piece {
  size_t tensor;
  size_t offset_bytes;
};

std::vector<Piece> CutIntoPieces(std::span<const std::span<const std::byte>> tensors) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (size_t offset = 0; offset < tensors[i].size(); offset += kPieceBytes) pieces.push_back({i, offset});
  }
  return pieces;
}

}  // namespace

std::vector<Digest> DigestTensors(std::span<const std::span<const std::byte>> tensors, int threads) {
  const std::vector<Piece> pieces = CutIntoPieces(tensors);
  std::vector<DigestAccumulator> sums(tensors.size());
  Mutex mutex;  // guards sums
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) {
      const auto bytes = tensors[pieces[i].tensor].subspan(pieces[i].offset_bytes);
      DigestAccumulator sum;
      sum.Add(static_cast<int64_t>(pieces[i].offset_bytes), bytes.first(std::min(bytes.size(), kPieceBytes)));
      MutexLock lock(mutex);
      sums[pieces[i].tensor].Merge(sum);
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads && static_cast<size_t>(i) < pieces.size(); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  std::vector<Digest> digests;
  for (size_t i = 0; i < tensors.size(); ++i) {
    digests.push_back(sums[i].Finish(static_cast<int64_t>(tensors[i].size())));
  }
  return digests;
}

}  // namespace weightbroker
