"""The GPU kernels with no GPU: numbers in the interpreter, compilation for an H100, and what checks them on one."""

import os
import subprocess
import sys

import pytest

from pallas_kernels import gpu_check
from pallas_kernels.distribution_loss.chunks import chunk_rows
from pallas_kernels.markov_sampler import report as sampler_report
from pallas_kernels.ragged_attention.report import arguments as attention_arguments
from pallas_kernels.report import MODELS, Model
from tests.kernels.gpu_programs import LOSS_ROWS, ROWS
from tests.kernels.targets import ROOT, gpu_programs, needs_gpu_compiler


def in_the_interpreter(marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-m", marks, "tests/kernels/gpu_numerics.py"]
    environment = os.environ | {"NPROC": "16", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_numbers_are_the_references():
    in_the_interpreter("not slow")


@pytest.mark.slow
def test_all_numbers_are_the_references():
    in_the_interpreter("slow")


@needs_gpu_compiler
@pytest.mark.parametrize(("model", "rows"), ROWS)
def test_fused_verify_compiles_at_full_size(model, rows):
    """And keeps nothing of the size of the logits, even in bfloat16."""
    program = gpu_programs()[f"fused_verify {model} {rows}"]
    assert program["kernel"] and not program["spills"]
    assert program["bytes"] < max(rows, 64) * MODELS[model].vocab * 2 / 2


@needs_gpu_compiler
def test_attention_compiles_at_full_size():
    """And makes no copy of what the pages hold."""
    program = gpu_programs()["attention"]
    assert program["kernel"] and not program["spills"]
    assert program["bytes"] < 64 * 1024 * 8 * 128 * 2


@needs_gpu_compiler
@pytest.mark.parametrize(("model", "arrays"), [("Qwen3-8B", 3.3), ("Gemma4-12B", 4.6)])
def test_the_loss_compiles_at_full_size(model, arrays):
    """And keeps a chunk's logits, law and slopes; where there is a soft cap, also base logits and their slopes."""
    program, vocab = gpu_programs()[f"loss {model}"], MODELS[model].vocab
    assert program["kernel"] and not program["spills"]
    assert program["bytes"] < arrays * 4 * chunk_rows(LOSS_ROWS, vocab) * vocab


@needs_gpu_compiler
def test_training_attention_compiles_at_full_size():
    """With gradients; and keeps nothing beside sums of a block's own keys and the queries in another order."""
    program = gpu_programs()["anchors"]
    assert program["kernel"] and not program["spills"]
    assert program["bytes"] < 5 * 512 * 7 * 32 * 128 * 2


@needs_gpu_compiler
def test_the_compiler_knows_the_card():
    assert "shared memory" in gpu_programs()["too large"]["error"]


@needs_gpu_compiler
def test_a_blackwell_lacks_the_matrix_instructions():
    """Which is why `backends.choose` takes XLA there."""
    assert gpu_programs()["fused_verify, B200"]["error"]


@needs_gpu_compiler
@pytest.mark.parametrize(("model", "vocab", "requests"), sampler_report.SIZES)
def test_markov_sampler_compiles_at_full_size(model, vocab, requests):
    """And holds no logits of a draft."""
    program = gpu_programs()[f"markov_sampler {model} {requests}"]
    assert program["held"] == ["markov_sampler"] and not program["spills"]
    assert program["bytes"] < requests * vocab * 2 / 2


@needs_gpu_compiler
@pytest.mark.parametrize(("drafts", "held"), [(0, ["fused_verify"]), (2, ["fused_verify", "markov_sampler"])])
def test_the_round_of_a_hopper_holds_the_kernels(drafts, held):
    assert gpu_programs()[f"round of {drafts} drafts"]["held"] == held


def test_the_check_compares_and_times():
    """On a CPU with XLA in the kernel's place; the kernels themselves need the card."""
    line = gpu_check.check_fused_verify(Model(32, 256, 0.0, False), 2, "xla")
    assert line["right"] and line["largest_error"] == 0
    assert line["seconds"]["xla"] > 0 and line["seconds"]["floor"] is None
    shapes, options = attention_arguments("Qwen3-8B", "decoding", 1, layers=1)
    line = gpu_check.check_attention(shapes, options, "xla")
    assert line["right"] and line["seconds"]["kernel"] > 0
    line = gpu_check.check_loss(Model(32, 256, 8.0, False), 20, 8, "xla")
    assert line["right"] and line["seconds"]["kernel"] > 0
    line = gpu_check.check_anchors(4, 60, "xla")
    assert line["right"] and line["seconds"]["kernel"] > 0
    line = gpu_check.check_sampler(sampler_report.arguments(3, 640, 64), "xla")
    assert line["right"] and line["seconds"]["kernel"] > 0


def test_the_check_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit, match="nothing to check: there is no kernel for cpu devices"):
        gpu_check.main()
