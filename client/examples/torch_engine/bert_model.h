// A BERT encoder that gives one embedding a sentence, as all-MiniLM-L6-v2 is used: the tokens' last hidden states,
// averaged and scaled to length one. Names of parameters are those of the checkpoint.
//
//   auto model = std::make_shared<example::BertModel>(example::BertConfig(), at::TensorOptions(at::kMeta));
//   weightbroker::BindModule(*model, weights);
//   at::Tensor embeddings = model->Embed(input_ids, attention_mask);       // [sentences, hidden]
//
// It throws what torch throws.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

namespace example {

struct BertConfig {
  int64_t vocabulary = 30522;
  int64_t hidden = 384;
  int64_t layers = 6;
  int64_t heads = 12;
  int64_t intermediate = 1536;
  int64_t positions = 512;
  int64_t token_types = 2;
  double norm_epsilon = 1e-12;
  // Whether the checkpoint has the buffer embeddings.position_ids: older versions of transformers wrote it.
  bool has_position_ids = false;
};

struct Linear : torch::nn::Module {
  Linear(int64_t in, int64_t out, const at::TensorOptions& options);
  at::Tensor operator()(const at::Tensor& input) const;

  at::Tensor weight;
  at::Tensor bias;
};

struct LayerNorm : torch::nn::Module {
  LayerNorm(const BertConfig& config, const at::TensorOptions& options);
  at::Tensor operator()(const at::Tensor& input) const;

  double epsilon;
  at::Tensor weight;
  at::Tensor bias;
};

struct Embedding : torch::nn::Module {
  Embedding(int64_t rows, int64_t columns, const at::TensorOptions& options);
  at::Tensor operator()(const at::Tensor& indices) const;

  at::Tensor weight;
};

struct BertEmbeddings : torch::nn::Module {
  BertEmbeddings(const BertConfig& config, const at::TensorOptions& options);
  at::Tensor operator()(const at::Tensor& input_ids) const;

  std::shared_ptr<Embedding> word_embeddings;
  std::shared_ptr<Embedding> position_embeddings;
  std::shared_ptr<Embedding> token_type_embeddings;
  std::shared_ptr<LayerNorm> norm;
  at::Tensor position_ids;  // undefined if the checkpoint has none
};

struct BertLayer : torch::nn::Module {
  BertLayer(const BertConfig& config, const at::TensorOptions& options);
  at::Tensor operator()(const at::Tensor& hidden, const at::Tensor& mask) const;

  int64_t heads;
  std::shared_ptr<Linear> query;
  std::shared_ptr<Linear> key;
  std::shared_ptr<Linear> value;
  std::shared_ptr<Linear> attention_output;
  std::shared_ptr<LayerNorm> attention_norm;
  std::shared_ptr<Linear> intermediate;
  std::shared_ptr<Linear> output;
  std::shared_ptr<LayerNorm> output_norm;

 private:
  at::Tensor Attend(const at::Tensor& hidden, const at::Tensor& mask) const;
};

class BertModel : public torch::nn::Module {
 public:
  // With options on the meta device no storage is made.
  BertModel(const BertConfig& config, const at::TensorOptions& options);

  // `input_ids` and `attention_mask` are [sentences, tokens] of Long, the mask 1 for what is no padding.
  at::Tensor Embed(const at::Tensor& input_ids, const at::Tensor& attention_mask) const;

 private:
  std::shared_ptr<BertEmbeddings> embeddings_;
  std::vector<std::shared_ptr<BertLayer>> layers_;
  std::shared_ptr<Linear> pooler_;  // the checkpoint has it; sentence embeddings do not use it
};

}  // namespace example
