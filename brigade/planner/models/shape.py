"""What a model asks of the hardware: its dimensions and parameter counts. No torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """What a `model_type` builds that its config does not say.

    gated: gate, up and down projections (SwiGLU, GEGLU), against up and down
    norms: of hidden width per layer; qk_norm: one more of head width for queries and for keys
    qkv_bias, out_bias, mlp_bias, expert_bias, router_bias: whether those projections have biases
    norm_bias: of LayerNorm; layer_norm: torch's, which is one kernel, against an RMSNorm written in Python
    fp32_norm: the RMSNorm's weight multiplies in fp32
    fused_qkv: queries, keys and values are slices of one product; fused_gate: gate and up are
    sinks: a learned number per head (gpt-oss); clamped: its experts' activation
    eager: the model has neither SDPA nor FlashAttention in Transformers
    tied: whether the embedding is the head where the config does not say (`tie_word_embeddings` is True by default)
    positions: how many learned position embeddings; rotary: queries and keys are turned
    defaults: what the config class assumes where a published config leaves a number out
    """

    gated: bool = True
    norms: int = 2
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    norm_bias: bool = False
    layer_norm: bool = False
    fp32_norm: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    sinks: bool = False
    clamped: bool = False
    eager: bool = False
    tied: bool = False
    positions: int = 0
    rotary: bool = True
    defaults: tuple[tuple[str, int], ...] = ()


LLAMA = Family()
FAMILIES: dict[str, Family] = {
    "llama": LLAMA, "mistral": LLAMA, "mixtral": LLAMA, "granite": LLAMA, "smollm3": Family(tied=True),
    "phi3": Family(fused_qkv=True, fused_gate=True),
    "qwen2": Family(qkv_bias=True), "qwen2_moe": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True), "qwen3_moe": Family(qk_norm=True),
    "gemma": Family(tied=True, fp32_norm=True), "gemma2": Family(norms=4, tied=True, fp32_norm=True, eager=True),
    "gemma3_text": Family(norms=4, qk_norm=True, tied=True, fp32_norm=True, defaults=(
        ("vocab_size", 262208), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 256))),
    "gpt_oss": Family(qkv_bias=True, out_bias=True, expert_bias=True, router_bias=True, sinks=True, clamped=True,
                      fp32_norm=True, eager=True),
    "gpt2": Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, layer_norm=True, fused_qkv=True,
                   tied=True, positions=1024, rotary=False),
    "mpt": Family(gated=False, layer_norm=True, fused_qkv=True, tied=True, rotary=False),
    "gpt_neox": Family(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, layer_norm=True,
                       fused_qkv=True),
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions.

    ffn: width of a dense layer's MLP; expert_ffn: of one expert; shared_ffn: of the experts that every token visits
    experts, top_k: per MoE layer, and how many of them one token visits; 0 in a dense model
    moe_layers: how many of the layers have experts
    window, windowed_layers: sliding-window attention, and how many layers have it
    other: parameters that are no decoder layer's, embedding's or head's (a vision tower)
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    family: Family = field(default=LLAMA)
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    moe_layers: int = 0
    window: int = 0
    windowed_layers: int = 0
    other: int = 0

    # ---- widths, elements per token ----
    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    # ---- parameters ----
    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden + self.family.positions * self.hidden

    @property
    def head(self) -> int:
        """The output projection, where it is not the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def attention(self) -> int:
        """Of one layer, norms included."""
        f, q, kv, h = self.family, self.query_width, self.key_value_width, self.hidden
        biases = (q + kv) * f.qkv_bias + h * f.out_bias + self.heads * f.sinks
        norms = f.norms * h * (1 + f.norm_bias) + 2 * self.head_dim * f.qk_norm
        return h * (q + kv) + q * h + biases + norms

    def mlp(self, width: int, bias: bool = False) -> int:
        """One MLP of `width`."""
        into = 2 if self.family.gated else 1
        return (into + 1) * self.hidden * width + bias * (into * width + self.hidden)

    @property
    def dense_layer(self) -> int:
        return self.attention + self.mlp(self.ffn, self.family.mlp_bias)

    @property
    def expert(self) -> int:
        return self.mlp(self.expert_ffn, self.family.expert_bias)

    @property
    def moe_base(self) -> int:
        """A MoE layer without its experts: attention, router and the shared expert with its gate."""
        router = self.hidden * self.experts + self.family.router_bias * self.experts
        return self.attention + router + ((self.mlp(self.shared_ffn) + self.hidden) if self.shared_ffn else 0)

    @property
    def moe_layer(self) -> int:
        return self.moe_base + self.experts * self.expert

    @property
    def layer_matmul(self) -> float:
        """Parameters of a layer that one token multiplies with, mean over layers."""
        ends = self.vocab * self.hidden + self.final_norm
        return (self.matmul_active - ends) / self.layers

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def final_norm(self) -> int:
        return self.hidden * (1 + self.family.norm_bias)

    @property
    def parameters(self) -> int:
        """All unique parameters."""
        layers = self.dense_layers * self.dense_layer + self.moe_layers * self.moe_layer
        return self.embedding + self.head + layers + self.final_norm + self.other

    @property
    def active(self) -> int:
        """Parameters that one token meets: of the experts only the top_k."""
        return self.parameters - self.moe_layers * (self.experts - self.top_k) * self.expert - self.other

    @property
    def matmul_active(self) -> int:
        """Active parameters that take part in a matrix product: no look-up of the embedding."""
        return self.active - self.embedding - self.head + self.vocab * self.hidden

    def attended(self, length: float) -> float:
        """Mean over layers of the length that a token's attention sees at most, of samples `length` long."""
        inside = min(length, self.window) if self.window else length
        return (self.windowed_layers * inside + (self.layers - self.windowed_layers) * length) / self.layers
