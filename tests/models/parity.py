"""Comparing a decoder with its model in `transformers`: random weights, dense and cached runs, refusals."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.decoding.caches import empty_pools, view_pools, write_pools
from dspark_jax.errors import UserError
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.attention import attend_rows
from dspark_jax.models.target import Decoder
from pallas_kernels.ragged_attention import ragged_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

LENGTH, VOCAB = 40, 67


def randomise(model: transformers.PreTrainedModel, seed: int) -> transformers.PreTrainedModel:
    """The model with every number random: norms and Gemma4's layer scalars are not one, biases are not zero."""
    torch.manual_seed(seed)
    scalars = [(path, buffer) for path, buffer in model.named_buffers() if path.endswith("layer_scalar")]
    with torch.no_grad():
        for path, array in [*model.named_parameters(), *scalars]:
            noise = torch.randn(array.shape)
            array.copy_(1 + 0.3 * noise if "norm" in path or "scalar" in path else 0.3 * noise)
    return model.eval()


def tokens_of(batch: int, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length)).astype(np.int32)


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@torch.no_grad()
def run_torch(model: transformers.PreTrainedModel, tokens: np.ndarray, **options) -> Any:
    return model(torch.from_numpy(np.asarray(tokens, np.int64)), **options)


def assert_close(got: jax.Array, expected: Any, relative: float) -> None:
    """The largest difference, relative to the largest expected number."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= relative * np.abs(expected).max()


@functools.partial(jax.jit, static_argnames=("module", "block"))
def cached_step(module, params, pools, token_N, count_R, keep_R, length_R, table_RxC, *, block):
    """One pass over flat rows: logits and taps of the rows, and the pools with the first `keep_R` rows of each slot."""
    rows = ragged_rows(count_R, length_R, len(token_N), block)
    attend = attend_rows(module.config, rows, view_pools(pools, table_RxC, length_R))
    output = module.apply({"params": params}, token_N, rows.position_N, attend)
    logits = module.apply({"params": params}, output.hidden_NxH, method=Decoder.logits)
    pools = write_pools(pools, output.kv, table_RxC, rows, rows.offset_N < keep_R[rows.slot_N])
    return logits, output.taps_NxMH, pools


class CachedRun:
    """Two or more sequences side by side over one page pool, fed piece by piece."""

    PAGE = 4

    def __init__(self, target: Target, slots: int, capacity: int):
        self.target, columns = target, -(-capacity // self.PAGE)
        pages = slots * columns + 2
        # Neighbouring rows lie on distant pages, and what was there before is large.
        order = np.random.default_rng(0).permutation(pages)[: slots * columns]
        self.table = jnp.asarray(order.reshape(slots, columns), jnp.int32)
        empty = empty_pools(target.config, pages, self.PAGE, target.dtype)
        self.pools = jax.tree.map(lambda pool: pool + 1e4, empty)
        self.lengths = np.zeros(slots, np.int32)

    def feed(self, pieces: list[np.ndarray], num_rows: int, block: int, keep: list[int] | None = None):
        """Logits and taps of each slot's piece; `keep`: how many of its rows stay in the cache, all by default."""
        counts = np.array([len(piece) for piece in pieces], np.int32)
        kept = counts if keep is None else np.array(keep, np.int32)
        flat = np.zeros(num_rows, np.int32)
        flat[: counts.sum()] = np.concatenate(pieces)
        logits, taps, self.pools = cached_step(
            self.target.module,
            self.target.params,
            self.pools,
            flat,
            counts,
            kept,
            self.lengths,
            self.table,
            block=block,
        )
        self.lengths = self.lengths + kept
        ends = np.cumsum(counts)[:-1]
        return [np.split(np.asarray(rows)[: counts.sum()], ends) for rows in (logits, taps)]


# (rows of each slot, buffer, block): prefill in two chunks, blocks of several rows, then single rows.
SCHEDULE = [
    ((13, 6), 24, 16), ((11, 9), 24, 16), ((5, 2), 10, 5), ((4, 5), 10, 5), ((0, 3), 10, 5),
    *[((1, 1), 2, 1)] * 4, *[((1, 0), 2, 1)] * 3,
]  # fmt: skip


def run_cached(target: Target, sequences: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits and taps of whole sequences, computed along `SCHEDULE`."""
    run = CachedRun(target, len(sequences), LENGTH)
    made = [([], []) for _ in sequences]
    for step, (counts, num_rows, block) in enumerate(SCHEDULE):
        if block == 5:  # rejected rows leave no trace
            wrong = [tokens_of(1, 5, seed=step)[0] for _ in sequences]
            run.feed(wrong, num_rows, block, keep=[0] * len(sequences))
        spans = zip(sequences, run.lengths, counts, strict=True)
        pieces = [sequence[start : start + count] for sequence, start, count in spans]
        for slot, outputs in enumerate(zip(*run.feed(pieces, num_rows, block), strict=True)):
            for store, rows in zip(made[slot], outputs, strict=True):
                store.append(rows)
    assert run.lengths.tolist() == [len(sequence) for sequence in sequences]
    logits, taps = zip(*([np.concatenate(rows) for rows in slot] for slot in made), strict=True)
    return logits, taps


def run_torch_cached(model: transformers.PreTrainedModel, sequence: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Logits `[T, V]` of a sequence that `transformers` reads in pieces, with its own cache."""
    # The argument was called past_key_values before transformers 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {name: transformers.DynamicCache(config=model.config)}
    pieces = np.split(sequence, cuts)
    return np.concatenate([run_torch(model, piece[None], use_cache=True, **cache).logits[0] for piece in pieces])


def message(source: str | Path, **options) -> str:
    """The one line that `load_target` refuses with."""
    with pytest.raises(UserError) as caught:
        load_target(source, dtype="float32", **options)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**read_config(directory), **changes}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def load_tapped(directory: Path, **options) -> Target:
    """A target whose taps are all hidden states that `transformers` gives: of every layer but the last.

    The last layer's raw output is not among them: `transformers` gives it after the final norm.
    """
    target = load_target(directory, **options)
    return target.with_taps(tuple(range(-1, target.config.num_layers - 1)))


def check_parity(target: Target, model: transformers.PreTrainedModel, relative: float = 1e-4) -> None:
    """Logits and taps as in `transformers`, in one pass and through the pages, in pieces, with rejected rows."""
    sequences = [tokens_of(1, LENGTH, seed=1)[0], tokens_of(1, 29, seed=2)[0]]
    dense = target(np.stack([np.pad(sequence, (0, LENGTH - len(sequence))) for sequence in sequences]))
    logits, taps = run_cached(target, sequences)
    for slot, sequence in enumerate(sequences):
        expected = run_torch(model, sequence[None], output_hidden_states=True)
        hidden = np.concatenate(expected.hidden_states[:-1], axis=-1)[0]
        for got in (dense.logits[slot, : len(sequence)], logits[slot]):
            assert_close(got, expected.logits[0], relative)
        for got in (dense.taps[slot, : len(sequence)], taps[slot]):
            assert_close(got, hidden, relative)
        assert_close(dense.last_hidden[slot, : len(sequence)], expected.hidden_states[-1][0], relative)
        cuts = np.cumsum([counts[slot] for counts, *_ in SCHEDULE if counts[slot]])[:-1]
        assert_close(logits[slot], run_torch_cached(model, sequence, cuts), relative)
