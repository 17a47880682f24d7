"""Runs every GPU kernel on the Hopper that is here: `python -m pallas_kernels.gpu_check [--json=FILE]`.

Each is compared with its reference, fused_verify and markov_sampler on logits that are exact in any order of summation,
and timed against XLA's version and against the floor, the time in which the card's memory delivers what must be read.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.anchor_attention.report import arguments as anchor_arguments
from pallas_kernels.anchor_attention.report import gradients as anchor_gradients
from pallas_kernels.backends import choose
from pallas_kernels.distribution_loss import Rows, RowWeights, Targets, Vocabulary
from pallas_kernels.distribution_loss.chunks import chunk_rows
from pallas_kernels.distribution_loss.reference import capped_logits
from pallas_kernels.distribution_loss.report import RANK, gradients
from pallas_kernels.draft_law import Written
from pallas_kernels.fused_verify import Drafts, Head, Query, row_statistics
from pallas_kernels.markov_sampler import report as sampler_report
from pallas_kernels.ragged_attention import Prefix
from pallas_kernels.ragged_attention.report import SHAPES, attend
from pallas_kernels.ragged_attention.report import arguments as attention_arguments
from pallas_kernels.report import MODELS, Model, verify_by_kernel, verify_by_xla

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, NVIDIA's data sheets of the SXM cards
REQUESTS, DRAFTS = (1, 8, 16), 7
TOLERANCE = 1e-4  # of sums of exponentials and of noise; all else is exact
PAGES = 128  # of 16 rows, of each request
ROUNDING = 2e-2  # of weights and results in bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="", help="also write the lines to this file")
    given = parser.parse_args()
    kernels, why = choose("auto", written=("gpu",), untried=True)
    if kernels != "gpu":
        sys.exit(f"nothing to check: {why}")
    lines = []
    for line in checks():
        print(line, flush=True)
        lines.append(line)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"device": why, "jax": jax.__version__, "checks": lines}, file, indent=1)
    if not all(line["right"] for line in lines):
        sys.exit(1)


def checks() -> Iterator[dict[str, Any]]:
    for name, model in MODELS.items():
        for requests in REQUESTS:
            yield {"case": f"fused_verify {name} R={requests} K={DRAFTS}"} | check_fused_verify(model, requests, "gpu")
    for shape in SHAPES:
        shapes, options = attention_arguments("Qwen3-8B", shape, PAGES, layers=1)
        yield {"case": f"ragged_attention Qwen3-8B {shape}"} | check_attention(shapes, options, "gpu")
    for name, model in MODELS.items():
        count = chunk_rows(2**20, model.vocab) + 100  # a chunk, and some rows of another
        yield {"case": f"distribution_loss {name} M={count}"} | check_loss(model, count, RANK, "gpu")
    for blocks, length in ((512, 4096), (100, 1000)):
        yield {"case": f"anchor_attention Qwen3-8B N={blocks} S={length}"} | check_anchors(blocks, length, "gpu")
    for name, vocab, requests in sampler_report.SIZES:
        shapes = sampler_report.arguments(requests, vocab, sampler_report.RANK)
        yield {"case": f"markov_sampler {name} R={requests}"} | check_sampler(shapes, "gpu")


def check_fused_verify(model: Model, requests: int, backend: str) -> dict[str, Any]:
    """Whether verification by the kernel is right, and seconds of it, of XLA's, and of the floor."""
    rng = np.random.default_rng(0)
    num_rows = requests * (DRAFTS + 1)
    hidden, head = exact(rng, (num_rows, model.width)), random_head(rng, model)
    found = compare_statistics(hidden, head, random_query(rng, num_rows, head.vocab_size), backend)
    arguments = (hidden, head, *random_drafts(rng, requests, head.vocab_size))
    verdicts, seconds = {}, {}
    by_kernel = jax.jit(lambda *a: verify_by_kernel(*a, sampler="rejection", backend=backend))
    by_xla = jax.jit(lambda *a: verify_by_xla(*a, sampler="rejection"))
    for way, verify in (("kernel", by_kernel), ("xla", by_xla)):
        seconds[way], out = timed(verify, *arguments)
        verdicts[way] = np.stack([out.accepted_R, out.next_R])
    same = float(np.mean(verdicts["kernel"] == verdicts["xla"]))
    floor = seconds_to_read(head.weight, hidden)
    right = found["largest_error"] < TOLERANCE and found["same_best"] == same == 1
    return {"right": right, **found, "same_tokens": same, "seconds": seconds | {"floor": floor}}


def seconds_to_read(*arrays: jax.Array) -> float | None:
    """From the card's memory at its full rate; None for a card that is not known."""
    kind = jax.devices()[0].device_kind
    bandwidth = next((rate for card, rate in BANDWIDTH.items() if card in kind), None)
    return sum(a.nbytes for a in arrays) / bandwidth if bandwidth else None


def check_attention(shapes: tuple[Any, ...], options: dict[str, Any], backend: str) -> dict[str, Any]:
    """Of whole blocks behind prefixes that fill their tables, whose pages lie anywhere, against XLA's in float32."""
    rng = np.random.default_rng(0)
    q, k, v, whole, prefix, _ = shapes
    normal = lambda a: jnp.asarray(rng.normal(size=a.shape).astype(np.float32), a.dtype)  # noqa: E731
    pools = normal(prefix.k_LxPxKVxSxD), normal(prefix.v_LxPxKVxSxD)
    table = rng.permutation(pools[0].shape[1])[: prefix.table_RxC.size].reshape(prefix.table_RxC.shape)
    length = jnp.full(whole.shape, table.shape[1] * pools[0].shape[3], jnp.int32)
    prefix = Prefix(*pools, jnp.asarray(table, jnp.int32), length)
    count = jnp.full(whole.shape, options["block"], jnp.int32)
    arguments = (normal(q), normal(k), normal(v), count, prefix, jnp.int32(0))
    ways = {way: jax.jit(functools.partial(attend, **options, backend=way)) for way in {backend, "xla"}}
    seconds, out = {}, {}
    for name, way in (("kernel", backend), ("xla", "xla")):
        seconds[name], out[name] = timed(ways[way], *arguments)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, arguments)
    error = float(jnp.max(jnp.abs(out["kernel"].astype(jnp.float32) - ways["xla"](*wide))))
    return {"right": error < ROUNDING, "largest_error": error, "seconds": seconds | {"floor": seconds_to_read(*pools)}}


def check_loss(model: Model, num_rows: int, rank: int, backend: str) -> dict[str, Any]:
    """Losses and gradients against XLA's; logits are exact in any order of summation."""
    case = random_loss(np.random.default_rng(0), model, num_rows, rank)
    seconds, out = {}, {}
    for name, way in (("kernel", backend), ("xla", "xla")):
        seconds[name], out[name] = timed(jax.jit(functools.partial(gradients, backend=way)), *case)
    wide = lambda a: a.astype(jnp.float32)  # noqa: E731
    relative = lambda a, b: float(jnp.max(jnp.abs(wide(a) - wide(b))) / jnp.max(jnp.abs(wide(b))))  # noqa: E731
    losses, slopes = (max(jax.tree.leaves(jax.tree.map(relative, *parts))) for parts in zip(*out.values(), strict=True))
    floor = seconds_to_read(*jax.tree.leaves(case))
    right = losses < TOLERANCE and slopes < ROUNDING
    return {"right": right, "losses_error": losses, "slopes_error": slopes, "seconds": seconds | {"floor": floor}}


def random_loss(
    rng: np.random.Generator, model: Model, num_rows: int, rank: int
) -> tuple[Rows, Targets, Vocabulary, RowWeights]:
    """As many targets as rows; some rows have no label, some no source."""
    label, source = (jnp.asarray(rng.integers(-1, n, num_rows), jnp.int32) for n in (model.vocab, num_rows))
    rows = Rows(exact(rng, (num_rows, model.width)), exact(rng, (num_rows, rank)), label, source)
    tables = exact(rng, (model.vocab, model.width)), exact(rng, (model.vocab, rank))
    vocabulary = Vocabulary(*tables, model.softcap)
    hidden = exact(rng, (num_rows, model.width))
    log_total = jax.nn.logsumexp(capped_logits(hidden, vocabulary), axis=-1)
    each = jnp.full(num_rows, 1 / num_rows, jnp.float32)
    return rows, Targets(hidden, log_total), vocabulary, RowWeights(each, each, None)


def check_anchors(blocks: int, length: int, backend: str) -> dict[str, Any]:
    """Blocks all over a document, and the gradients of their attention, against XLA's in float32."""
    rng = np.random.default_rng(0)
    shapes, options = anchor_arguments("Qwen3-8B", 1, blocks, length)
    arrays = tuple(jnp.asarray(rng.normal(size=a.shape).astype(np.float32), a.dtype) for a in shapes[:5])
    anchor = jnp.asarray(np.sort(rng.integers(0, length + 1, (1, blocks))), jnp.int32)
    ways = {way: jax.jit(functools.partial(anchor_gradients, **options, backend=way)) for way in {backend, "xla"}}
    seconds, out = {}, {}
    for name, way in (("kernel", backend), ("xla", "xla")):
        seconds[name], out[name] = timed(ways[way], *arrays, anchor, anchor // 2)
    want = ways["xla"](*(a.astype(jnp.float32) for a in arrays), anchor, anchor // 2)
    difference = lambda a, b: float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))  # noqa: E731
    error = max(jax.tree.leaves(jax.tree.map(difference, out["kernel"], want)))
    floor = seconds_to_read(*arrays)
    return {"right": error < ROUNDING, "largest_error": error, "seconds": seconds | {"floor": floor}}


def check_sampler(shapes: tuple[Any, ...], backend: str) -> dict[str, Any]:
    """A draft of every request, by the kernel and from logits in memory; half of them get noise."""
    rng = np.random.default_rng(0)
    speech, _, factor, *_ = shapes
    drafts, requests, _ = speech.base_KxRxVd.shape
    base, correction = exact(rng, speech.base_KxRxVd.shape) * 8, exact(rng, speech.correction_Vdxr.shape)
    speech = speech.replace(base_KxRxVd=base, correction_Vdxr=correction, token_ids_Vd=jnp.arange(len(correction)))
    few = jnp.arange(factor.shape[1]) < 4  # whose products' sums bfloat16 holds
    query = random_query(rng, requests, speech.num_tokens)
    asked = jnp.int32(drafts - 1), exact(rng, factor.shape) * few, query.temperature_N, query.noisy_N, query.key_N
    seconds, out = {}, {}
    for name, way in zip(("xla", "kernel"), sampler_report.ways(backend), strict=True):
        seconds[name], out[name] = timed(jax.jit(way), speech, *asked)
    (token, log_q), (want, want_log_q, _) = out["kernel"], out["xla"]
    found = {
        "largest_error": float(jnp.max(jnp.abs(log_q - want_log_q))),
        "same_tokens": float(jnp.mean(token == want)),
    }
    right = found["largest_error"] < TOLERANCE and found["same_tokens"] == 1
    return {"right": right, **found, "seconds": seconds | {"floor": seconds_to_read(base[0], correction)}}


def compare_statistics(hidden_NxH: jax.Array, head: Head, query: Query, backend: str) -> dict[str, float]:
    """The largest difference between the kernel's statistics and the reference's, and how many best tokens agree."""
    got, want = (
        jax.jit(row_statistics, static_argnames="backend")(hidden_NxH, head, query, backend=way)
        for way in (backend, "xla")
    )
    names = ("log_total_N", "log_total_warped_N", "token_logit_N")
    error = max(float(jnp.max(jnp.abs(getattr(got, name) - getattr(want, name)))) for name in names)
    best = [jnp.take_along_axis(s.id_NxC, jnp.argmax(s.score_NxC, axis=1, keepdims=True), axis=1) for s in (got, want)]
    tops = [jnp.max(s.score_NxC, axis=1) for s in (got, want)]
    error = max(error, float(jnp.max(jnp.abs(tops[0] - tops[1]))))
    return {"largest_error": error, "same_best": float(jnp.mean(best[0] == best[1]))}


def exact(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    """Eighths of small whole numbers: float32 sums of their products are exact in any order."""
    return jnp.asarray(rng.integers(-2, 3, shape, dtype=np.int8), jnp.bfloat16) / 8


def random_head(rng: np.random.Generator, model: Model) -> Head:
    shape = (model.vocab, model.width) if model.tied else (model.width, model.vocab)
    return Head(exact(rng, shape), model.vocab, model.softcap, not model.tied)


def random_query(rng: np.random.Generator, num_rows: int, vocab: int) -> Query:
    words = tuple(jnp.asarray(rng.integers(0, 2**32, num_rows, dtype=np.uint32)) for _ in range(2))
    noisy = jnp.asarray(rng.integers(0, 2, num_rows), bool)
    token = jnp.asarray(rng.integers(0, vocab, num_rows), jnp.int32)
    return Query(token, jnp.where(noisy, 0.7, 1).astype(jnp.float32), noisy, words)


def random_drafts(rng: np.random.Generator, requests: int, vocab: int) -> tuple[Any, ...]:
    """What `verify_by_kernel` takes behind the head: whole blocks, drafts of a flat law, temperatures, seeds."""
    whole = jnp.full(requests, DRAFTS + 1, jnp.int32)
    token = jnp.asarray(rng.integers(0, vocab, (requests, DRAFTS)), jnp.int32)
    flat = Written(jnp.zeros((requests, DRAFTS, vocab), jnp.float32))
    drafts = Drafts(token, jnp.full(token.shape, -np.log(vocab), jnp.float32), flat, jnp.arange(vocab, dtype=jnp.int32))
    seed = tuple(jnp.asarray(rng.integers(0, 2**32, requests, dtype=np.uint32)) for _ in range(2))
    return whole, whole, drafts, jnp.ones(requests, jnp.float32), seed


def timed(call: Callable[..., Any], *arguments: Any, repeats: int = 20) -> tuple[float, Any]:
    """Median seconds of a call that has been compiled and run before; and what it returns."""
    out = jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), out


if __name__ == "__main__":
    main()
