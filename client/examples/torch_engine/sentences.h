// Sentences as token ids, with the embeddings that another program gave them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace example {

struct Sentences {
  // One row a sentence, all of one length; a mask of 1 says that a token is no padding.
  std::vector<std::vector<int64_t>> input_ids;
  std::vector<std::vector<int64_t>> attention_mask;
  std::vector<std::vector<float>> embeddings;  // empty: not known
};

// Reads the JSON that tests/torch/transformers_reference.py writes. Empty, having said why on stderr, if it cannot.
std::optional<Sentences> ReadSentences(const std::string& path);

}  // namespace example
