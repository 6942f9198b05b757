"""The Llama family: Llama, SmolLM and others that call themselves LlamaForCausalLM.

Says what is computed, in which order and under which names a checkpoint keeps the weights; every operation and
every weight is the business of `gpu_worker/ops.py`.

Shapes: T = tokens of the step, R = some of them, E = hidden size, H = query heads, K = KV heads,
D = head dimension, F = H * D, Q = (H + 2 K) * D, M = MLP width, V = vocabulary.
"""

from torch import Tensor

from gpu_worker.attention.groups import AttentionShape
from gpu_worker.kv.cache import KVCache
from gpu_worker.ops import Ops, silu_mul
from gpu_worker.runner.inputs import StepInputs
from plugins.model_loader import ModelConfig


class Llama:
    """Embedding, layers of attention and MLP around a residual stream, norm, head."""

    def __init__(self, config: ModelConfig, ops: Ops, shape: AttentionShape) -> None:
        self._embed = ops.embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [_Layer(index, config, shape, ops) for index in range(config.num_hidden_layers)]
        self._norm = ops.rms_norm("model.norm.weight", config.hidden_size, config.rms_norm_eps)
        self._head = (
            ops.tied_head(self._embed)
            if config.tie_word_embeddings
            else ops.head("lm_head.weight", config.vocab_size, config.hidden_size)
        )
        self._rotary = ops.rotary(config.rope_theta, config.head_dim, config.max_position_embeddings)

    def forward(self, inputs: StepInputs, cache: KVCache) -> Tensor:
        """Return what the head reads of each token: [T, E] float32."""
        x_TE = self._embed(inputs.token_ids)
        rotation = self._rotary.at(inputs.positions)
        for layer in self._layers:
            q_TF = layer.attention.rotary_and_cache_write(
                layer.index, layer.qkv(layer.input_norm(x_TE)), self._rotary, rotation, inputs, cache
            )
            x_TE.add_(layer.out(layer.attention.attend(layer.index, q_TF, inputs, cache)))
            x_TE.add_(layer.down(silu_mul(layer.gate_up(layer.post_norm(x_TE)))))
        return x_TE

    def head(self, x_RE: Tensor) -> Tensor:
        """Return the scores that some rows of `forward` lead to: [R, V] float32."""
        return self._head(self._norm(x_RE))


class _Layer:
    def __init__(self, index: int, config: ModelConfig, shape: AttentionShape, ops: Ops) -> None:
        prefix = f"model.layers.{index}"
        queries, keys = config.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.index = index
        self.input_norm = ops.rms_norm(f"{prefix}.input_layernorm.weight", hidden, eps)
        self.qkv = ops.linear(
            [
                (f"{prefix}.self_attn.q_proj.weight", queries),
                (f"{prefix}.self_attn.k_proj.weight", keys),
                (f"{prefix}.self_attn.v_proj.weight", keys),
            ],
            hidden,
        )
        self.attention = ops.attention(shape)
        self.out = ops.linear([(f"{prefix}.self_attn.o_proj.weight", hidden)], queries)
        self.post_norm = ops.rms_norm(f"{prefix}.post_attention_layernorm.weight", hidden, eps)
        self.gate_up = ops.linear(
            [(f"{prefix}.mlp.gate_proj.weight", inner), (f"{prefix}.mlp.up_proj.weight", inner)], hidden
        )
        self.down = ops.linear([(f"{prefix}.mlp.down_proj.weight", hidden)], inner)
