"""What the kernel of ragged attention saves: lines of `python -m pallas_kernels.report`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_attention import Prefix, ragged_attention, ragged_rows

# query heads, key-value heads, head dim, window
KINDS = {"Qwen3-8B": (32, 8, 128, 0), "Gemma4-12B sliding": (16, 8, 256, 1024), "Gemma4-12B full": (16, 1, 512, 0)}
# requests, rows of each, causal
SHAPES = {
    "verification": (64, 8, True), "decoding": (64, 1, True), "prefill": (4, 128, True), "draft block": (64, 7, False)
}  # fmt: skip


def arguments(kind: str, shape: str, pages: int, dtype: Any = jnp.bfloat16, layers: int = 4) -> tuple[tuple, dict]:
    """Shapes of q, k, v, rows of each request, prefix and layer, and the options of `attend`; pages of 16 rows."""
    (heads, num_kv, dim, window), (requests, block, causal) = KINDS[kind], SHAPES[shape]
    array = jax.ShapeDtypeStruct
    pool = array((layers, requests * pages, num_kv, 16, dim), dtype)
    whole = array((requests,), jnp.int32)
    prefix = Prefix(pool, pool, array((requests, pages), jnp.int32), whole)
    q, k = array((requests * block, heads, dim), dtype), array((requests * block, num_kv, dim), dtype)
    options = {"block": block, "causal": causal, "scale": dim**-0.5, "window": window}
    return (q, k, k, whole, prefix, array((), jnp.int32)), options


def attend(q, k, v, count_R, prefix, layer, *, block: int, **options: Any) -> jax.Array:
    """`ragged_attention` of `count_R` rows of each request."""
    return ragged_attention(q, k, v, ragged_rows(count_R, prefix.length_R, len(q), block), prefix, layer, **options)


def ragged_attention_lines(
    compile_tpu: Callable[..., jax.stages.Compiled], chip: str, context: int = 2048
) -> Iterator[tuple[str, str, tuple[int, int], tuple[float, float]]]:
    """Operation, size, and bytes before and after, temporary and moved, where every prefix has `context` rows."""
    for kind in KINDS:
        for shape in SHAPES:
            shapes, options = arguments(kind, shape, context // 16)
            programs = [compile_tpu(chip, attend, *shapes, **options, backend=backend) for backend in ("xla", "tpu")]
            before, after = (program.memory_analysis().temp_size_in_bytes for program in programs)
            moved = tuple(program.cost_analysis()["bytes accessed"] for program in programs)
            yield f"attention, {shape}", f"{kind} R={SHAPES[shape][0]} C={context}", (before, after), moved
