"""`plan` on tiny models: what it says of memory is what real arrays take, and TPU's compiler is asked."""

import json

import jax
import jax.numpy as jnp
import pytest

from configs import qwen3
from dspark_jax import plan as door
from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import Drafter, borrow, init_drafter
from dspark_jax.interop.target_io import load_target
from dspark_jax.planning import chips
from dspark_jax.planning.chips import parse_machine
from dspark_jax.planning.models import abstract_models, placed
from dspark_jax.planning.program import examine
from dspark_jax.planning.report import Plan
from dspark_jax.planning.serving import plan_serving
from dspark_jax.planning.training import plan_training
from dspark_jax.serving import make_engine
from tests.kernels.targets import needs_libtpu

CONFIG = """
from configs.base import get_base

def get_config():
    c = get_base()
    c.target.path, c.target.dtype = {target!r}, {dtype!r}
    c.drafter.num_layers, c.drafter.block_size, c.drafter.tap_layers = 1, 3, (0, 2)
    c.drafter.mask_token, c.drafter.markov_rank = "<|mask|>", 4
    c.data.max_length = 64
    c.train.batch_size, c.train.num_anchors, c.train.blocks_at_once, c.train.micro_steps = 8, 4, 4, 2
    c.serve.drafter, c.serve.max_slots, c.serve.strategy = "trained", 4, "auto"
    return c
"""


@pytest.fixture
def config_file(tmp_path, chat_model):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG.format(target=str(chat_model), dtype="float32"))
    return path


@pytest.fixture
def config(config_file):
    return parse_config(["plan", f"--config={config_file}"])[0]


def total(tree) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(tree))


def test_planned_bytes_are_those_of_a_real_engine(config, chat_model):
    plan = plan_serving(config, parse_machine("h100:1"), 64, 2.5)
    target = load_target(chat_model, dtype="float32")
    _, drafter = abstract_models(config)
    params = init_drafter(drafter.config, jax.random.key(0))
    engine = make_engine(config, target, Drafter(drafter.config, params, borrow(target)))
    real = {"target weights": target.params, "drafter weights": params, "page pool of the drafter": engine.caches.draft}
    assert {name: plan.parts[name] for name in real} == {name: total(tree) for name, tree in real.items()}
    assert plan.parts["drafter's copy of the head"] == 0  # it is the target's embedding, tied
    (pool,) = (size for name, size in plan.parts.items() if name.startswith("page pool of the target"))
    assert pool == total(engine.caches.target)
    assert plan.temporary is None and not plan.compiled and plan.fits
    assert plan.rate == ("tokens/s at 2.5 tokens per round", 10.0)


def test_a_mesh_shares_out_what_divides(config):
    one, two = (plan_training(config, parse_machine(f"h100:{n}")) for n in (1, 2))
    assert two.mesh == "data=1,model=2"
    for name in ("target weights", "optimizer", "drafter weights, float32"):
        assert one.parts[name] / 2 <= two.parts[name] < one.parts[name]
    # AdamW keeps two numbers for every weight, and a count.
    assert (
        2 * one.parts["drafter weights, float32"] < one.parts["optimizer"] < 2.1 * one.parts["drafter weights, float32"]
    )
    # Packs of half the length have half the context before their blocks; how many are computed at a time is the same.
    assert one.operations / 2 < two.operations < one.operations
    config.train.blocks_at_once = 8
    assert plan_training(config, parse_machine("h100:1")).operations == one.operations


def test_more_of_everything_takes_longer(config):
    machine = parse_machine("h100:1")
    few = plan_serving(config, machine, 64, 2)
    config.serve.max_slots = 16
    many = plan_serving(config, machine, 64, 2)
    assert few.seconds < many.seconds < 4 * few.seconds
    config.serve.drafter = ""
    plain = plan_serving(config, machine, 64, 2)
    assert plain.seconds < many.seconds and plain.rate == ("tokens/s at 1 tokens per round", 16.0)


def test_what_does_not_fit_says_what_to_lower(config, monkeypatch):
    for memory, advice in ((1e3, "more devices"), (3e5, "lower serve.max_slots")):
        monkeypatch.setitem(chips.CHIPS, "h100", chips.CHIPS["h100"]._replace(memory=memory))
        config.serve.max_slots = 256
        plan = plan_serving(config, parse_machine("h100:1"), 64, 2)
        assert not plan.fits and plan.verdict.startswith("does not fit") and advice in plan.verdict


@pytest.mark.parametrize(
    "text", ["", "v5e", "v5e:8", "v5e:2x4x1", "v9:2x4", "v5e:0x4", "v5e:2xa", "h100:2x2", "h100:0"]
)
def test_an_unknown_machine_is_named_with_the_known_ones(text):
    with pytest.raises(UserError, match="known are v5e:2x4"):
        parse_machine(text)


def test_sizes_that_do_not_go_together_are_one_line(config):
    config.train.micro_steps = 3
    with pytest.raises(UserError, match="train.batch_size=8 does not divide"):
        plan_training(config, parse_machine("h100:1"))
    with pytest.raises(UserError, match="--context=1025: the engine of this config holds 4096 tokens"):
        plan_serving(config, parse_machine("h100:1"), 1025, 2)
    config.mesh = "4x4"
    with pytest.raises(UserError, match="a mesh of 4x4 needs 16 devices, h100:8 has 8"):
        plan_serving(config, parse_machine("h100:8"), 64, 2)


def test_the_door_wants_a_topology(config_file):
    with pytest.raises(UserError, match="which machine"):
        door.main(["plan", f"--config={config_file}"])


def test_a_gpu_gets_shapes_and_counted_times(config_file, capsys):
    door.main(["plan", f"--config={config_file}", "--topology=h100:2", "--context=64", "--tokens-per-round=2"])
    printed = capsys.readouterr().out
    assert "2 × NVIDIA H100" in printed and "temporaries not counted" in printed and "collectives not known" in printed
    assert "tokens/s at 2 tokens per round" in printed and "blocks/s" in printed and "(compiled)" not in printed


@needs_libtpu
def test_the_real_round_is_compiled_for_a_tpu(config):
    config.target.dtype = "bfloat16"
    plan = plan_serving(config, parse_machine("v5e:2x4"), 64, 2)
    assert plan.compiled and plan.fits and plan.temporary > 0 and plan.mesh == "data=4,model=2"
    # Of every layer's rows, twice, and the drafter's: the bodies of loops count as often as they run.
    assert plan.traffic["all-reduce"].count > 2 * 3 + 2 * 1 and plan.link_seconds > 0


@needs_libtpu
def test_a_mesh_of_tpus_takes_the_kernels(config, chat_model, tmp_path):
    """In its round and its training step, where heads are as wide as a TPU's lanes."""
    sizes = json.loads((chat_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"head_dim": 128}))
    config.target.path, config.target.dtype, machine = str(tmp_path), "bfloat16", parse_machine("v5e:2x4")
    assert plan_serving(config, machine, 64, 2, "tpu").kernels == ("fused_verify", "markov_sampler", "ragged_attention")
    assert plan_training(config, machine, "tpu").kernels == ("anchor_attention", "distribution_loss")


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["xla", "tpu"])
def test_a_real_round_copies_no_weights(kernels):
    """As XLA may, in every call and of all layers, where it would rather have a projection the other way round."""
    plan = plan_serving(qwen3.get_config("8b"), parse_machine("v5e:2x4"), 1024, 2, kernels)
    assert plan.temporary < plan.parts["target weights"] / 30


@needs_libtpu
@pytest.mark.slow
def test_the_real_programs_are_compiled_for_a_tpu(config_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    config_file.write_text(config_file.read_text().replace("float32", "bfloat16"))
    door.main(["plan", f"--config={config_file}", "--topology=v5e:2x4", "--context=64", f"--json={out}"])
    report = json.loads(out.read_text())
    assert report["topology"] == "v5e:2x4" and [p["what"] for p in report["plans"]] == [
        "serving round",
        "training step",
    ]
    for plan in report["plans"]:
        # Temporaries of so small a model may all be in the chip's own memory.
        assert plan["fits"] and plan["compiled"] and plan["temporary"] >= 0 and plan["mesh"] == "data=4,model=2"
        assert plan["traffic"] and plan["link_seconds"] > 0 and plan["rate"]["per_second"] > 0
    printed = capsys.readouterr().out
    assert "fits: " in printed and "blocks/s" in printed and "a cache of features instead" in printed


@needs_libtpu
def test_a_program_that_the_compiler_refuses_does_not_fit():
    machine = parse_machine("v5e:2x2")
    mesh = machine.mesh("1x1", 1)
    sorted_product = jax.jit(lambda x: jnp.sum(jnp.sort(jnp.outer(x, x) @ jnp.outer(x, x), axis=0)[::7]))
    program = examine(machine, mesh, sorted_product, placed(jax.ShapeDtypeStruct((100_000,), jnp.float32), mesh))
    plan = Plan.of("step", "", machine, mesh, {}, [(1, program)]).with_advice("lower it")
    assert program.temporary is None and not plan.fits
    assert "compiler: Ran out of memory" in plan.verdict and plan.verdict.endswith("; lower it")


@needs_libtpu
def test_libtpu_refuses_shapes_that_are_not_made():
    with pytest.raises(UserError, match="unknown topology 'v5e:3x7'"):
        parse_machine("v5e:3x7")
