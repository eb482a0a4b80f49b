#include "client/examples/torch_engine/bert_model.h"

#include <ATen/ATen.h>

#include <cmath>
#include <string>

namespace example {
namespace {

// Modules without code of their own: they are there for the names.
std::shared_ptr<torch::nn::Module> Group(torch::nn::Module& parent, const std::string& name) {
  return parent.register_module(name, std::make_shared<torch::nn::Module>());
}

}  // namespace

Linear::Linear(int64_t in, int64_t out, const at::TensorOptions& options)
    : weight(register_parameter("weight", at::empty({out, in}, options))),
      bias(register_parameter("bias", at::empty({out}, options))) {}

at::Tensor Linear::operator()(const at::Tensor& input) const { return at::linear(input, weight, bias); }

LayerNorm::LayerNorm(const BertConfig& config, const at::TensorOptions& options)
    : epsilon(config.norm_epsilon),
      weight(register_parameter("weight", at::empty({config.hidden}, options))),
      bias(register_parameter("bias", at::empty({config.hidden}, options))) {}

at::Tensor LayerNorm::operator()(const at::Tensor& input) const {
  return at::layer_norm(input, weight.sizes(), weight, bias, epsilon);
}

Embedding::Embedding(int64_t rows, int64_t columns, const at::TensorOptions& options)
    : weight(register_parameter("weight", at::empty({rows, columns}, options))) {}

at::Tensor Embedding::operator()(const at::Tensor& indices) const { return at::embedding(weight, indices); }

BertEmbeddings::BertEmbeddings(const BertConfig& config, const at::TensorOptions& options) {
  const auto add = [&](const char* name, int64_t rows) {
    return register_module(name, std::make_shared<Embedding>(rows, config.hidden, options));
  };
  word_embeddings = add("word_embeddings", config.vocabulary);
  position_embeddings = add("position_embeddings", config.positions);
  token_type_embeddings = add("token_type_embeddings", config.token_types);
  norm = register_module("LayerNorm", std::make_shared<LayerNorm>(config, options));
  if (config.has_position_ids) {
    position_ids = register_buffer("position_ids", at::empty({1, config.positions}, options.dtype(at::kLong)));
  }
}

at::Tensor BertEmbeddings::operator()(const at::Tensor& input_ids) const {
  const int64_t tokens = input_ids.size(1);
  const at::Tensor positions =
      position_ids.defined() ? position_ids.narrow(1, 0, tokens) : at::arange(tokens, input_ids.options()).unsqueeze(0);
  const at::Tensor token_types = at::zeros_like(input_ids);
  return (*norm)((*word_embeddings)(input_ids) + (*token_type_embeddings)(token_types) +
                 (*position_embeddings)(positions));
}

BertLayer::BertLayer(const BertConfig& config, const at::TensorOptions& options) : heads(config.heads) {
  const auto linear = [&](int64_t in, int64_t out) { return std::make_shared<Linear>(in, out, options); };
  const auto layer_norm = [&] { return std::make_shared<LayerNorm>(config, options); };
  const auto attention = Group(*this, "attention");
  const auto self = Group(*attention, "self");
  query = self->register_module("query", linear(config.hidden, config.hidden));
  key = self->register_module("key", linear(config.hidden, config.hidden));
  value = self->register_module("value", linear(config.hidden, config.hidden));
  const auto attention_end = Group(*attention, "output");
  attention_output = attention_end->register_module("dense", linear(config.hidden, config.hidden));
  attention_norm = attention_end->register_module("LayerNorm", layer_norm());
  intermediate = Group(*this, "intermediate")->register_module("dense", linear(config.hidden, config.intermediate));
  const auto end = Group(*this, "output");
  output = end->register_module("dense", linear(config.intermediate, config.hidden));
  output_norm = end->register_module("LayerNorm", layer_norm());
}

at::Tensor BertLayer::Attend(const at::Tensor& hidden, const at::Tensor& mask) const {
  const auto split = [&](const at::Tensor& projected) {
    return projected.view({hidden.size(0), hidden.size(1), heads, -1}).transpose(1, 2);
  };
  const at::Tensor attended =
      at::scaled_dot_product_attention(split((*query)(hidden)), split((*key)(hidden)), split((*value)(hidden)), mask);
  return attended.transpose(1, 2).reshape(hidden.sizes());
}

at::Tensor BertLayer::operator()(const at::Tensor& hidden, const at::Tensor& mask) const {
  const at::Tensor attended = (*attention_norm)((*attention_output)(Attend(hidden, mask)) + hidden);
  return (*output_norm)((*output)(at::gelu((*intermediate)(attended))) + attended);
}

BertModel::BertModel(const BertConfig& config, const at::TensorOptions& options) {
  embeddings_ = register_module("embeddings", std::make_shared<BertEmbeddings>(config, options));
  const auto layers = Group(*Group(*this, "encoder"), "layer");
  for (int64_t i = 0; i < config.layers; ++i) {
    layers_.push_back(layers->register_module(std::to_string(i), std::make_shared<BertLayer>(config, options)));
  }
  pooler_ =
      Group(*this, "pooler")->register_module("dense", std::make_shared<Linear>(config.hidden, config.hidden, options));
}

at::Tensor BertModel::Embed(const at::Tensor& input_ids, const at::Tensor& attention_mask) const {
  const at::Tensor attends_to = attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1);  // [sentences, 1, 1, tokens]
  at::Tensor hidden = (*embeddings_)(input_ids);
  for (const auto& layer : layers_) hidden = (*layer)(hidden, attends_to);
  const at::Tensor weights = attention_mask.unsqueeze(-1).to(hidden.scalar_type());
  const at::Tensor mean = (hidden * weights).sum(1) / weights.sum(1).clamp_min(1e-9);
  return mean / mean.norm(2, 1, /*keepdim=*/true).clamp_min(1e-12);
}

}  // namespace example
