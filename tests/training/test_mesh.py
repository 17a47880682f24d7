"""Training on several devices and by several processes: the same losses, and nobody waits for anybody for ever."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax.data.batches import Batch
from dspark_jax.data.packing import micro_batches
from dspark_jax.training.parts import filled_up
from dspark_jax.training.sharding import EVERY, own_places, stored_in_parts, stored_specs
from tests.test_processes import free_address
from tests.training.mesh_runs import answered_config, rows_of
from tests.training.test_packing import samples_of

ROOT = Path(__file__).parents[2]
CONFIG = """
import json
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(json.loads({text!r}))
"""


@pytest.mark.parametrize(
    ("shape", "devices", "spec"),
    [
        ((64, 32), 8, P(EVERY)),
        ((5, 64, 96), 8, P(None, None, EVERY)),
        ((5, 96, 96), 8, P(None, EVERY)),
        ((63, 32), 4, P(None, EVERY)),
        ((63, 65), 8, P()),
        ((8, 16), 8, P()),  # small
        ((), 8, P()),
    ],
)
def test_the_longest_dimension_that_all_devices_divide_is_divided(shape, devices, spec):
    assert stored_in_parts(shape, devices) == spec


def test_a_stack_of_layers_is_never_divided_by_layers():
    tree = {"layers": ({"kernel": np.ones((5, 33, 47)), "norm": np.ones((5, 303))},), "fc": np.ones((40, 33))}
    assert stored_specs(tree, 5) == {"layers": ({"kernel": P(), "norm": P()},), "fc": P(EVERY)}


def test_a_micro_batch_has_the_same_samples_and_anchors_on_any_number_of_devices():
    samples = samples_of([40, 9, 64, 17, 3, 30, 48, 16])

    def found(devices):
        parts = micro_batches(samples, 3, 4, 5, seed=1, devices=devices)
        assert {len(part.pack.token_DxT) for part in parts} == {devices} and len(
            {p.pack.anchor_DxCxN.shape for p in parts}
        ) == 1
        return [
            {
                d.row: [
                    int(a) - d.start
                    for a in part.pack.anchor_DxCxN[d.pack][part.pack.keep_DxCxN[d.pack]]
                    if d.start <= a < d.start + d.length
                ]
                for d in part.documents
            }
            for part in parts
        ]

    assert found(1) == found(2) == found(8)
    assert sum(map(len, found(8))) == len(samples)


def test_the_last_device_gets_empty_sequences():
    batch = Batch(np.ones((3, 64), np.int32), np.ones((3, 64)), np.full(3, 9), np.arange(3) + 5)
    more = filled_up(batch, 8)
    assert len(more.token_BxS) == 8 and not more.loss_mask_BxS[3:].any()
    assert more.documents == batch.documents and filled_up(batch, 3) is batch
    assert own_places(3, None) == [0, 1, 2]


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_virtual_devices(which):
    """Runs the tests of eight_devices.py."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", which, "tests/training/eight_devices.py"]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# ----------------------------------------------------------------------------------------------------------- processes


def start(config, folder, **changes) -> subprocess.Popen:
    """`train.py`, with four virtual devices."""
    (folder / "config.py").write_text(CONFIG.format(text=config.to_json_best_effort()))
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    command = [sys.executable, "train.py", f"--config={folder / 'config.py'}", *flags]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_two(config, folder) -> list[subprocess.Popen]:
    address = free_address()
    return [start(config, folder, **{"train.processes": f"{address},2,{index}"}) for index in range(2)]


def end(processes: list[subprocess.Popen], code: int = 0) -> list[str]:
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(
        o[-3000:] for o in outputs
    )
    return outputs


def wait_for_steps(config, count: int, process: subprocess.Popen) -> None:
    while process.poll() is None:
        if (Path(config.workdir) / "metrics.jsonl").is_file() and len(rows_of(config)) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate()[0][-3000:])


@pytest.mark.slow
def test_two_processes_train_are_stopped_and_go_on_as_two_or_as_one_on_another_mesh(chat_model, tmp_path):
    config = answered_config(chat_model, tmp_path, steps=40)
    config.train.checkpoint_every, config.train.ema = 1000, 0.9
    end([start(config, tmp_path)])
    alone = [row["loss"] for row in rows_of(config)]
    assert len(alone) == 40

    config.workdir = str(tmp_path / "two")
    two = start_two(config, tmp_path)
    wait_for_steps(config, 3, two[0])
    two[1].send_signal(signal.SIGTERM)  # one of them is told
    outputs = end(two, 130)
    said = {line for output in outputs for line in output.splitlines() if line.startswith("stopped after")}
    assert len(said) == 1 and all("the same command continues" in output for output in outputs)
    first = len(rows_of(config))
    assert 3 <= first < 40

    again = start_two(config, tmp_path)
    wait_for_steps(config, first + 3, again[0])
    again[0].send_signal(signal.SIGINT)
    end(again, 130)
    second = len(rows_of(config))
    assert first + 3 <= second < 40

    end([start(config, tmp_path, mesh="2x2")])
    assert [row["step"] for row in rows_of(config)] == list(range(1, 41))
    assert [row["loss"] for row in rows_of(config)] == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_processes_without_answers_are_refused_in_one_line(chat_model, tmp_path):
    config = answered_config(chat_model, tmp_path)
    config.data.answers = ""
    for output in end(start_two(config, tmp_path), 2):
        assert "error: several processes train on answers that are there" in output
