"""The frozen target's features of training sequences: computed on the fly, or once and then kept in memory."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.batches import PAD_TO, Batch
from dspark_jax.interop.target_io import Target, hidden_states
from dspark_jax.models.layers import Params
from dspark_jax.models.target import Decoder


@flax.struct.dataclass
class Features:
    """What a drafter learns from: taps, the hidden state after the final norm, and log sum exp of the logits.

    The last two give every token's log-probability without storing logits of the whole vocabulary.
    """

    taps_BxSxMH: jax.Array
    last_hidden_BxSxH: jax.Array
    log_total_BxS: jax.Array  # at least float32

    def astype(self, dtype: jnp.dtype) -> "Features":
        """Taps and hidden states in another dtype."""
        return self.replace(
            taps_BxSxMH=self.taps_BxSxMH.astype(dtype), last_hidden_BxSxH=self.last_hidden_BxSxH.astype(dtype)
        )


@functools.partial(jax.jit, static_argnums=0)
def target_features(module: Decoder, params: Params, token_BxS: jax.Array) -> Features:
    """Runs the frozen target over whole sequences."""
    batch, length = token_BxS.shape
    output = hidden_states(module, params, token_BxS)
    hidden = output.hidden_NxH.reshape(batch, length, -1)

    def log_total(hidden_SxH):
        logits = module.apply({"params": params}, hidden_SxH, method=Decoder.logits)
        return jax.nn.logsumexp(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)

    # One sequence at a time: the full-vocabulary logits of a batch would be the largest array of the step.
    return Features(output.taps_NxMH.reshape(batch, length, -1), hidden, jax.lax.map(log_total, hidden))


class FeatureSource:
    """`source(batch)` gives a batch's features.

    `keep`: each sequence is run once, alone (so that its numbers depend on nothing else), and kept in bfloat16 in host
    memory: 2·(M+1)·H bytes a token. Worth it when there are several epochs and the features fit.
    """

    def __init__(self, target: Target, keep: bool):
        self.target, self.keep = target, keep
        self._kept: dict[int, Features] = {}

    def __call__(self, batch: Batch) -> Features:
        if not self.keep:
            return target_features(self.target.module, self.target.params, batch.token_BxS)
        parts = (batch.row_B, batch.token_BxS, batch.length_B)
        rows = [self._row(int(number), tokens[:length]) for number, tokens, length in zip(*parts, strict=True)]
        width = batch.token_BxS.shape[1]
        return jax.tree.map(lambda *parts: np.stack([_fit(part, width) for part in parts]), *rows)

    def _row(self, number: int, token_S: np.ndarray) -> Features:
        if number not in self._kept:
            padded = _fit(token_S, -(-len(token_S) // PAD_TO) * PAD_TO)
            out = target_features(self.target.module, self.target.params, padded[None]).astype(jnp.bfloat16)
            self._kept[number] = jax.tree.map(lambda a: np.asarray(a[0, : len(token_S)]), out)
        return self._kept[number]


def _fit(array: np.ndarray, length: int) -> np.ndarray:
    """Cut or zero-padded to a length along the first axis."""
    array = array[:length]
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))
