"""Training on meshes of eight virtual devices; `test_mesh.py` runs this file in a process that has them."""

import math
import os
import signal

import jax
import pytest

from dspark_jax import prepare_features
from dspark_jax.interop.target_io import load_target
from dspark_jax.parallel import parse_mesh
from dspark_jax.planning import program
from dspark_jax.planning.chips import CHIPS, Machine
from dspark_jax.planning.collectives import traffic
from dspark_jax.planning.training import plan_training
from dspark_jax.training import loop
from dspark_jax.training.sharding import SMALL
from pallas_kernels import anchor_attention
from tests.training.mesh_runs import answered_config, rows_of


def train(config, mesh, monkeypatch, stop_after=None):
    """The metrics of every step, and the last state. `stop_after`: a step after which the run gets a SIGTERM."""
    config = config.copy_and_resolve_references()
    config.mesh, states, step = mesh, [], loop.train_step

    def spied(*args):
        state, metrics = step(*args)
        states[:] = [state]
        if int(state.step) == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return state, metrics

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", spied)
        if stop_after:
            with pytest.raises(KeyboardInterrupt, match=f"stopped after step {stop_after} of"):
                loop.train(config)
        else:
            loop.train(config)
    return rows_of(config), states[0]


def same(rows, others):
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        got = {**row, **row.get("validation", {})}
        for name, value in {**other, **other.get("validation", {})}.items():
            if name not in ("blocks_per_second", "validation", "step"):
                assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-6), (row["step"], name)


@pytest.fixture(scope="module")
def alone(chat_model, tmp_path_factory):
    """A run without a mesh: three sequences a step, so that most of eight devices have no data."""
    folder = tmp_path_factory.mktemp("alone")
    config = answered_config(chat_model, folder)
    with pytest.MonkeyPatch.context() as patch:
        return config, train(config, "", patch)[0]


def moved(config, folder):
    config = config.copy_and_resolve_references()
    config.workdir = str(folder / "run")
    return config


SLOW = pytest.mark.slow


def test_devices_send_weights_and_gradients_and_nothing_in_loops_over_the_context(alone, monkeypatch):
    config, texts = alone[0].copy_and_resolve_references(), []
    config.mesh, config.train.batch_size, config.target.dtype = "1x2", 4, "float32"
    monkeypatch.setattr(anchor_attention, "SMALL", 0)  # in tiles, as long sequences are
    monkeypatch.setattr(program, "traffic", lambda text, *_: texts.append(text) or {})
    plan = plan_training(config, Machine("", CHIPS["h100"], 2, tuple(jax.devices()[:2])))
    features, gradients, _ = (traffic(text, 2, (1, 1)) for text in texts)
    assert (features, gradients) == tuple(traffic(text, 2, (1000, 1000)) for text in texts[:2])
    sent = lambda found: sum(one.bytes for one in found.values())  # noqa: E731
    assert 0 < sent(features) < 1.5 * plan.parts["target weights"]
    # Weights are gathered twice; gradients come back, on this compiler as whole sums (twice the bytes).
    assert 0 < sent(gradients) < 4.5 * plan.parts["drafter weights, float32"]


@pytest.mark.parametrize("mesh", ["2x4", *(pytest.param(mesh, marks=SLOW) for mesh in ("1x1", "2x1", "8x1"))])
def test_a_mesh_has_the_losses_of_one_device_and_stores_its_part_of_the_state(alone, tmp_path, monkeypatch, mesh):
    rows, state = train(moved(alone[0], tmp_path), mesh, monkeypatch)
    same(rows, alone[1])
    devices = math.prod(map(int, mesh.split("x")))
    large = [a for a in jax.tree.leaves((state.params, state.opt_state)) if a.size >= SMALL]
    assert len(large) > 10 and all(a.addressable_shards[0].data.size * devices == a.size for a in large)


@SLOW
@pytest.mark.parametrize(
    "changes",
    [
        {"drafter.kind": "eagle3", "drafter.ttt_length": 2, "data.validation": 0.3},
        {"train.dpace": 0.5, "train.optimizer": "muon", "train.ema": 0.9, "data.validation": 0.3},
        {"train.micro_steps": 3, "train.loss_mean": "reference", "train.keep_features": True},
    ],
)
def test_other_runs_have_the_losses_of_one_device_too(alone, tmp_path, monkeypatch, changes):
    config = alone[0].copy_and_resolve_references()
    config.update_from_flattened_dict(changes)
    config.train.validate_every = 2
    (tmp_path / "mesh").mkdir()
    rows, _ = train(moved(config, tmp_path), "", monkeypatch)
    same(train(moved(config, tmp_path / "mesh"), "4x2", monkeypatch)[0], rows)


@SLOW
def test_a_cache_written_on_a_mesh_gives_the_losses_of_one_device_where_some_have_no_data(alone, tmp_path, monkeypatch):
    config = moved(alone[0], tmp_path)
    config.data.features, config.data.cache, config.data.cache_dtype = "cache", str(tmp_path / "cache"), "float32"
    target, answers = (
        load_target(config.target.path, mesh=parse_mesh("4x2")),
        prepare_features.read_answers(config.data.answers),
    )
    with prepare_features.open_writer(config, target) as writer:
        prepare_features.fill(config, target, answers, writer)
    same(train(config, "8x1", monkeypatch)[0], alone[1])


@SLOW
def test_a_run_that_was_stopped_goes_on_on_another_mesh(alone, tmp_path, monkeypatch):
    config = moved(alone[0], tmp_path)
    train(config, "8x1", monkeypatch, stop_after=2)
    same(train(config, "1x4", monkeypatch)[0], alone[1])
