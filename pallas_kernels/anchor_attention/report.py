"""What the kernels of training attention save: lines of `python -m pallas_kernels.report`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.anchor_attention import anchor_attention

KINDS = {"Qwen3-8B": (32, 8, 128), "Gemma4-12B": (16, 1, 512)}  # query heads, key-value heads, head dim
SLOTS = 7
TILE = 18, 256  # blocks and context rows of a tile of XLA's operations


def arguments(kind: str, packs: int, blocks: int, length: int, dtype: Any = jnp.bfloat16) -> tuple[tuple, dict]:
    """Shapes of the blocks' q, the context's k and v, the blocks' own, anchors, starts, and the options."""
    heads, num_kv, dim = KINDS[kind]
    array = jax.ShapeDtypeStruct
    context, block = array((packs, length, num_kv, dim), dtype), array((packs, blocks, SLOTS, num_kv, dim), dtype)
    q, place = array((packs, blocks, SLOTS, heads, dim), dtype), array((packs, blocks), jnp.int32)
    return (q, context, context, block, block, place, place), {"scale": dim**-0.5}


def gradients(q, k, v, k_block, v_block, anchor_BxN, start_BxN, *, scale: float, backend: str) -> Any:
    """The attention of blocks that are all kept, and gradients of its sum of squares."""
    keep_BxN = jnp.ones(anchor_BxN.shape, bool)

    def attend(*arrays: jax.Array) -> jax.Array:
        return anchor_attention(*arrays, anchor_BxN, keep_BxN, scale, start_BxN=start_BxN, backend=backend)

    out, pull = jax.vjp(attend, q, k, v, k_block, v_block)
    return out, pull(out)


def anchor_attention_lines(
    compile_tpu: Callable[..., jax.stages.Compiled], chip: str
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[float, ...]]]:
    """Operation, size, and bytes before and after, forward and backward.

    Temporary bytes are those of 512 blocks on 4096 rows. Moved bytes are those of one tile of blocks on one tile of the
    context, since XLA's account has a loop's body once.
    """
    for kind in KINDS:
        programs = [
            [compile_tpu(chip, gradients, *shapes, **options, backend=backend) for backend in ("tiled", "tpu")]
            for shapes, options in (arguments(kind, 1, 512, 4096), arguments(kind, 1, *TILE))
        ]
        temporary = tuple(program.memory_analysis().temp_size_in_bytes for program in programs[0])
        moved = tuple(program.cost_analysis()["bytes accessed"] for program in programs[1])
        yield "anchor_attention", f"{kind} N=512 S=4096", temporary, moved
