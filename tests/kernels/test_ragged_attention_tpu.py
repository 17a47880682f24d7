"""The TPU kernel of ragged attention: numerics in the interpreter that finds races, and compilation for real chips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.ragged_attention import Prefix, ragged_attention, ragged_rows, reference, tpu, unsupported
from pallas_kernels.ragged_attention.report import KINDS, SHAPES, arguments, attend, ragged_attention_lines
from tests.kernels.targets import compile_tpu, every_tpu, has_kernel, needs_libtpu, tpu_interpreter, tpu_mesh

REQUESTS, BLOCK, NUM_ROWS, WIDTH, LAYERS = 3, 5, 12, 4, 2


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Tiles of two or more block rows and chunks of two pages, so that small shapes take several of each."""
    monkeypatch.setattr(tpu, "TILE", 8)
    monkeypatch.setattr(tpu, "CHUNK", 16)


@functools.partial(jax.jit, static_argnames=("attend", "block", "options"))
def run(attend, q, k, v, counts, prefix, block, options):
    rows = ragged_rows(counts, prefix.length_R, len(q), block)
    return attend(q, k, v, rows, prefix, 1, **dict(options))


def arrays(lengths, heads=4, kv_heads=2, dim=8, page=8, num_rows=NUM_ROWS, dtype=jnp.float32, seed=0):
    """q, k, v and a pool with pages in any order; rows behind the prefixes hold large numbers."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    pages = REQUESTS * WIDTH + 2
    table = rng.permutation(pages)[: REQUESTS * WIDTH].reshape(REQUESTS, WIDTH).astype(np.int32)
    pools = [np.full((LAYERS, pages, kv_heads, page, dim), 1e30, np.float32) for _ in range(2)]
    for request, length in enumerate(lengths):
        row = np.arange(length)
        for pool in pools:
            pool[:, table[request, row // page], :, row % page] = draw(length, LAYERS, kv_heads, dim)
    cast = lambda a: jnp.asarray(a, dtype)  # noqa: E731
    prefix = Prefix(*map(cast, pools), jnp.asarray(table), jnp.asarray(lengths, jnp.int32))
    q, k, v = draw(num_rows, heads, dim), draw(num_rows, kv_heads, dim), draw(num_rows, kv_heads, dim)
    return cast(q), cast(k), cast(v), prefix


def check(counts, lengths, block=BLOCK, tolerance=2e-6, num_rows=NUM_ROWS, seed=0, shape=None, **options):
    """Compares the kernel's real rows with the reference's, and wants finite padding."""
    q, k, v, prefix = arrays(lengths, num_rows=num_rows, seed=seed, **(shape or {}))
    options = tuple(sorted({"causal": True, "scale": q.shape[-1] ** -0.5, **options}.items()))
    counts = jnp.asarray(counts, jnp.int32)
    with tpu_interpreter():
        out = np.asarray(run(tpu.ragged_attention, q, k, v, counts, prefix, block, options), np.float32)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, (q, k, v, counts, prefix))
    expected = np.asarray(run(reference.ragged_attention, *wide, block, options))
    real = int(counts.sum())
    np.testing.assert_allclose(out[:real], expected[:real], rtol=tolerance, atol=tolerance)
    assert np.isfinite(out).all()
    return out[real:]


OPTIONS = {
    "causal": {},
    "both ways": {"causal": False},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window over pages": {"window": 19},
    "window from the anchor": {"window": 9, "from_anchor": True, "causal": False},
    "soft cap": {"softcap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_the_reference_for_any_counts_and_lengths(options, data):
    counts = data.draw(st.lists(st.integers(0, BLOCK), min_size=3, max_size=3).filter(lambda c: sum(c) <= NUM_ROWS))
    lengths = data.draw(st.lists(st.integers(0, WIDTH * 8), min_size=3, max_size=3))
    check(counts, lengths, seed=data.draw(st.integers(0, 99)), **options)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups_of_query_heads(group):
    check([3, 0, 5], [20, 9, 0], shape={"heads": 2 * group})


@pytest.mark.parametrize(
    ("counts", "lengths"), [([1, 1, 1], [31, 0, 8]), ([0, 0, 0], [5, 0, 8]), ([0, 1, 0], [9, 16, 3])]
)
def test_plain_decoding(counts, lengths):
    padding = check(counts, lengths, block=1, num_rows=4)
    if not sum(counts):
        np.testing.assert_array_equal(padding, 0)


def test_a_block_of_several_tiles_as_in_prefill():
    check([11, 4, 9], [24, 0, 13], block=11, num_rows=26)
    check([11, 4, 9], [24, 0, 13], block=11, num_rows=26, window=7)


def test_a_tile_of_many_queries(monkeypatch):
    """Past 128 queries the heads run in a loop."""
    monkeypatch.setattr(tpu, "TILE", 512)
    check([17, 0, 3], [20, 9, 0], block=17, num_rows=22, shape={"heads": 16})


def test_one_head_of_keys_and_a_wide_head():
    check([2, 5, 1], [17, 3, 32], shape={"heads": 4, "kv_heads": 1, "dim": 256})


def test_bfloat16():
    check([5, 2, 4], [30, 0, 16], tolerance=2e-2, shape={"dtype": jnp.bfloat16, "page": 16})


def test_a_request_longer_than_its_table_reads_the_table():
    """Slots that have ended keep their length while the table narrows to what the others need."""
    q, k, v, prefix = arrays([31, 32, 0])
    narrow, counts = prefix.replace(table_RxC=prefix.table_RxC[:, :3]), jnp.asarray([2, 5, 2], jnp.int32)
    options = (("causal", False), ("scale", 1.0))
    with tpu_interpreter():
        out = run(tpu.ragged_attention, q, k, v, counts, narrow, BLOCK, options)
    expected = run(reference.ragged_attention, q, k, v, counts, narrow, BLOCK, options)
    np.testing.assert_allclose(out[:9], expected[:9], rtol=2e-6, atol=2e-6)


def test_stale_rows_of_other_steps_have_no_effect():
    """A short prefix behind a long one leaves most of the buffer as it was."""
    check([5, 5, 2], [32, 1, 17], causal=False)


# ------------------------------------------------------------------------------------------------------ real chips


@pytest.fixture
def real_steps(monkeypatch, small_steps):
    monkeypatch.setattr(tpu, "TILE", 512)
    monkeypatch.setattr(tpu, "CHUNK", 512)


def check_compiled(chip, kind, shape, dtype=jnp.bfloat16):
    args, options = arguments(kind, shape, 64, dtype)
    compiled = compile_tpu(chip, attend, *args, **options)
    assert has_kernel(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < most_temporaries(*args)


def most_temporaries(q, k, v, *_) -> int:
    """Room for the blocks' rows, regrouped; none for what the prefixes' pages hold."""
    return 4 * (q.size + k.size + v.size) * q.dtype.itemsize + 2**20


@needs_libtpu
@pytest.mark.usefixtures("real_steps")
@every_tpu
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("Qwen3-8B", "verification"), ("Gemma4-12B full", "decoding"), ("Gemma4-12B sliding", "draft block")],
)
def test_compiles_for_the_chip(chip, kind, shape):
    check_compiled(chip, kind, shape)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.usefixtures("real_steps")
@every_tpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_compiles_for_every_chip(chip, kind, shape, dtype):
    check_compiled(chip, kind, shape, dtype)


@needs_libtpu
@pytest.mark.usefixtures("real_steps")
@pytest.mark.parametrize("kind", ["Qwen3-8B", "Gemma4-12B full"])
def test_on_a_mesh_each_device_attends_with_its_own_heads(kind):
    args, options = arguments(kind, "verification", 64)
    mesh = tpu_mesh("v5e", (2, 4))
    kv = "model" if KINDS[kind][1] > 1 else None
    prefix = Prefix(P(None, None, kv), P(None, None, kv), P(), P())
    specs = (P(None, "model"), P(None, kv), P(None, kv), P(), prefix, P())
    place = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    placed = jax.tree.map(place, args, specs)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(functools.partial(attend, **options)).lower(*placed).compile()
    assert has_kernel(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes < most_temporaries(*args)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.usefixtures("real_steps")
def test_the_kernel_moves_fewer_bytes_than_xla():
    lines = list(ragged_attention_lines(compile_tpu, "v5e"))
    assert len(lines) == len(KINDS) * len(SHAPES)
    for op, size, temporary, moved in lines:
        assert temporary[1] < 5e6, (op, size)  # the blocks' rows, regrouped
        assert moved[1] < moved[0] / 2, (op, size)


# ------------------------------------------------------------------------------------------------------- the choice


def test_what_the_kernel_cannot_take_goes_to_xla_for_a_reason():
    q, k, v, prefix = arrays([8, 3, 0], dim=128)
    rows = ragged_rows(jnp.asarray([2, 1, 2]), prefix.length_R, len(q), BLOCK)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a, prefix)
    wide = prefix.replace(table_RxC=jax.ShapeDtypeStruct((REQUESTS, 1 << 20), jnp.int32))
    assert unsupported(q, rows, prefix) is None
    assert "no cached prefix" in unsupported(q, rows, None)
    assert "bfloat16" in unsupported(q, rows, half)
    assert "whole tiles" in unsupported(q.astype(jnp.bfloat16), rows, half)
    assert "head dim 64" in unsupported(q, rows, jax.tree.map(lambda a: a[..., :64] if a.ndim == 5 else a, prefix))
    assert "scalar memory" in unsupported(q, rows, wide)


def test_a_cpu_runs_xla():
    q, k, v, prefix = arrays([8, 3, 0], dim=128)
    options = (("causal", True), ("scale", 0.1))
    counts = jnp.asarray([2, 1, 2], jnp.int32)
    outs = [
        run(attend, q, k, v, counts, prefix, BLOCK, options)
        for attend in (ragged_attention, reference.ragged_attention)
    ]
    np.testing.assert_array_equal(*outs)
