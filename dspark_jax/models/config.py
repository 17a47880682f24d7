"""Sizes and switches of the networks, as hashable dataclasses (static arguments of jitted functions)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding, with the context extensions that released configs use.

    `kind` is "default", "linear", "llama3" or "yarn"; the other fields carry the names of Hugging Face's
    `rope_parameters` and matter only to the kinds that read them. `attention_factor` None: yarn's own rule.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention and a gated MLP (Llama, Qwen2, Qwen3)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    rms_eps: float = 1e-6
    max_length: int = 2048
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    eos_token_ids: tuple[int, ...] = ()

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DSpark drafter: DFlash backbone, in-block head, confidence head (paper section 3).

    `decoder` gives the widths of the draft layers. A block has `block_size` inputs, the anchor and masks; slot k
    predicts the token k + 1 places after the anchor. `draft_vocab_size` equals the target's vocabulary unless the
    checkpoint carries a `d2t` table. `markov_rank` 0: no in-block head.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
    draft_vocab_size: int
    markov_rank: int = 256
    head_type: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    num_anchors: int = 512

    @property
    def reduced(self) -> bool:
        """True when the drafter speaks only part of the target's vocabulary."""
        return self.draft_vocab_size != self.decoder.vocab_size
