"""What the kernel of the in-block loop saves: lines of `python -m pallas_kernels.report`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import warp as warps
from pallas_kernels.draft_law import Speech
from pallas_kernels.markov_sampler import draw_draft
from pallas_kernels.noise import Key, fold_in
from pallas_kernels.warp import Warp

RANK = 256  # of DSpark's in-block head
DRAFTS = 7


def arguments(requests: int, vocab: int, rank: int) -> tuple[Any, ...]:
    """Shapes of `draw_draft`'s arguments, in bfloat16."""
    array = jax.ShapeDtypeStruct
    speech = Speech(
        array((DRAFTS, requests, vocab), jnp.bfloat16), array((vocab, rank), jnp.bfloat16), array((vocab,), jnp.int32),
        vocab,
    )  # fmt: skip
    word, single = array((requests,), jnp.uint32), array((requests,), jnp.float32)
    factor = array((requests, rank), jnp.bfloat16)
    return speech, array((), jnp.int32), factor, single, array((requests,), jnp.bool), (word, word)


def by_kernel(speech: Speech, k, factor_Rxr, temperature_R, noisy_R, key_R, backend: str = "tpu") -> Any:
    drawn = draw_draft(speech, k, factor_Rxr, temperature_R, noisy_R, key_R, backend)
    return drawn.index_R, drawn.log_q_R


def from_logits(speech: Speech, k, factor_Rxr, temperature_R, noisy_R, key_R) -> Any:
    """A draft as the engine draws it from logits in memory, which it keeps for the residual."""
    from dspark_jax.decoding.sampling import draw, log_prob_of

    logits = speech.base_KxRxVd[k] + jnp.einsum("rf,vf->rv", factor_Rxr, speech.correction_Vdxr)
    warp = Warp.temperatures(jnp.where(noisy_R, temperature_R, 0))
    warped = warps.scaled(logits, warp)
    index_R = draw(warped, warp, key_R, speech.token_ids_Vd)
    return index_R, log_prob_of(warped, index_R), warped


def draw_block(
    speech: Speech, table_Vxr: jax.Array, anchor_R: jax.Array, temperature_R: jax.Array, noisy_R: jax.Array, key_R: Key,
    *, draw: Callable[..., Any],
) -> Any:  # fmt: skip
    """All drafts of a vanilla head, each drawn by `draw`."""

    def body(token_R: jax.Array, k: jax.Array) -> tuple[jax.Array, Any]:
        out = draw(speech, k, table_Vxr[token_R], temperature_R, noisy_R, fold_in(key_R, k))
        return out[0], out

    return jax.lax.scan(body, anchor_R, jnp.arange(DRAFTS))[1]


SIZES = ("Qwen3-8B", 151_936, 16), ("Qwen3-8B", 151_936, 64), ("Gemma4-12B", 262_144, 16)


def ways(backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How a draft is drawn: from logits in memory, and by the kernel."""
    return from_logits, functools.partial(by_kernel, backend=backend)


def block_programs(
    compile_for: Callable[..., jax.stages.Compiled], chip: str, shapes: tuple[Any, ...], backend: str
) -> list[jax.stages.Compiled]:
    """Both ways to draw a block, of which `shapes` are a draft's."""
    speech, _, _, temperature, noisy, key = shapes
    anchor, table = jax.ShapeDtypeStruct(temperature.shape, jnp.int32), speech.correction_Vdxr
    asked = speech, table, anchor, temperature, noisy, key
    return [compile_for(chip, draw_block, *asked, draw=draw) for draw in ways(backend)]


def temporaries(programs: list[jax.stages.Compiled]) -> tuple[int, ...]:
    """Bytes of a block, with the logits that verification will need."""
    sizes = [program.memory_analysis() for program in programs]
    return tuple(size.temp_size_in_bytes + size.output_size_in_bytes for size in sizes)


def markov_sampler_lines(
    compile_tpu: Callable[..., jax.stages.Compiled], chip: str
) -> Iterator[tuple[str, str, tuple[int, ...], tuple[float, ...]]]:
    """Operation, size, and bytes before and after. Moved are one draft's: XLA's account has a loop's body once."""
    for name, vocab, requests in SIZES:
        programs = block_programs(compile_tpu, chip, arguments(requests, vocab, RANK), "tpu")
        moved = tuple(program.cost_analysis()["bytes accessed"] for program in programs)
        yield "markov_sampler", f"{name} R={requests} r={RANK}", temporaries(programs), moved
