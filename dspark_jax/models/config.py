"""Sizes and switches of the networks, as hashable dataclasses (static arguments of jitted functions)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding, with the context extensions that released configs use.

    `kind` is "default", "linear", "llama3", "yarn" or "proportional"; the other fields carry the names of Hugging
    Face's `rope_parameters` and matter only to the kinds that read them. `attention_factor` None: yarn's own rule.
    `rounded`: frequencies rounded to bfloat16, as DeepSpec's trainer has them and its evaluation does not (spec 8.3).
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
    partial_rotary_factor: float = 1.0
    rounded: bool = False


@dataclasses.dataclass(frozen=True)
class Attention:
    """One kind of attention layer; layers of a kind are stacked and share a page pool.

    `window` W > 0: a query sees the keys less than W positions before it, itself included; 0: all of them. Drafters
    may attend both ways inside their block (`causal` False), and some measure the window from the block's anchor:
    every slot then sees the W rows before it (`window_from_anchor`). `scale` None: head_dim ** -0.5.
    """

    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0
    causal: bool = True
    window_from_anchor: bool = False
    keys_as_values: bool = False
    scale: float | None = None

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder with grouped-query attention and a gated MLP (Llama, Qwen2, Qwen3, Gemma4).

    `attention` holds the kinds of its attention layers, `layer_kinds` the kind of every layer, by index. Llama and Qwen
    have one kind; Gemma4's sliding and full layers differ in heads, rope and window. The rest of Gemma4 (spec 6):
    `value_norm` is RMSNorm without scale, `sandwich` puts norms behind attention and MLP too, `layer_scalar` multiplies
    a layer's output, `softcap` bounds the logits.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    attention: tuple[Attention, ...]
    layer_kinds: tuple[int, ...]
    rms_eps: float = 1e-6
    max_length: int = 2048
    activation: str = "silu"
    qk_norm: bool = False
    value_norm: bool = False
    sandwich: bool = False
    layer_scalar: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    softcap: float = 0.0
    tied: bool = True
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Query and key-value heads of each kind of attention."""
        return tuple((self.num_heads, kind.num_kv_heads) for kind in self.attention)

    @property
    def period(self) -> int:
        """Length of the shortest pattern of kinds that the layers repeat; one step of the scan over layers."""
        kinds, count = self.layer_kinds, len(self.layer_kinds)
        return next(p for p in range(1, count + 1) if count % p == 0 and kinds == kinds[:p] * (count // p))


def draft_decoder(
    target: DecoderConfig, num_layers: int, causal: bool = False, rope_rounded: bool = False
) -> DecoderConfig:
    """Draft layers with a target's widths, all of them full attention (spec 1.2, 6). `causal`: Eagle3's."""
    full = min(target.attention, key=lambda kind: kind.window)
    rope = dataclasses.replace(full.rope, rounded=rope_rounded)
    return dataclasses.replace(
        target,
        family=target.family if target.family == "gemma4" else "qwen3",
        attention=(dataclasses.replace(full, rope=rope, window=0, causal=causal),),
        layer_kinds=(0,) * num_layers,
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        tied=False,
        eos_token_ids=(),
    )


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A block drafter: DFlash backbone, in-block head, confidence head (paper section 3).

    `decoder` gives the widths of the draft layers. A block has `block_size` K inputs, the anchor and masks. With
    `logits_start` s = 0 the anchor's slot predicts, and slot k says the token k + 1 places after the anchor (DSpark);
    with s = 1 it only conditions, and slot k says the token k places after it (z-lab's DFlash). Either way a block
    drafts K - s tokens. `draft_vocab_size` equals the target's vocabulary unless the checkpoint carries a `d2t` table.

    `head_type`: "vanilla", "gated", "rnn", "domino" or "selector"; `markov_rank` is the width of its factor, 0: no
    in-block head. Domino reads `gru_width` and leaves the first `pure_prefix` drafts to the backbone. DFlash2's
    selector chooses among `selector_top_k` candidates, and its layers convolve over `conv_taps` rows of a block, with
    one coefficient per `conv_group` features.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
    draft_vocab_size: int
    logits_start: int = 0
    target_hidden_size: int = 0  # 0: the drafter's own
    markov_rank: int = 256
    head_type: str = "vanilla"
    gru_width: int = 0
    pure_prefix: int = 0
    selector_top_k: int = 0
    conv_taps: int = 0
    conv_group: int = 0
    confidence: bool = True
    confidence_with_markov: bool = True
    num_anchors: int = 512

    @property
    def num_drafts(self) -> int:
        """Tokens a block drafts, gamma."""
        return self.block_size - self.logits_start

    @property
    def has_correction(self) -> bool:
        """True when the in-block head adds factor · table to all base logits, as all but the selector do."""
        return self.markov_rank > 0 and self.head_type != "selector"

    @property
    def tap_width(self) -> int:
        """Features of one context row: the tapped states, concatenated."""
        return len(self.tap_layers) * (self.target_hidden_size or self.decoder.hidden_size)

    @property
    def reduced(self) -> bool:
        """True when the drafter speaks only part of the target's vocabulary."""
        return self.draft_vocab_size != self.decoder.vocab_size


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An Eagle3 drafter: one decoder layer that reads the last token and the state before it (spec 5).

    It drafts `num_drafts` tokens, one pass each. Other producers' files differ from DeepSpec's in where they
    normalise: `norm_before_residual` adds the normed state back, `feed_normed` hands on the state after the final norm,
    `fc_norm` norms each tap and `norm_before_fc` all of them together.
    """

    decoder: DecoderConfig
    num_drafts: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
    draft_vocab_size: int
    target_hidden_size: int = 0
    norm_before_residual: bool = False
    feed_normed: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False

    @property
    def tap_width(self) -> int:
        return len(self.tap_layers) * (self.target_hidden_size or self.decoder.hidden_size)

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size != self.decoder.vocab_size
