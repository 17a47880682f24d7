"""Compiles the GPU kernels for an H100 that is not here, in a process of its own: what LLVM rejects can end a process.

Prints a line of JSON for each program, by name: whether it holds a kernel, and of which operations, whether one of its
registers is spilled, its temporary bytes, or why it does not compile; at last END.
"""

import functools
import json
import os
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode_round
from pallas_kernels import report
from pallas_kernels.anchor_attention.report import arguments as anchor_arguments
from pallas_kernels.anchor_attention.report import gradients as anchor_gradients
from pallas_kernels.distribution_loss.report import arguments as loss_arguments
from pallas_kernels.distribution_loss.report import gradients
from pallas_kernels.fused_verify import gpu
from pallas_kernels.markov_sampler import gpu as sampler_gpu
from pallas_kernels.markov_sampler import report as sampler_report
from pallas_kernels.ragged_attention.report import arguments as attention_arguments
from pallas_kernels.ragged_attention.report import attend
from pallas_kernels.targets import compile_gpu, has_kernel
from tests.decoding.conftest import make_drafter, make_target

END = "all programs are through"
ROWS = [("Qwen3-8B", 128), ("Gemma4-12B", 8)]
LOSS_ROWS = 3584
SHARED = 228 * 1024  # bytes that a block may have, and a little more
LINE = jax.ShapeDtypeStruct((128,), jnp.float32)


def too_large(x: jax.Array) -> jax.Array:
    """A kernel whose scratch does not fit the shared memory."""

    def kernel(x_ref, out_ref, scratch):
        out_ref[...] = x_ref[...]

    scratch = [plgpu.SMEM((SHARED,), jnp.int8)]
    return plgpu.kernel(kernel, out_type=LINE, scratch_types=scratch)(x)


def programs():
    """Name, function, arguments; what is compiled for a B200 says so in its name."""
    for name, rows in ROWS:
        yield f"fused_verify {name} {rows}", gpu.row_statistics, report.row_arguments(name, rows)
    arguments, options = attention_arguments("Qwen3-8B", "verification", 64)
    yield "attention", functools.partial(attend, **options, backend="gpu"), arguments
    for name, model in report.MODELS.items():
        arguments = loss_arguments(model.width, model.vocab, model.softcap, LOSS_ROWS)
        yield f"loss {name}", functools.partial(gradients, backend="gpu"), arguments
    arguments, options = anchor_arguments("Qwen3-8B", 1, 512, 4096)
    yield "anchors", functools.partial(anchor_gradients, **options, backend="gpu"), arguments
    yield "too large", too_large, (LINE,)
    yield "fused_verify, B200", gpu.row_statistics, report.row_arguments("Qwen3-8B", 8)
    for name, vocab, requests in sampler_report.SIZES:
        arguments = sampler_report.arguments(requests, vocab, sampler_report.RANK)
        yield f"markov_sampler {name} {requests}", sampler_gpu.best_draft, arguments
    target = make_target("bfloat16", vocab=256, hidden=64)
    for drafter, drafts in ((None, 0), (make_drafter(target), 2)):
        strategy = f"fixed:{drafts}" if drafts else "off"
        engine = Engine(target, drafter, strategy=strategy, max_slots=2, cache_tokens=128, kernels="gpu")
        one_round = functools.partial(decode_round, engine.models, engine.policy, drafts=drafts, context_pages=2)
        yield f"round of {drafts} drafts", one_round, (engine.weights, engine.caches, engine.slots)


def main() -> None:
    for name, function, arguments in programs():
        line = {"name": name}
        with tempfile.TemporaryDirectory() as dumped:
            os.environ["MOSAIC_GPU_DUMP_TO"] = dumped
            try:
                compiled = compile_gpu("B200" if "B200" in name else "H100", function, *arguments)
                held = re.findall(r"/([a-z]+_[a-z]+)\w*/mpmd_map", compiled.as_text())
                line |= {"held": sorted(set(held)), "bytes": compiled.memory_analysis().temp_size_in_bytes}
                line["kernel"] = has_kernel(compiled)
            except Exception as error:  # of many kinds, and the other programs are wanted too
                line["error"] = str(error)
            line["spills"] = any("spilled" in file.read_text() for file in Path(dumped).glob("*.ptxas"))
        print(json.dumps(line), flush=True)
    print(END)


if __name__ == "__main__":
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    main()
