"""How one draft after the other is drawn: by an in-block head behind one parallel pass, or by passes (Eagle3)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.decoding.adjust import forbid_padding
from dspark_jax.decoding.sampling import SlotSampling, draw
from dspark_jax.models.attention import attend_rows
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import KeysValues, Params
from pallas_kernels import warp as warps
from pallas_kernels.draft_law import Factored, Law, Speech, Written
from pallas_kernels.markov_sampler import Drawn, draw_draft
from pallas_kernels.noise import Key
from pallas_kernels.ragged_attention import Prefix, ragged_rows, step_attention

Adjust = Callable[[jax.Array, jax.Array], jax.Array]
# forward(k, state, previous token [R]) -> (logits [R, Vd], confidence logits [R], state)
Forward = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]


class Drafting(NamedTuple):
    """What drafts of every slot are made from."""

    module: DSpark | Eagle3
    params: Params
    borrowed: Borrowed
    anchor_R: jax.Array
    prefixes: tuple[Prefix, ...]
    carry: Any
    sampling: SlotSampling
    num_tokens: int
    adjust: Adjust | None  # (logits, tokens drafted before `[R, K]`) -> logits
    num_words: int  # target ids from there on stand for no token
    attention: str
    kernels: str

    def call(self, method: Callable, *args: Any) -> Any:
        return self.module.apply({"params": self.params}, *args, method=method)


class Steps(NamedTuple):
    """`draw(k, state, previous [R], drafted before [R, K], key)` -> (what was drawn, of which law, confidence logits,
    state); `law`: of the second's parts, `[R, K, ...]`.
    """

    state: Any
    draw: Callable[..., tuple[Drawn, jax.Array, jax.Array, Any]]
    law: Callable[[jax.Array], Law]


def begin(drafting: Drafting) -> Steps:
    """Everything that comes before the first draft."""
    if isinstance(drafting.module, Eagle3):
        return _from_logits(drafting, *_eagle3(drafting))
    hidden, predicting = _block(drafting)
    state = drafting.call(DSpark.initial_state, hidden, drafting.anchor_R, drafting.borrowed)
    if _kernel_draws(drafting, predicting):
        return _from_factors(drafting, predicting, state)
    base = drafting.call(DSpark.base_logits, predicting, drafting.borrowed)

    def forward(k: jax.Array, state: Any, previous: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        return drafting.call(DSpark.step, k, predicting[:, k], base[:, k], state, previous, drafting.borrowed)

    return _from_logits(drafting, forward, state)


# --------------------------------------------------------------------------------------------------- how one is drawn


def _from_logits(drafting: Drafting, forward: Forward, state: Any) -> Steps:
    """Draws from logits in memory, which may be adjusted and limited in any way."""
    borrowed, warp = drafting.borrowed, drafting.sampling.warp
    words = len(borrowed.embedding_VxH)

    def draw_one(k: jax.Array, state: Any, previous: jax.Array, drafted_RxK: jax.Array, key: Key):
        logits, confidence, state = forward(k, state, previous)
        if drafting.adjust:
            logits = drafting.adjust(logits, drafted_RxK)
        if drafting.num_words < words:
            logits = forbid_padding(logits, drafting.num_words, borrowed.token_ids_Vd)
        warped = warps.apply(logits, warp)
        index = draw(warped, warp, key, borrowed.token_ids_Vd)
        log_total = jax.nn.logsumexp(warped, axis=-1)
        drawn = jnp.take_along_axis(warped, index[:, None], axis=-1)[:, 0]
        return Drawn(index, drawn - log_total, jnp.max(warped, axis=-1) - log_total), warped, confidence, state

    return Steps(state, draw_one, Written)


def _kernel_draws(drafting: Drafting, predicting_RxKxH: jax.Array) -> bool:
    """Whether a kernel can draw: of all logits, with a head that is a table of factors."""
    warp = drafting.sampling.warp
    plain = drafting.adjust is None and not (warp.sampled and warp.limited)
    if not (plain and drafting.module.config.has_correction):
        return False
    if drafting.kernels == "gpu":
        from pallas_kernels.markov_sampler import gpu

        return not gpu.unsupported(jax.eval_shape(lambda: _speech(drafting, predicting_RxKxH)))
    return drafting.kernels == "tpu"


def _speech(drafting: Drafting, predicting_RxKxH: jax.Array) -> Speech:
    borrowed = drafting.borrowed
    base = drafting.call(DSpark.base_logits, jnp.swapaxes(predicting_RxKxH, 0, 1), borrowed)
    return Speech(base, drafting.call(DSpark.correction), borrowed.token_ids_Vd, drafting.num_words)


def _from_factors(drafting: Drafting, predicting_RxKxH: jax.Array, state: Any) -> Steps:
    """Draws by the kernel; of the law only the head's factors are kept."""
    borrowed, temperature_R = drafting.borrowed, drafting.sampling.warp.temperature
    speech = _speech(drafting, predicting_RxKxH)
    noisy_R = temperature_R > 0
    temperature_R = jnp.where(noisy_R, temperature_R, 1)

    def draw_one(k: jax.Array, state: Any, previous: jax.Array, _: jax.Array, key: Key):
        factor, confidence, state = drafting.call(DSpark.factor, k, predicting_RxKxH[:, k], state, previous, borrowed)
        drawn = draw_draft(speech, k, factor, temperature_R, noisy_R, key, drafting.kernels)
        return drawn, factor, confidence, state

    return Steps(state, draw_one, lambda factor_RxKxr: Factored(speech, factor_RxKxr, temperature_R))


# ------------------------------------------------------------------------------------------------- what comes before


def _block(drafting: Drafting) -> tuple[jax.Array, jax.Array]:
    """The parallel pass: hidden states `[R, block, H]`, and those of the slots that predict."""
    config, slots, prefixes = drafting.module.config, len(drafting.anchor_R), drafting.prefixes
    size = config.block_size
    rows = ragged_rows(jnp.full(slots, size), prefixes[0].length_R, slots * size, size)
    attend = attend_rows(config.decoder, rows, prefixes, drafting.attention)
    positions = rows.position_N.reshape(slots, size)
    hidden = drafting.call(DSpark.block, drafting.anchor_R, positions, attend, drafting.borrowed)
    return hidden, drafting.module.predicting(hidden, drafting.num_tokens)


def _eagle3(drafting: Drafting) -> tuple[Forward, Any]:
    """A step is a pass over one row a slot: the last committed row first, then the drafts'.

    The last committed row pairs the target's features before the anchor with the anchor. Its keys and values are
    cached already; only its state, which the anchor has just completed, is computed here. A request whose anchor is its
    first token has no such row: its drafts start from nothing.
    """
    kind = drafting.module.config.decoder.attention[0]
    prefix = drafting.prefixes[0]
    prefix = prefix.replace(length_R=jnp.maximum(prefix.length_R - 1, 0))

    def forward(k: jax.Array, state: Any, previous: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        hidden, cached = state

        def with_own(kv: KeysValues) -> tuple[jax.Array, ...]:
            return tuple(rows.at[:, k].set(new) for rows, new in zip(cached, kv, strict=True))

        def attend(q: jax.Array, *kv: jax.Array) -> jax.Array:
            return step_attention(q, *with_own(kv), k, prefix, 0, scale=kind.softmax_scale, window=kind.window)

        position_R = prefix.length_R + k
        hidden, logits, kv = drafting.call(Eagle3.advance, hidden, previous, position_R, attend, drafting.borrowed)
        return logits, jnp.full(previous.shape, jnp.inf, logits.dtype), (hidden, with_own(kv))

    shape = len(drafting.anchor_R), drafting.num_tokens, kind.num_kv_heads, kind.head_dim
    own = jnp.zeros(shape, drafting.carry.dtype)
    return forward, (drafting.carry, (own, own))
