"""What a model asks of the hardware: its dimensions and parameter counts. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from ...errors.tables import Fields, table
from ...train.upstream.stateful_layers import PACKAGES


@dataclass(frozen=True)
class Family:
    """What a `model_type` builds that its config does not say: families.yaml explains each."""

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
    output_gate: bool = False
    squared: bool = False
    fp32_router: bool = False
    v_norm: bool = False
    capped: bool = False
    scaled: bool = False
    full_every: int = 1
    window_asked: bool = False

    @property
    def staged(self) -> bool:
        """Whether its parts go into the stages of a pipeline: models with layer norms call theirs otherwise, and Gemma 1 and 2
        scale whatever they take for embeddings."""
        return not self.layer_norm and (self.qk_norm or self.sinks or not self.fp32_norm)


RULE, CONVOLUTION, SPACE, SCAN = "gated delta rule", "short convolution", "state space", "selective scan"
CHANNELS = "delta rule with a gate for each channel"
MIXERS: dict[str, Fields] = table(Path(__file__).with_name("mixers.yaml"))


@dataclass(frozen=True)
class Mixer:
    """What hands on earlier tokens in the layers of a hybrid that have no attention, or in each layer beside attention.

    kind: a gated delta rule (Yang et al. 2024, arXiv 2412.06464), or one with a gate for each channel (Kimi delta attention,
        arXiv 2510.26692), a short convolution (LFM2), a state space (Mamba-2, Dao and Gu 2024, arXiv 2405.21060) or a selective
        scan (Mamba-1, Gu and Dao 2023, arXiv 2312.00752), of a head for each channel
    layers: how many have it; products: (inner, outer) width of its linear layers, of which the last one gives the output
    letters: of each product what of lora.ALL its linear layer is called, or "-" ("" for none at all): Kimi Linear's have a q_proj
    convolved: elements per token that go through the short convolution
    heads, key_heads: for values, and for keys and queries (B and C of a state space, by its groups)
    key_dim, value_dim: rows and columns of a head's state; chunk: tokens that a state space computes at once
    beside: its layers have attention too, and both read the same norm, each by a multiplier of its own (Falcon-H1)
    """

    kind: str
    layers: int
    products: tuple[tuple[int, int], ...]
    convolved: int
    heads: int = 0
    key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    chunk: int = 0
    letters: str = ""
    beside: bool = False

    def adapted(self, targets: str, everywhere: bool) -> list[tuple[int, int]]:
        """The products that have adapters: on layers called as these targets say, or on all that adapters fit."""
        past = MIXERS[self.kind].get("read_past")
        if not everywhere:
            return [one for one, letter in zip(self.products, self.letters, strict=False) if letter in targets]
        return [one for number, one in enumerate(self.products) if past is None or number != past % len(self.products)]

    @property
    def packages(self) -> dict[str, str]:
        """Module -> name of each package by which it is counted."""
        return {module: PACKAGES[module] for module in MIXERS[self.kind]["packages"]}


@dataclass(frozen=True)
class LayerSizes:
    """What layers of one kind have in common, in a model whose layers differ in it (Gemma 4).

    layers: how many are of the kind; window: 0 where they see all tokens
    made: how many of keys and values they compute: both, keys which are the values too, or none, for they take an earlier layer's
    """

    layers: int
    ffn: int
    kv_heads: int
    head_dim: int
    window: int
    made: int


LLAMA = Family()
FAMILIES = {kind: Family(**row) for kind, row in table(Path(__file__).with_name("families.yaml")).items()}


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions.

    ffn: width of a dense layer's MLP; expert_ffn: of one expert; shared_ffn: of the experts that every token visits
    experts, top_k: per MoE layer, and how many of them one token visits; 0 in a dense model
    moe_layers: how many of the layers have experts
    window, windowed_layers: sliding-window attention, and how many layers have it
    other: parameters that are no decoder layer's, embedding's or head's (a vision tower)
    mixer: of a hybrid, what its other layers have instead of attention, or all of them beside it
    apart: each layer has only one of attention, mixer, MLP and experts (Nemotron-H), and mlp_layers of them an MLP
    projections: of attention whose keys and values come from a latent vector (DeepSeek-V2, arXiv 2405.04434), the (inner, outer)
        widths of its linear layers, of which the last one gives the output
    sizes: of layers that differ in them; head_dim, kv_heads and ffn are the largest then. made: LayerSizes' of all layers
    masked: heads are wider than FlashAttention's, so that SDPA computes every layer, and hides by masks what is outside a window
    scores: the head gives one number, a reward, and not one for each word of the vocabulary
    per_layer_input: width of what each layer adds of a second embedding, which has looked_up parameters (Gemma 4's E models)
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
    family: Family = LLAMA
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    moe_layers: int = 0
    window: int = 0
    windowed_layers: int = 0
    other: int = 0
    mixer: Mixer | None = None
    apart: bool = False
    mlp_layers: int = 0
    projections: tuple[tuple[int, int], ...] = ()
    sizes: tuple[LayerSizes, ...] = ()
    made: int = 2
    masked: bool = False
    per_layer_input: int = 0
    looked_up: int = 0
    scores: bool = False

    @property
    def scoring(self) -> "ModelShape":
        """The reward model of this decoder: its head has one output, and is never the embedding."""
        return replace(self, scores=True, tied=False)

    @property
    def alike(self) -> "list[tuple[ModelShape, float]]":
        """(a shape whose layers have all the same sizes, its share of the layers) of each kind; the shape itself where they do.
        Only sizes are of the kind: parameters stay the whole model's."""
        return [
            (
                replace(
                    self,
                    sizes=(),
                    layers=one.layers,
                    moe_layers=one.layers if self.moe_layers else 0,
                    ffn=one.ffn,
                    kv_heads=one.kv_heads,
                    head_dim=one.head_dim,
                    made=one.made,
                    window=one.window,
                    windowed_layers=one.layers if one.window else 0,
                ),
                one.layers / self.layers,
            )
            for one in self.sizes
        ] or [(self, 1.0)]

    @property
    def attending(self) -> float:
        """Share of the layers that have attention."""
        if self.apart:
            return 1 - self.mixing - (self.mlp_layers + self.moe_layers) / self.layers
        return 1 - self.mixing if self.mixer and not self.mixer.beside else 1.0

    @property
    def mixing(self) -> float:
        """Share of the layers that have a mixer."""
        return self.mixer.layers / self.layers if self.mixer else 0.0

    def parts(self, moe: bool) -> tuple[float, float, float]:
        """Return the shares of layers with experts, or of those without, that have (attention, a mixer, an MLP or experts)."""
        if not self.apart:
            return self.attending, self.mixing, 1.0
        if moe:
            return 0.0, 0.0, 1.0
        of_dense = self.layers / self.dense_layers
        return self.attending * of_dense, self.mixing * of_dense, self.mlp_layers / self.dense_layers

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def kinds(self) -> list[tuple[bool, int]]:
        """(with experts or not, how many layers) of each kind that the model has."""
        return [(moe, count) for moe, count in ((False, self.dense_layers), (True, self.moe_layers)) if count]

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
        return (self.vocab + self.family.positions) * self.hidden

    @property
    def head(self) -> int:
        """The output projection, where it is not the embedding."""
        return self.hidden if self.scores else 0 if self.tied else self.vocab * self.hidden

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention, norms included."""
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

    def undivided(self, moe: bool = False) -> int:
        """What of a layer tensor parallelism leaves whole on each rank: norms, biases after a sum over ranks, the router."""
        f, h = self.family, self.hidden
        norms = f.norms * h * (1 + f.norm_bias) + 2 * self.head_dim * f.qk_norm + h * f.out_bias
        if not moe:
            return norms + h * f.mlp_bias
        return norms + h * self.experts + f.router_bias * self.experts + h * bool(self.shared_ffn)

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
        idle = self.moe_layers * (self.experts - self.top_k) * self.expert
        return self.parameters - idle - self.other - self.looked_up

    @property
    def layer_matmul(self) -> float:
        """Parameters of a layer that one token multiplies with, mean over layers."""
        return (self.active + self.looked_up - self.embedding - self.head - self.final_norm) / self.layers

    def attended(self, length: float) -> float:
        """Mean over layers of the length that a token's attention sees at most, of samples `length` long; 0 without attention.
        Layers with narrower queries than query_width count for less."""
        if self.sizes:
            return sum(share * one.head_dim / self.head_dim * one.attended(length) for one, share in self.alike)
        inside = min(length, self.window) if self.window else length
        whole = self.layers * self.attending - self.windowed_layers
        return (self.windowed_layers * inside + whole * length) / self.layers
