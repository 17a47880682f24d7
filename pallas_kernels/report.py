"""What the kernels save, by compiling for chips that are not here.

    python -m pallas_kernels.report [--chip=v5e] [--whole]

Every line compares an operation written for XLA with the same operation around its kernel, at a real model's size.
Temporary bytes are what the program holds beside its arguments and results (XLA's `memory_analysis`); moved bytes are
what its operations read and write on the path usually taken (XLA's `cost_analysis`; for a kernel what its blocks copy,
on a GPU also what they find in its cache, but of the loss's products each operand once, as of XLA's). `--whole`: the
temporary bytes of a whole training step and whole rounds of Qwen3-8B, each device's, on eight chips, and of the rounds
on one of them; that takes a quarter of an hour.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.anchor_attention import gpu as anchor_gpu
from pallas_kernels.anchor_attention.report import TILE, anchor_attention_lines
from pallas_kernels.anchor_attention.report import arguments as anchor_arguments
from pallas_kernels.anchor_attention.report import gradients as anchor_gradients
from pallas_kernels.distribution_loss import gpu as loss_gpu
from pallas_kernels.distribution_loss.chunks import chunk_rows
from pallas_kernels.distribution_loss.report import RANK, gradients
from pallas_kernels.distribution_loss.report import arguments as loss_arguments
from pallas_kernels.draft_law import Written
from pallas_kernels.fused_verify import Drafts, Head, Query, fused_verify
from pallas_kernels.fused_verify import gpu as verify_gpu
from pallas_kernels.fused_verify.verify import from_candidates
from pallas_kernels.markov_sampler import gpu as sampler_gpu
from pallas_kernels.markov_sampler import report as sampler_report
from pallas_kernels.ragged_attention import gpu as attention_gpu
from pallas_kernels.ragged_attention import ragged_rows
from pallas_kernels.ragged_attention.report import SHAPES, attend, ragged_attention_lines
from pallas_kernels.ragged_attention.report import arguments as attention_arguments
from pallas_kernels.targets import (
    TPUS,
    compile_gpu,
    compile_tpu,
    gpu_compiler_installed,
    has_kernel,
    libtpu_installed,
)  # fmt: skip
from pallas_kernels.warp import Warp


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a target that the operations see."""

    width: int
    vocab: int
    softcap: float
    tied: bool


MODELS = {"Qwen3-8B": Model(4096, 151_936, 0.0, False), "Gemma4-12B": Model(3840, 262_144, 30.0, True)}


@dataclasses.dataclass(frozen=True)
class Line:
    """One operation at one size on one chip, with its bytes before and after."""

    op: str
    shape: str
    chip: str
    temporary: tuple[int, int]
    moved: tuple[float, float]

    def __str__(self) -> str:
        sizes = [f"{before / 1e6:>10.1f} {after / 1e6:>10.1f}" for before, after in (self.temporary, self.moved)]
        return f"{self.op:<24} {self.shape:<28} {self.chip:<4} {' '.join(sizes)}"


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def row_arguments(name: str, num_rows: int) -> tuple[jax.ShapeDtypeStruct, Head, Query]:
    """Of `row_statistics`, in bfloat16."""
    model = MODELS[name]
    shape = (model.vocab, model.width) if model.tied else (model.width, model.vocab)
    head = Head(array(*shape, dtype=jnp.bfloat16), model.vocab, model.softcap, not model.tied)
    word = array(num_rows, dtype=jnp.uint32)
    query = Query(array(num_rows, dtype=jnp.int32), array(num_rows), array(num_rows, dtype=bool), (word, word))
    return array(num_rows, model.width, dtype=jnp.bfloat16), head, query


def verify_arguments(name: str, requests: int, drafts: int) -> tuple[Any, ...]:
    """hidden states, head, rows of each request, their first positions, drafts, temperatures, seeds."""
    hidden, head, _ = row_arguments(name, requests * (drafts + 1))
    whole, vocab = array(requests, dtype=jnp.int32), head.vocab_size
    proposal = Drafts(
        array(requests, drafts, dtype=jnp.int32), array(requests, drafts), Written(array(requests, drafts, vocab)),
        array(vocab, dtype=jnp.int32),
    )  # fmt: skip
    word = array(requests, dtype=jnp.uint32)
    return hidden, head, whole, whole, proposal, array(requests), (word, word)


def verify_by_xla(hidden, head, count_R, start_R, drafts, temperature_R, seed, *, sampler: str) -> Any:
    """The engine's verification, with all logits in memory."""
    from dspark_jax.decoding.draft import Proposal
    from dspark_jax.decoding.sampling import SlotSampling
    from dspark_jax.decoding.verify import verify

    rows = ragged_rows(count_R, start_R, len(hidden), drafts.token_RxK.shape[1] + 1)
    sampling = SlotSampling(Warp.temperatures(temperature_R), seed, temperature_R[:, None])
    proposal = Proposal(drafts.token_RxK, drafts.log_q_RxK, drafts.law, drafts.log_q_RxK)
    return verify(head.logits(hidden), rows, proposal, drafts.token_ids_Vd, sampling, sampler)


def verify_by_kernel(
    hidden, head, count_R, start_R, drafts, temperature_R, seed, *, sampler: str, backend: str, usual: bool = False
) -> Any:
    """`usual`: without the logits of rejected rows that the candidates do not settle."""
    rows = ragged_rows(count_R, start_R, len(hidden), drafts.token_RxK.shape[1] + 1)
    verify = from_candidates if usual else fused_verify
    out = verify(hidden, head, rows, drafts, Warp.temperatures(temperature_R), seed, sampler, backend)
    return out[0] if usual else out


def fused_verify_lines(chip: str) -> Iterator[Line]:
    """Verification of 16 requests with 7 drafts each."""
    requests, drafts = 16, 7
    compile_for, backend = (compile_tpu, "tpu") if chip in TPUS else (compile_gpu, "gpu")
    for name, sampler in (("Qwen3-8B", "rejection"), ("Qwen3-8B", "coupled"), ("Gemma4-12B", "coupled")):
        shapes = verify_arguments(name, requests, drafts)
        before = compile_for(chip, verify_by_xla, *shapes, sampler=sampler)
        options = {"sampler": sampler, "backend": backend}
        after = compile_for(chip, verify_by_kernel, *shapes, **options)
        usual = after if sampler == "coupled" else compile_for(chip, verify_by_kernel, *shapes, **options, usual=True)
        assert has_kernel(after)
        shape = f"{name} R={requests} K={drafts}"
        moved, by_kernel = moved_bytes(before, usual)
        if chip not in TPUS:
            by_kernel += verify_gpu.copied_bytes(requests * (drafts + 1), shapes[1])
        yield Line(f"fused_verify {sampler}", shape, chip, temporaries(before, after), (moved, by_kernel))


def temporaries(*programs: jax.stages.Compiled) -> tuple[int, ...]:
    return tuple(program.memory_analysis().temp_size_in_bytes for program in programs)


def moved_bytes(*programs: jax.stages.Compiled) -> tuple[float, ...]:
    """On a GPU without what kernels move, of which XLA knows nothing there."""
    return tuple(_cost_analysis(program)["bytes accessed"] for program in programs)


def _cost_analysis(program: jax.stages.Compiled) -> dict[str, float]:
    if (found := program.cost_analysis()) is not None:
        return found
    from jaxlib import _jax  # a GPU that is not here analyses nothing, but the program can be analysed elsewhere

    (module,) = program.runtime_executable().hlo_modules()
    return _jax.hlo_module_cost_analysis(jax.devices()[0].client, module)


# One function for each operation that has a kernel.
def attention_lines(chip: str) -> Iterator[Line]:
    for op, shape, temporary, moved in ragged_attention_lines(compile_tpu, chip):
        yield Line(op, shape, chip, temporary, moved)


def gpu_attention_lines(chip: str, context: int = 2048) -> Iterator[Line]:
    """Where every prefix has `context` rows."""
    for shape, (requests, block, _) in SHAPES.items():
        shapes, options = attention_arguments("Qwen3-8B", shape, context // 16)
        before, after = (compile_gpu(chip, attend, *shapes, **options, backend=way) for way in ("xla", "gpu"))
        moved, by_kernel = moved_bytes(before, after)
        by_kernel += attention_gpu.copied_bytes(shapes[0], block, shapes[4])
        size = f"Qwen3-8B R={requests} C={context}"
        yield Line(f"attention, {shape}", size, chip, temporaries(before, after), (moved, by_kernel))


def sampler_lines(chip: str) -> Iterator[Line]:
    for op, shape, temporary, moved in sampler_report.markov_sampler_lines(compile_tpu, chip):
        yield Line(op, shape, chip, temporary, moved)


def gpu_sampler_lines(chip: str) -> Iterator[Line]:
    """Temporary bytes are a block's, moved bytes one draft's alone: in a loop XLA's account takes a gather for a read
    of the whole table.
    """
    for name, vocab, requests in sampler_report.SIZES:
        shapes = sampler_report.arguments(requests, vocab, sampler_report.RANK)
        temporary = sampler_report.temporaries(sampler_report.block_programs(compile_gpu, chip, shapes, "gpu"))
        moved, by_kernel = moved_bytes(*(compile_gpu(chip, way, *shapes) for way in sampler_report.ways("gpu")))
        by_kernel += sampler_gpu.copied_bytes(shapes[0])
        shape = f"{name} R={requests} r={sampler_report.RANK}"
        yield Line("markov_sampler", shape, chip, temporary, (moved, by_kernel))


def anchor_lines(chip: str) -> Iterator[Line]:
    for op, shape, temporary, moved in anchor_attention_lines(compile_tpu, chip):
        yield Line(op, shape, chip, temporary, moved)


def gpu_anchor_lines(chip: str) -> Iterator[Line]:
    """As `anchor_attention_lines`."""
    programs = []
    for blocks, length in ((512, 4096), TILE):
        shapes, options = anchor_arguments("Qwen3-8B", 1, blocks, length)
        ways = ("tiled", "gpu")
        programs.append([compile_gpu(chip, anchor_gradients, *shapes, **options, backend=way) for way in ways])
    moved, by_kernel = moved_bytes(*programs[1])
    by_kernel += anchor_gpu.copied_bytes(*shapes[:2])
    yield Line("anchor_attention", "Qwen3-8B N=512 S=4096", chip, temporaries(*programs[0]), (moved, by_kernel))


def loss_lines(chip: str) -> Iterator[Line]:
    """One chunk of rows with its gradients, since XLA's account has a loop's body once, however often it runs."""
    compile_for, backend = (compile_tpu, "tpu") if chip in TPUS else (compile_gpu, "gpu")
    for name, model in MODELS.items():
        count = chunk_rows(2**20, model.vocab)
        shapes = loss_arguments(model.width, model.vocab, model.softcap, count)
        before, after = (compile_for(chip, gradients, *shapes, backend=way) for way in ("xla", backend))
        moved, by_kernel = moved_bytes(before, after)
        if chip not in TPUS:
            by_kernel += loss_gpu.moved_bytes(*shapes[:3])
        shape = f"{name} M={count} r={RANK}"
        yield Line("distribution_loss", shape, chip, temporaries(before, after), (moved, by_kernel))


def whole_lines(chip: str) -> Iterator[str]:
    """Temporary megabytes on a device of the engine's and the trainer's own programs, at temperature 1."""
    from configs import qwen3
    from dspark_jax.planning.chips import parse_machine
    from dspark_jax.planning.serving import plan_serving
    from dspark_jax.planning.training import plan_training

    machine, training = parse_machine(TPUS[chip]), qwen3.get_config("8b")
    training.train.micro_steps = 64
    for kernels in ("xla", "tpu"):
        plans = [plan_training(training, machine, kernels)]
        for mesh in ("", "1x1"):
            serving = qwen3.get_config("8b")
            serving.mesh, serving.sampling.temperature = mesh, 1.0
            plans.append(plan_serving(serving, machine, 1024, 4.8, kernels))
        for plan in plans:
            size = "does not fit" if plan.temporary is None else f"{plan.temporary / 1e6:.1f} MB"
            yield f"{plan.what} of Qwen3-8B on {chip}, {plan.mesh}, {plan.setting}, {kernels}: {size}"


OPERATIONS: tuple[Callable[[str], Iterator[Line]], ...] = (
    fused_verify_lines, sampler_lines, attention_lines, anchor_lines, loss_lines,
)  # fmt: skip
ON_GPU = (fused_verify_lines, gpu_sampler_lines, gpu_attention_lines, gpu_anchor_lines, loss_lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=[*sorted(TPUS), "H100"], default="v5e")
    parser.add_argument("--whole", action="store_true", help="whole programs instead, of TPUs")
    given = parser.parse_args()
    chip = given.chip
    if chip in TPUS and not libtpu_installed():
        parser.error("libtpu is not installed: pip install libtpu (a version that goes with jax's)")
    if chip not in TPUS and not gpu_compiler_installed():
        parser.error("the GPU compiler is not installed: docs/kernels.md says how")
    if given.whole:
        for line in whole_lines(chip):
            print(line, flush=True)
        return
    print(f"{'megabytes':<58} {'temporary':^21} {'moved':^21}")
    print(f"{'operation':<24} {'size':<28} {'chip':<4} {'XLA':>10} {'kernel':>10} {'XLA':>10} {'kernel':>10}")
    for lines in OPERATIONS if chip in TPUS else ON_GPU:
        for line in lines(chip):
            print(line, flush=True)


if __name__ == "__main__":
    main()
