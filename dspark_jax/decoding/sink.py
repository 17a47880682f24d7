"""Features of accepted rows, handed out as requests are generated: answers and training data in one pass."""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.requests import Request
from dspark_jax.models.target import DecoderOutput


@flax.struct.dataclass
class RowFeatures:
    """The target's states at consecutive positions of one request, in the model's dtype."""

    taps_NxMH: jax.Array | np.ndarray  # raw residual stream after the tapped layers
    hidden_NxH: jax.Array | np.ndarray  # after the final norm


@dataclasses.dataclass(frozen=True)
class Sink:
    """A consumer of features. `take(request, rows)` gets a request's rows in order, from its first prompt token on.

    Rows come with the tokens that an event shows and are never taken back: after k shown tokens behind a prompt of n,
    n + k - 1 rows have come (the last token's own row is never run). `tap_layers`: whichever the consumer wants,
    whatever the drafter of the engine reads.
    """

    tap_layers: tuple[int, ...]
    take: Callable[[Request, RowFeatures], None]


def tap_rows(output: DecoderOutput, taps: tuple[int, ...] | None, row_RxQ: jax.Array) -> RowFeatures | tuple[()]:
    """Features of some rows of a step, `[R, Q, ...]`. `taps`: which of the taps that were run; None: no features."""
    if taps is None:
        return ()
    width = output.hidden_NxH.shape[-1]
    parts = [output.taps_NxMH[row_RxQ, i * width : (i + 1) * width] for i in taps]
    return RowFeatures(jnp.concatenate(parts, axis=-1), output.hidden_NxH[row_RxQ])


def hand_over(sink: Sink, request: Request, wanted: int) -> None:
    """Gives the sink a request's rows up to the `wanted`-th; later ones stay with the request.

    A request that is cancelled before its prompt is cached has fewer.
    """
    count = wanted - request.handed_over
    if count <= 0 or not request.features:
        return
    rows = jax.tree.map(lambda *parts: np.concatenate(parts), *jax.device_get(request.features))
    given, rest = (jax.tree.map(lambda a, part=part: a[part], rows) for part in (slice(count), slice(count, None)))
    request.features = [rest]
    request.handed_over += len(given.hidden_NxH)
    sink.take(request, given)
