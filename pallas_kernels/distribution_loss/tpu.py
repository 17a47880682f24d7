"""The chunks on a TPU: two kernels read the head once each, and no array of `[rows, vocabulary]` is passed over idly.

The first leaves a chunk's draft logits and target law in HBM, and the logits' log-sum-exp. XLA reduces the two to the
distance and to its slope's mean; the second makes the slopes of them, tile by tile, and multiplies these at once.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.distribution_loss.chunks import Given, OfRows, Trained, by_source, lanes, nothing, pick, put
from pallas_kernels.distribution_loss.reference import RowLosses, Rows, RowWeights, Targets, Vocabulary

LANES = 128
_TILE_BYTES = 4 << 20  # of the head's tile, of which two are held
_VMEM_BYTES = 64 << 20
_LOWEST = float(jnp.finfo(jnp.float32).min)

Refs = dict[str, Any]


class _Tile(NamedTuple):
    """Tokens `first` … `first + size` of a vocabulary, which may end before the tile does."""

    first: jax.Array
    size: int
    vocab: int

    def ids(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        return self.first + jax.lax.broadcasted_iota(jnp.int32, shape, axis)

    def table(self, ref: Any) -> jax.Array:
        """Rows of a table; what lies behind its end is 0, else a product with it could be NaN."""
        rows = ref[...]
        if self.vocab % self.size == 0:
            return rows
        return jnp.where(self.ids((self.size, 1), 0) < self.vocab, rows, jnp.zeros_like(rows))


def over_chunks(chunk: int, trained: Trained, given: Given, differentiate: bool) -> tuple[OfRows, jax.Array | None]:
    """As `tiled.over_chunks`, in float32. The law of a source is computed for every row: gathering laws costs more."""
    rows, targets, vocabulary, weights = given
    order = by_source(rows.source_M)

    def body(i: jax.Array, carry: tuple[OfRows, jax.Array | None]):
        lane, used = lanes(order, i, chunk)
        at = order.row_M[lane]
        some_rows, some_weights = pick(at, used, rows, weights)
        some_targets = jax.tree.map(lambda a: a[some_rows.source_M], targets)
        new, of_correction = _chunk(some_rows, some_targets, vocabulary, some_weights, carry[1], differentiate)
        return put(carry[0], new, at, used), of_correction

    of_rows, of_correction = nothing(given, trained, differentiate)
    if of_correction is not None:  # whole tiles: the interpreter hands an updated array back in whole tiles
        vocab, tile = len(of_correction), _tile_size(vocabulary)
        of_correction = jnp.pad(of_correction, ((0, -vocab % tile), (0, 0)))
    start = (of_rows, of_correction)
    of_rows, of_correction = jax.lax.fori_loop(0, (order.num_rows + chunk - 1) // chunk, body, start)
    return of_rows, None if of_correction is None else of_correction[:vocab]


def _chunk(
    rows: Rows,
    targets: Targets,
    vocabulary: Vocabulary,
    weights: RowWeights,
    of_correction: jax.Array | None,
    differentiate: bool,
) -> tuple[OfRows, jax.Array | None]:
    """A chunk's losses and gradients; the correction's are added to `of_correction`. `targets` are the rows'."""
    base = weights.base_ce_M is not None
    out = _logits(rows, targets, vocabulary, base)
    known = rows.label_M >= 0

    def cross_entropy(name: str) -> tuple[jax.Array, jax.Array]:
        total = out[f"{name}_peak"][:, 0] + jnp.log(out[f"{name}_total"][:, 0])
        return total, jnp.where(known, total - out[f"{name}_said"][:, 0], 0)

    log_total, ce = cross_entropy("draft")
    base_total, base_ce = cross_entropy("base") if base else (jnp.zeros_like(ce), None)
    q, p = jnp.exp(out["logits"] - log_total[:, None]), out["law"]
    missed = jnp.maximum(1 - jnp.sum(p, axis=-1), 0) if vocabulary.reduced else 0
    distance = 0.5 * (jnp.sum(jnp.abs(q - p), axis=-1) + missed)
    losses = RowLosses(ce, distance, base_ce)
    if not differentiate:
        return OfRows(losses, None, None), None
    mean_side = jnp.sum(q * jnp.sign(q - p), axis=-1)
    base_weight = weights.base_ce_M if base else jnp.zeros_like(ce)
    columns = (
        log_total, jnp.where(known, weights.ce_M, 0), 0.5 * weights.distance_M, mean_side,
        base_total, jnp.where(known, base_weight, 0),
    )  # fmt: skip
    new = _gradients(rows, vocabulary, out["logits"], p, jnp.stack(columns, axis=1), of_correction, base)
    return OfRows(losses, new["of_hidden"], new.get("of_factor")), new.get("of_correction")


def _logits(rows: Rows, targets: Targets, vocabulary: Vocabulary, base: bool) -> dict[str, jax.Array]:
    """Draft logits and the target's law `[C, Vd]`; `[C, 1]` peak, sum relative to it, and label's logit."""
    count, vocab = len(rows.label_M), len(vocabulary.head_VdxH)
    wide = jax.ShapeDtypeStruct((count, vocab), jnp.float32)
    column = jax.ShapeDtypeStruct((count, 1), jnp.float32)
    kinds = ("draft", "base") if base else ("draft",)
    outs = {"logits": wide, "law": wide} | {f"{k}_{s}": column for k in kinds for s in ("peak", "total", "said")}
    ins = {
        "hidden": rows.hidden_MxH, "target": targets.hidden_TxH, "log_total": targets.log_total_T[:, None],
        "label": rows.label_M[:, None], "factor": rows.factor_Mxr, "head": vocabulary.head_VdxH,
        "correction": vocabulary.correction_Vdxr,
    }  # fmt: skip
    work = count * vocab * (2 * rows.hidden_MxH.shape[1] + _rank(rows))
    return _over_vocabulary(_logits_kernel, "logits", vocabulary, ins, outs, work, 3, base=base)


def _gradients(
    rows: Rows,
    vocabulary: Vocabulary,
    logits_CxVd: jax.Array,
    law_CxVd: jax.Array,
    columns_Cx6: jax.Array,
    of_correction: jax.Array | None,
    base: bool,
) -> dict[str, jax.Array]:
    """By hidden states, factors and correction, of slopes that the columns make of logits and law."""
    wide = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32)  # noqa: E731
    ins = {
        "logits": logits_CxVd, "law": law_CxVd, "columns": columns_Cx6, "label": rows.label_M[:, None],
        "factor": rows.factor_Mxr, "head": vocabulary.head_VdxH, "correction": vocabulary.correction_Vdxr,
        "of_correction": of_correction,
    }  # fmt: skip
    outs = {"of_hidden": wide(rows.hidden_MxH)}
    if rows.factor_Mxr is not None:
        outs |= {"of_factor": wide(rows.factor_Mxr), "of_correction": of_correction}
    work = logits_CxVd.size * (rows.hidden_MxH.shape[1] + 3 * _rank(rows))
    return _over_vocabulary(_gradients_kernel, "gradients", vocabulary, ins, outs, work, 2, base=base)


def _rank(rows: Rows) -> int:
    return 0 if rows.factor_Mxr is None else rows.factor_Mxr.shape[1]


def _over_vocabulary(
    kernel: Callable[..., None],
    name: str,
    vocabulary: Vocabulary,
    ins: dict[str, jax.Array | None],
    outs: dict[str, jax.Array],
    multiplications: int,
    exponentials: int,
    **static: Any,
) -> dict[str, jax.Array]:
    """Runs a kernel over tiles of the vocabulary, with references by name; what has no vocabulary stays in place.

    An output that is an input too is updated in place.
    """
    vocab, tile = len(vocabulary.head_VdxH), _tile_size(vocabulary)
    ins = {key: a for key, a in ins.items() if a is not None}

    def named(*refs: Any) -> None:
        inputs, outputs = dict(zip(ins, refs, strict=False)), dict(zip(outs, refs[len(ins) :], strict=True))
        kernel(inputs, outputs, _Tile(pl.program_id(0) * tile, tile, vocab), softcap=vocabulary.softcap, **static)

    size = lambda a: math.prod(a.shape) * a.dtype.itemsize  # noqa: E731
    places = list(ins)
    rows = len(ins["label"])
    results = pl.pallas_call(
        named,
        grid=(pl.cdiv(vocab, tile),),
        in_specs=[_block(*item, tile) for item in ins.items()],
        out_specs=[_block(*item, tile) for item in outs.items()],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outs.values()],
        input_output_aliases={places.index(key): n for n, key in enumerate(outs) if key in ins},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * multiplications,
            transcendentals=exponentials * rows * vocab,
            bytes_accessed=sum(size(a) for a in (*ins.values(), *outs.values())),
        ),
        name=f"distribution_loss_{name}_rows{rows}_tile{tile}",
    )(*ins.values())
    return dict(zip(outs, results, strict=True))


def _block(name: str, a: jax.Array, tile: int) -> pl.BlockSpec:
    """The part of an array that a tile of the vocabulary sees."""
    if name in ("head", "correction", "of_correction"):
        return pl.BlockSpec((tile, a.shape[1]), lambda j: (j, 0))
    if name in ("logits", "law"):
        return pl.BlockSpec((a.shape[0], tile), lambda j: (0, j))
    return pl.BlockSpec(a.shape, lambda j: (0, 0))


def _tile_size(vocabulary: Vocabulary) -> int:
    """Tokens of a tile."""
    vocab, width = vocabulary.head_VdxH.shape
    fitting = _TILE_BYTES // (width * vocabulary.head_VdxH.dtype.itemsize) // LANES * LANES
    return min(max(fitting, LANES), 4 * LANES, -(-vocab // LANES) * LANES)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _capped(logits: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(logits / cap) if cap else logits


def _logits_kernel(ins: Refs, outs: Refs, tile: _Tile, *, softcap: float, base: bool) -> None:
    @pl.when(pl.program_id(0) == 0)
    def start() -> None:
        for key, ref in outs.items():
            if key not in ("logits", "law"):
                # The peak is finite, so that exp(lowest - peak) is never NaN.
                ref[...] = jnp.full(ref.shape, _LOWEST if key.endswith("peak") else 0, jnp.float32)

    head = tile.table(ins["head"])
    base_logits = logits = _capped(_dot(ins["hidden"][...], head, (1, 1)), softcap)
    if "factor" in ins:
        logits += _dot(ins["factor"][...], tile.table(ins["correction"]), (1, 1))
    outs["logits"][...] = logits
    target = _capped(_dot(ins["target"][...], head, (1, 1)), softcap)
    outs["law"][...] = jnp.exp(target - ins["log_total"][...])
    ids = tile.ids(logits.shape, 1)
    for kind, values in (("draft", logits), ("base", base_logits))[: 1 + base]:
        peak, total, said = (outs[f"{kind}_{s}"] for s in ("peak", "total", "said"))
        values = jnp.where(ids < tile.vocab, values, -jnp.inf)
        higher = jnp.maximum(peak[...], jnp.max(values, axis=1, keepdims=True))
        total[...] = total[...] * jnp.exp(peak[...] - higher) + jnp.sum(jnp.exp(values - higher), axis=1, keepdims=True)
        peak[...] = higher
        said[...] += jnp.sum(jnp.where(ids == ins["label"][...], values, 0), axis=1, keepdims=True)


def _gradients_kernel(ins: Refs, outs: Refs, tile: _Tile, *, softcap: float, base: bool) -> None:
    @pl.when(pl.program_id(0) == 0)
    def start() -> None:
        for key in ("of_hidden", "of_factor"):
            if key in outs:
                outs[key][...] = jnp.zeros(outs[key].shape, jnp.float32)

    log_total, ce, distance, mean_side, base_total, base_ce = (ins["columns"][:, k : k + 1] for k in range(6))
    ids = tile.ids(ins["logits"].shape, 1)
    inside, said = ids < tile.vocab, (ids == ins["label"][...]).astype(jnp.float32)
    logits = jnp.where(inside, ins["logits"][...], -jnp.inf)
    q, p = jnp.exp(logits - log_total), jnp.where(inside, ins["law"][...], 0)
    # Not jnp.sign: to lower it, Pallas asks which chip is there.
    side = jnp.where(q > p, 1.0, jnp.where(q < p, -1.0, 0.0))
    of_logits = of_base = ce * (q - said) + distance * q * (side - mean_side)
    if base or softcap:
        base_logits = ins["logits"][...]
        if "factor" in ins:
            base_logits -= _dot(ins["factor"][...], tile.table(ins["correction"]), (1, 1))
        base_logits = jnp.where(inside, base_logits, 0)
        if base:
            of_base = of_base + jnp.where(inside, base_ce * (jnp.exp(base_logits - base_total) - said), 0)
        if softcap:
            of_base = of_base * (1 - (base_logits / softcap) ** 2)
    head = tile.table(ins["head"])
    outs["of_hidden"][...] += _dot(of_base.astype(head.dtype), head, (1, 0))
    if "factor" in ins:
        factor = ins["factor"][...]
        of_logits = of_logits.astype(factor.dtype)
        outs["of_factor"][...] += _dot(of_logits, tile.table(ins["correction"]), (1, 0))
        outs["of_correction"][...] = ins["of_correction"][...] + _dot(of_logits, factor, (0, 0))
