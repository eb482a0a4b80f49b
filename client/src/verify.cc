#include "client/src/verify.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <span>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/strings.h"
#include "common/base/thread.h"
#include "common/memory/digest.h"

namespace weightbroker::client {
namespace {

constexpr int64_t kPieceBytes = 16 << 20;  // a multiple of 8, so that pieces' sums can be merged

struct Piece {
  size_t tensor;
  int64_t offset_bytes;
  int64_t size_bytes;
};

std::vector<Piece> CutIntoPieces(const std::vector<Tensor>& tensors) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].alias_of.empty()) continue;  // its memory is verified under its own name
    for (int64_t offset = 0; offset < tensors[i].size_bytes; offset += kPieceBytes) {
      pieces.push_back({i, offset, std::min(kPieceBytes, tensors[i].size_bytes - offset)});
    }
  }
  return pieces;
}

// Each tensor's sum, filled by several threads.
class Sums {
 public:
  explicit Sums(size_t count) : sums_(count) {}

  void Merge(size_t tensor, const DigestAccumulator& sum) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sums_[tensor].Merge(sum);
  }
  const DigestAccumulator& operator[](size_t tensor) const { return sums_[tensor]; }

 private:
  std::mutex mutex_;
  std::vector<DigestAccumulator> sums_;
};

void DigestPiece(const Tensor& tensor, const Piece& piece, Sums* sums) {
  DigestAccumulator sum;
  sum.Add(piece.offset_bytes, std::span(tensor.data + piece.offset_bytes, static_cast<size_t>(piece.size_bytes)));
  sums->Merge(piece.tensor, sum);
}

}  // namespace

absl::Status CheckDigest(const Tensor& tensor, const Digest& found) {
  const TensorDigest& stated = tensor.digest;
  Digest expected;
  std::transform(stated.begin(), stated.end(), expected.begin(), [](unsigned char byte) { return std::byte{byte}; });
  if (found == expected) return absl::OkStatus();
  return MakeError(
      Reason::kDigestMismatch,
      absl::StrCat("tensor \"", ToAbsl(tensor.name), "\" has the digest ", DigestHex(found), " but its manifest says ",
                   DigestHex(expected), ": its bytes are not those that were loaded; do not use these weights"),
      {{"tensor", std::string(tensor.name)},
       {"expected_digest", DigestHex(expected)},
       {"found_digest", DigestHex(found)}});
}

absl::Status VerifyDigests(const std::vector<Tensor>& tensors, int threads) {
  const std::vector<Piece> pieces = CutIntoPieces(tensors);
  Sums sums(tensors.size());
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < pieces.size(); i = next++) DigestPiece(tensors[pieces[i].tensor], pieces[i], &sums);
  };
  std::vector<std::thread> workers;
  for (int i = 1; i < threads; ++i) {
    auto worker = StartThread("verifying tensors", work);
    if (!worker.ok()) break;  // those that are there do all of it
    workers.push_back(*std::move(worker));
  }
  work();
  for (std::thread& worker : workers) worker.join();

  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].alias_of.empty()) continue;
    absl::Status status = CheckDigest(tensors[i], sums[i].Finish(tensors[i].size_bytes));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace weightbroker::client
