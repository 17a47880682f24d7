"""What a dispatch brought back from the device, as the rounds of one request."""

import jax
import numpy as np

from dspark_jax.decoding.requests import Round, TokenLogprob
from dspark_jax.decoding.sink import RowFeatures
from dspark_jax.decoding.state import Emitted


def rounds_of(out: Emitted, slot: int, drafted: int, top: int | None) -> list[Round]:
    """The rounds of a slot up to its end. `top`: how many likeliest tokens the request wants; None: no logprobs."""
    rounds = []
    for d in np.flatnonzero(out.count_DxR[:, slot]):
        tokens = out.token_DxRxQ[d, slot, : out.count_DxR[d, slot]].tolist()
        logprobs = [] if top is None else [_logprob(out, d, slot, i, token, top) for i, token in enumerate(tokens)]
        numbers = (int(out.verified_DxR[d, slot]), int(out.accepted_DxR[d, slot]))
        rounds.append(Round(tokens, drafted, *numbers, out.confidence_DxRxK[d, slot].tolist(), logprobs))
    return rounds


def features_of(out: Emitted, slot: int) -> list[RowFeatures]:
    """The features of the rows that a slot's rounds committed, round by round; none without a sink."""
    if not out.features:
        return []
    counts = [(d, out.count_DxR[d, slot]) for d in np.flatnonzero(out.count_DxR[:, slot])]
    return [jax.tree.map(lambda a, d=d, n=n: a[d, slot, :n], out.features) for d, n in counts]


def _logprob(out: Emitted, d: int, slot: int, i: int, token: int, top: int) -> TokenLogprob:
    at = (d, slot, i)
    ids, values = out.logprobs.top_id_RxQxT[at][:top], out.logprobs.top_RxQxT[at][:top]
    likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(out.logprobs.token_RxQ[at]), likeliest)
