"""What a config takes of a machine that is not here: python -m dspark_jax plan --config=FILE --topology=v5e:2x4

TPU's compiler says what a training step and a serving round need of every device and what they send one another; their
times are counted: products by the chip's peak rates, collectives by its links. Real machines are slower.
"""

from absl import flags

from dspark_jax.door import define_json, parse_config
from dspark_jax.errors import UserError
from dspark_jax.planning.chips import KNOWN, parse_machine
from dspark_jax.planning.report import print_plan
from dspark_jax.planning.serving import plan_serving
from dspark_jax.planning.training import cache_line, plan_training
from dspark_jax.progress import Progress
from dspark_jax.scheduling.json_files import write_json


def define(values: flags.FlagValues) -> None:
    define_json(values)
    flags.DEFINE_string("topology", None, f"the machine: {KNOWN}", flag_values=values)
    flags.DEFINE_integer("context", 1024, "tokens behind each request", lower_bound=1, flag_values=values)
    flags.DEFINE_float("tokens-per-round", 4.8, "that a request gains", lower_bound=1, flag_values=values)


def main(argv: list[str]) -> None:
    config, given = parse_config(argv, define)
    if not given.topology:
        raise UserError(f"which machine? give --topology: {KNOWN}")
    machine, gained = parse_machine(given.topology), given["tokens-per-round"].value
    print(f"{config.target.path} on {machine.name}: {machine.count} × {machine.chip.device}")
    plans = []
    with Progress("plans", 2) as progress:
        for make in (
            lambda: plan_serving(config, machine, given.context, gained),
            lambda: plan_training(config, machine),
        ):
            plans.append(make())
            print_plan(plans[-1])
            progress.advance(1)
    print(cache_line(config))
    if given.json:
        write_json(given.json, {"target": config.target.path, "topology": machine.name,
                                "plans": [plan.entries() for plan in plans]})  # fmt: skip
