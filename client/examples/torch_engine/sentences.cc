#include "client/examples/torch_engine/sentences.h"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace example {
namespace {

template <typename Row>
bool AreOfOneLength(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    if (row.empty() || row.size() != rows.front().size()) return false;
  }
  return !rows.empty();
}

}  // namespace

std::optional<Sentences> ReadSentences(const std::string& path) {
  std::ifstream file(path);
  Sentences sentences;
  try {
    const nlohmann::json json = nlohmann::json::parse(file);
    json.at("input_ids").get_to(sentences.input_ids);
    json.at("attention_mask").get_to(sentences.attention_mask);
    if (json.contains("embeddings")) json.at("embeddings").get_to(sentences.embeddings);
  } catch (const nlohmann::json::exception& error) {
    fprintf(stderr, "%s: %s\n", path.c_str(), error.what());
    return std::nullopt;
  }
  const bool fits = AreOfOneLength(sentences.input_ids) && AreOfOneLength(sentences.attention_mask) &&
                    sentences.input_ids.size() == sentences.attention_mask.size() &&
                    sentences.input_ids.front().size() == sentences.attention_mask.front().size() &&
                    (sentences.embeddings.empty() || (AreOfOneLength(sentences.embeddings) &&
                                                      sentences.embeddings.size() == sentences.input_ids.size()));
  if (fits) return sentences;
  fprintf(stderr, "%s: the rows do not fit each other\n", path.c_str());
  return std::nullopt;
}

}  // namespace example
