"""The models of the fixtures: their published config values, of which only the numbers of layers, experts and rows of
the vocabulary are smaller here, and what an engine makes of them."""

from walk import Illegal, linear


class Config(dict):
    __getattr__ = dict.__getitem__


def model_layers(m, c):
    if hasattr(m, "set_layers"):
        m.set_layers(c.num_hidden_layers, c.get("num_nextn_predict_layers", 0))
    return range(c.num_hidden_layers)


def ends(m, c, embedding="model.embed_tokens", norm="model.norm", head="lm_head"):
    m.at(stage="first")
    m.vocab(embedding + ".weight", c.hidden_size)
    m.at(stage="last")
    m.whole(norm + ".weight", (c.hidden_size,))
    if not c.get("tie_word_embeddings"):
        m.vocab(head + ".weight", c.hidden_size)


def norms(m, c, prefix, names):
    for name in names.split():
        m.whole(f"{prefix}{name}.weight", (c.hidden_size,))


def attention(m, prefix, hidden, heads, kv, size, bias=False, o_bias=False):
    m.fused(
        prefix + "qkv_proj",
        [
            linear(prefix + "q_proj", heads * size, hidden, rows=m.heads(heads, size), bias=bias),
            linear(prefix + "k_proj", kv * size, hidden, rows=m.kv_heads(kv, size), bias=bias),
            linear(prefix + "v_proj", kv * size, hidden, rows=m.kv_heads(kv, size), bias=bias),
        ],
    )
    m.linear(linear(prefix + "o_proj", hidden, heads * size, columns=m.heads(heads, size), bias=o_bias))


def mlp(m, prefix, hidden, inner):
    m.fused(
        prefix + "gate_up_proj",
        [linear(prefix + name, inner, hidden, rows=m.even(inner)) for name in ("gate_proj", "up_proj")],
    )
    m.linear(linear(prefix + "down_proj", hidden, inner, columns=m.even(inner)))


def moe(m, prefix, count, hidden, inner, names=("gate_proj", "up_proj", "down_proj")):
    def of_expert(p):
        gate, up, down = (p + name for name in names)
        return [
            linear(gate, inner, hidden, rows=m.expert_even(inner)),
            linear(up, inner, hidden, rows=m.expert_even(inner)),
            linear(down, hidden, inner, columns=m.expert_even(inner)),
        ]

    m.experts(prefix, count, of_expert, names)


def llama_like(m, c, bias=False, qk_norm=None, layer_norms="input_layernorm post_attention_layernorm"):
    size = c.get("head_dim") or c.hidden_size // c.num_attention_heads
    heads, kv = c.num_attention_heads, c.num_key_value_heads
    for layer in model_layers(m, c):
        p = f"model.layers.{layer}."
        m.at(layer=layer)
        norms(m, c, p, layer_norms)
        attention(m, p + "self_attn.", c.hidden_size, heads, kv, size, bias)
        if qk_norm == "head":
            m.whole(p + "self_attn.q_norm.weight", (size,))
            m.whole(p + "self_attn.k_norm.weight", (size,))
        if qk_norm == "all":
            m.whole(p + "self_attn.q_norm.weight", (heads * size,))
            m.whole(p + "self_attn.k_norm.weight", (kv * size,))
        if "experts" in c:
            m.whole(p + "mlp.gate.weight", (c.experts, c.hidden_size))
            moe(m, p + "mlp.experts.", c.experts, c.hidden_size, c.moe_intermediate_size)
        else:
            mlp(m, p + "mlp.", c.hidden_size, c.intermediate_size)
    ends(m, c)


def llama(m, c):
    llama_like(m, c)


def qwen2(m, c):
    llama_like(m, c, bias=True)


def qwen3(m, c):
    llama_like(m, c, qk_norm="head")


def qwen3_moe(m, c):
    llama_like(m, Config(c, experts=c.num_experts), qk_norm="head")


def olmo2(m, c):
    llama_like(m, c, qk_norm="all", layer_norms="post_attention_layernorm post_feedforward_layernorm")


GEMMA_NORMS = "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"


def gemma2(m, c):
    llama_like(m, c, layer_norms=GEMMA_NORMS)


def gemma3(m, c):
    t = Config(c.text_config)
    heads, kv, size = t.get("num_attention_heads", 8), t.get("num_key_value_heads", 4), t.get("head_dim", 256)
    model_layers(m, t)
    m.at(stage="first")
    m.whole("multi_modal_projector.mm_soft_emb_norm.weight", (1152,))
    m.whole("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", (1152, 1152))
    m.whole("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.bias", (1152,))
    m.vocab("language_model.model.embed_tokens.weight", t.hidden_size)
    for layer in range(t.num_hidden_layers):
        p = f"language_model.model.layers.{layer}."
        m.at(layer=layer)
        norms(m, t, p, GEMMA_NORMS)
        attention(m, p + "self_attn.", t.hidden_size, heads, kv, size)
        m.whole(p + "self_attn.q_norm.weight", (size,))
        m.whole(p + "self_attn.k_norm.weight", (size,))
        mlp(m, p + "mlp.", t.hidden_size, t.intermediate_size)
    m.at(stage="last")
    m.whole("language_model.model.norm.weight", (t.hidden_size,))


def deepseek(m, c):
    heads, nope, rope, v = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    hidden, layers = c.hidden_size, model_layers(m, c)
    for layer in range(len(layers) + c.get("num_nextn_predict_layers", 0)):
        p, a = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        m.at(layer=layer)
        norms(m, c, p, "input_layernorm post_attention_layernorm")
        if c.q_lora_rank:
            m.linear(linear(a + "q_a_proj", c.q_lora_rank, hidden))
            m.whole(a + "q_a_layernorm.weight", (c.q_lora_rank,))
            m.linear(linear(a + "q_b_proj", heads * (nope + rope), c.q_lora_rank, rows=m.heads(heads, nope + rope)))
        else:
            m.linear(linear(a + "q_proj", heads * (nope + rope), hidden, rows=m.heads(heads, nope + rope)))
        m.linear(linear(a + "kv_a_proj_with_mqa", c.kv_lora_rank + rope, hidden))
        m.whole(a + "kv_a_layernorm.weight", (c.kv_lora_rank,))
        m.linear(linear(a + "kv_b_proj", heads * (nope + v), c.kv_lora_rank, rows=m.heads(heads, nope + v)))
        m.linear(linear(a + "o_proj", hidden, heads * v, columns=m.heads(heads, v)))
        if layer < c.first_k_dense_replace:
            mlp(m, p + "mlp.", hidden, c.intermediate_size)
        else:
            m.whole(p + "mlp.gate.weight", (c.n_routed_experts, hidden))
            if c.get("topk_method") == "noaux_tc":
                m.whole(p + "mlp.gate.e_score_correction_bias", (c.n_routed_experts,), dtype="F32")
            moe(m, p + "mlp.experts.", c.n_routed_experts, hidden, c.moe_intermediate_size)
            mlp(m, p + "mlp.shared_experts.", hidden, c.moe_intermediate_size * c.n_shared_experts)
        if layer >= len(layers):
            m.vocab(p + "embed_tokens.weight", hidden)
            norms(m, c, p, "enorm hnorm shared_head.norm")
            m.linear(linear(p + "eh_proj", hidden, 2 * hidden), quantizable=False)
            m.vocab(p + "shared_head.head.weight", hidden)
    ends(m, c)


def bailing(m, c):
    heads, kv, size, hidden = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
    for layer in model_layers(m, c):
        p, a = f"model.layers.{layer}.", f"model.layers.{layer}.attention."
        m.at(layer=layer)
        norms(m, c, p, "input_layernorm post_attention_layernorm")
        m.linear(stored_qkv(m, a + "query_key_value", heads, kv, size, hidden))
        m.linear(linear(a + "dense", hidden, heads * size, columns=m.heads(heads, size)))
        m.whole(a + "query_layernorm.weight", (size,))
        m.whole(a + "key_layernorm.weight", (size,))
        if layer < c.first_k_dense_replace:
            mlp(m, p + "mlp.", hidden, c.intermediate_size)
        else:
            m.whole(p + "mlp.gate.weight", (c.num_experts, hidden))
            m.whole(p + "mlp.gate.expert_bias", (c.num_experts,), dtype="F32")
            moe(m, p + "mlp.experts.", c.num_experts, hidden, c.moe_intermediate_size)
            mlp(m, p + "mlp.shared_experts.", hidden, c.moe_intermediate_size * c.num_shared_experts)
    ends(m, c, embedding="model.word_embeddings")


def stored_qkv(m, name, heads, kv, size, hidden, bias=False):
    """[Q|K|V] in one tensor of the checkpoint."""
    rows = None
    if m.heads(heads, size) is not None:
        q, k = m.heads(heads, size)[0], m.kv_heads(kv, size)[0]
        rows = [q] + [(k[0] + start, k[1] + start) for start in (heads * size, (heads + kv) * size)]
    return linear(name, (heads + 2 * kv) * size, hidden, rows=rows, bias=bias)


def stored_gate_up(m, name, inner, hidden):
    rows = None
    if m.even(inner) is not None:
        (a, b), = m.even(inner)
        rows = [(a, b), (inner + a, inner + b)]
    return linear(name, 2 * inner, hidden, rows=rows)


def phi3(m, c):
    heads, kv, hidden = c.num_attention_heads, c.num_key_value_heads, c.hidden_size
    size = hidden // heads
    for layer in model_layers(m, c):
        p = f"model.layers.{layer}."
        m.at(layer=layer)
        norms(m, c, p, "input_layernorm post_attention_layernorm")
        m.linear(stored_qkv(m, p + "self_attn.qkv_proj", heads, kv, size, hidden))
        m.linear(linear(p + "self_attn.o_proj", hidden, heads * size, columns=m.heads(heads, size)))
        m.linear(stored_gate_up(m, p + "mlp.gate_up_proj", c.intermediate_size, hidden))
        m.linear(linear(p + "mlp.down_proj", hidden, c.intermediate_size, columns=m.even(c.intermediate_size)))
    ends(m, c)


def glm4(m, c):
    for layer in model_layers(m, c):
        p = f"model.layers.{layer}."
        m.at(layer=layer)
        norms(m, c, p, "input_layernorm post_attention_layernorm post_self_attn_layernorm post_mlp_layernorm")
        attention(m, p + "self_attn.", c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, bias=True)
        m.linear(stored_gate_up(m, p + "mlp.gate_up_proj", c.intermediate_size, c.hidden_size))
        m.linear(linear(p + "mlp.down_proj", c.hidden_size, c.intermediate_size, columns=m.even(c.intermediate_size)))
    ends(m, c)


def glm4_moe(m, c):
    hidden, layers = c.hidden_size, model_layers(m, c)
    for layer in range(len(layers) + c.num_nextn_predict_layers):
        p = f"model.layers.{layer}."
        m.at(layer=layer)
        norms(m, c, p, "input_layernorm post_attention_layernorm")
        attention(m, p + "self_attn.", hidden, c.num_attention_heads, c.num_key_value_heads, c.head_dim, bias=True)
        if layer < c.first_k_dense_replace:
            mlp(m, p + "mlp.", hidden, c.intermediate_size)
        else:
            m.whole(p + "mlp.gate.weight", (c.n_routed_experts, hidden))
            m.whole(p + "mlp.gate.e_score_correction_bias", (c.n_routed_experts,), dtype="F32")
            moe(m, p + "mlp.experts.", c.n_routed_experts, hidden, c.moe_intermediate_size)
            mlp(m, p + "mlp.shared_experts.", hidden, c.moe_intermediate_size * c.n_shared_experts)
        if layer >= len(layers):
            m.vocab(p + "embed_tokens.weight", hidden)
            norms(m, c, p, "enorm hnorm shared_head.norm")
            m.linear(linear(p + "eh_proj", hidden, 2 * hidden), quantizable=False)
            m.vocab(p + "shared_head.head.weight", hidden)
    ends(m, c)


def mixtral(m, c, minimax=False):
    hidden, heads, kv = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    size = c.get("head_dim") or hidden // heads
    for layer in model_layers(m, c):
        p, b = f"model.layers.{layer}.", f"model.layers.{layer}.block_sparse_moe."
        m.at(layer=layer)
        norms(m, c, p, "input_layernorm post_attention_layernorm")
        attention(m, p + "self_attn.", hidden, heads, kv, size)
        m.whole(b + "gate.weight", (c.num_local_experts, hidden))
        if minimax:
            m.sliced(p + "self_attn.q_norm.weight", (heads * size,), m.heads(heads, size))
            m.sliced(p + "self_attn.k_norm.weight", (kv * size,), m.kv_heads(kv, size, may_replicate=False))
            m.whole(b + "e_score_correction_bias", (c.num_local_experts,), dtype="F32")
        moe(m, b + "experts.", c.num_local_experts, hidden, c.intermediate_size, ("w1", "w3", "w2"))
    ends(m, c)


def minimax_m2(m, c):
    mixtral(m, c, minimax=True)


def gpt_oss(m, c):
    hidden, heads, inner, experts = c.hidden_size, c.num_attention_heads, c.intermediate_size, c.num_local_experts
    for layer in model_layers(m, c):
        p, e = f"model.layers.{layer}.", f"model.layers.{layer}.mlp.experts."
        m.at(layer=layer)
        norms(m, c, p, "input_layernorm post_attention_layernorm")
        attention(m, p + "self_attn.", hidden, heads, c.num_key_value_heads, c.head_dim, bias=True, o_bias=True)
        m.sliced(p + "self_attn.sinks", (heads,), m.heads(heads, 1))
        m.whole(p + "mlp.router.weight", (experts, hidden))
        m.whole(p + "mlp.router.bias", (experts,))
        m.stacked(e + "gate_up_proj", (experts, hidden, 2 * inner), 2, 2, e + "w13_weight", transposed=True)
        m.stacked(e + "gate_up_proj_bias", (experts, 2 * inner), 1, 2, e + "w13_bias")
        m.stacked(e + "down_proj", (experts, inner, hidden), 1, 1, e + "w2_weight", transposed=True)
        m.stacked(e + "down_proj_bias", (experts, hidden), None, 1, e + "w2_bias", first_rank_only=True)
    ends(m, c)


def falcon(m, c):
    hidden, heads = c.hidden_size, c.num_attention_heads
    size = hidden // heads
    for layer in model_layers(m, c):
        p = f"transformer.h.{layer}."
        m.at(layer=layer)
        m.whole(p + "input_layernorm.weight", (hidden,))
        m.whole(p + "input_layernorm.bias", (hidden,))
        m.linear(stored_qkv(m, p + "self_attention.query_key_value", heads, 1, size, hidden))
        m.linear(linear(p + "self_attention.dense", hidden, hidden, columns=m.heads(heads, size)))
        m.linear(linear(p + "mlp.dense_h_to_4h", 4 * hidden, hidden, rows=m.even(4 * hidden)))
        m.linear(linear(p + "mlp.dense_4h_to_h", hidden, 4 * hidden, columns=m.even(4 * hidden)))
    m.at(stage="last")
    m.whole("transformer.ln_f.bias", (hidden,))
    ends(m, c, embedding="transformer.word_embeddings", norm="transformer.ln_f")


def bert(m, c):
    hidden = c.hidden_size
    if getattr(m, "tp", 1) > 1:
        raise Illegal("BERT is not split")
    m.at(stage="first")
    m.whole("embeddings.word_embeddings.weight", (c.vocab_size, hidden))
    m.whole("embeddings.LayerNorm.weight", (hidden,))
    for layer in model_layers(m, c):
        p = f"encoder.layer.{layer}."
        m.at(layer=layer)
        parts = [linear(f"{p}attention.self.{name}", hidden, hidden, bias=True) for name in ("query", "key", "value")]
        m.fused(p + "attention.self.qkv_proj", parts, quantizable=False)
        m.linear(linear(p + "attention.output.dense", hidden, hidden, bias=True), quantizable=False)
        m.linear(linear(p + "intermediate.dense", c.intermediate_size, hidden, bias=True), quantizable=False)
        m.linear(linear(p + "output.dense", hidden, c.intermediate_size, bias=True), quantizable=False)
        m.whole(p + "output.LayerNorm.weight", (hidden,))
    m.at(stage="last")
    m.linear(linear("pooler.dense", hidden, hidden, bias=True), quantizable=False)


def novel(m, c):
    """What tests/data/architectures/novel.json describes: added while the test runs."""
    width, heads, kv = c.width, c.n_heads, c.n_kv_heads
    size = width // heads
    for layer in model_layers(m, Config(num_hidden_layers=c.depth)):
        p, a = f"blocks.{layer}.", f"blocks.{layer}.attn."
        m.at(layer=layer)
        norms(m, Config(hidden_size=width), p, "norm1 norm2")
        m.whole(p + "router.weight", (c.n_experts, width))
        parts = [linear(a + "q", width, width, rows=m.heads(heads, size))]
        parts += [linear(a + name, kv * size, width, rows=m.kv_heads(kv, size)) for name in "kv"]
        m.fused(a + "qkv", parts)
        m.linear(linear(a + "out", width, width, columns=m.heads(heads, size)))
        moe(m, p + "experts.", c.n_experts, width, c.inner, ("gate", "up", "down"))
    m.at(stage="first")
    m.vocab("embed.weight", width)
    m.at(stage="last")
    m.vocab("head.weight", width)


def config(architecture, **values):
    return Config(values, architectures=[architecture])


# name: (walk, config). Sizes are those of the model that is named.
MODELS = {
    "Llama-3.2-1B": (llama, config(
        "LlamaForCausalLM", hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, num_hidden_layers=2, vocab_size=1000, tie_word_embeddings=True)),
    "Mistral-7B-v0.3": (llama, config(
        "MistralForCausalLM", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, num_hidden_layers=1, vocab_size=1024, tie_word_embeddings=False)),
    "Qwen2.5-3B": (qwen2, config(
        "Qwen2ForCausalLM", hidden_size=2048, intermediate_size=11008, num_attention_heads=16, num_key_value_heads=2,
        num_hidden_layers=1, vocab_size=200, tie_word_embeddings=True)),
    "Qwen3-0.6B": (qwen3, config(
        "Qwen3ForCausalLM", hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, num_hidden_layers=3, vocab_size=250, tie_word_embeddings=True)),
    "Qwen3-30B-A3B": (qwen3_moe, config(
        "Qwen3MoeForCausalLM", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=8, num_hidden_layers=2,
        vocab_size=1001, tie_word_embeddings=False)),
    "DeepSeek-V2-Lite": (deepseek, config(
        "DeepseekV2ForCausalLM", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
        n_routed_experts=4, n_shared_experts=2, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=1,
        num_hidden_layers=2, vocab_size=640)),
    "DeepSeek-V3": (deepseek, config(
        "DeepseekV3ForCausalLM", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        n_routed_experts=8, n_shared_experts=1, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=1,
        topk_method="noaux_tc", num_nextn_predict_layers=0, num_hidden_layers=2, vocab_size=1280)),
    "Ling-mini-2.0": (bailing, config(
        "BailingMoeV2ForCausalLM", hidden_size=2048, intermediate_size=5120, moe_intermediate_size=512,
        num_experts=8, num_shared_experts=1, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        first_k_dense_replace=1, num_hidden_layers=3, vocab_size=640, tie_word_embeddings=False)),
    "gemma-2-2b": (gemma2, config(
        "Gemma2ForCausalLM", hidden_size=2304, intermediate_size=9216, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, num_hidden_layers=1, vocab_size=640, tie_word_embeddings=True)),
    "gemma-3-4b-it": (gemma3, config(
        "Gemma3ForConditionalGeneration",
        text_config={"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 1})),
    "Mixtral-8x7B": (mixtral, config(
        "MixtralForCausalLM", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=2, num_hidden_layers=1, vocab_size=320)),
    "Phi-3-mini-4k": (phi3, config(
        "Phi3ForCausalLM", hidden_size=3072, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=32,
        num_hidden_layers=1, vocab_size=640, tie_word_embeddings=False)),
    "GLM-4-9B-0414": (glm4, config(
        "Glm4ForCausalLM", hidden_size=4096, intermediate_size=13696, num_attention_heads=32, num_key_value_heads=2,
        head_dim=128, num_hidden_layers=1, vocab_size=640, tie_word_embeddings=False)),
    "GLM-4.5-Air": (glm4_moe, config(
        "Glm4MoeForCausalLM", hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408,
        n_routed_experts=2, n_shared_experts=1, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
        first_k_dense_replace=1, num_nextn_predict_layers=1, num_hidden_layers=1, vocab_size=320)),
    "gpt-oss-20b": (gpt_oss, config(
        "GptOssForCausalLM", hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=4, num_hidden_layers=1, vocab_size=640)),
    "OLMo-2-0425-1B": (olmo2, config(
        "Olmo2ForCausalLM", hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=16,
        num_hidden_layers=1, vocab_size=640, tie_word_embeddings=False)),
    "MiniMax-M2": (minimax_m2, config(
        "MiniMaxM2ForCausalLM", hidden_size=3072, intermediate_size=1536, num_attention_heads=48,
        num_key_value_heads=8, head_dim=128, num_local_experts=4, num_hidden_layers=1, vocab_size=640)),
    "falcon-7b": (falcon, config(
        "FalconForCausalLM", hidden_size=4544, num_attention_heads=71, multi_query=True,
        new_decoder_architecture=False, num_hidden_layers=1, vocab_size=320)),
    "novel": (novel, config(
        "NovelForCausalLM", width=1024, n_heads=8, n_kv_heads=2, n_experts=4, inner=1024, depth=2, vocab_size=100)),
    "bert-base": (bert, config(
        "BertModel", hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=2,
        vocab_size=500)),
}
