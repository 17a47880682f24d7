"""Kinds of drafters on equal terms: python -m dspark_jax compare --config=configs/X.py --data=DIR

Trains every one of `--variants` for the config's target on the same answers with the same steps, and evaluates it as
`evaluate` does. Prints a table, and leaves it with all answers and metrics in `--out`; the same command goes on where
it was stopped.
"""

import json
from pathlib import Path
from typing import Any

import rich.console
import rich.table
from absl import flags
from ml_collections import ConfigDict

from dspark_jax.door import parse_config
from dspark_jax.evaluate import temperatures_of, write_report
from dspark_jax.scheduling.json_files import write_json
from dspark_jax.training.variants import CHANGES, changed

HELD_OUT = 0.05  # of the conversations, where the config holds none out
BASELINES = ("dflash", "eagle3")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list("variants", ["all"], f"all, or some of {', '.join(CHANGES)}", flag_values=values)
    flags.DEFINE_list("sets", ["all"], "evaluation sets by name, as of `evaluate`", flag_values=values)
    flags.DEFINE_string("data", None, "folder with a NAME.jsonl per set; without it, the hub's", flag_values=values)
    flags.DEFINE_list("temperatures", ["0", "1"], "sampling temperatures", flag_values=values)
    flags.DEFINE_integer("limit", None, "prompts of a set at most", lower_bound=1, flag_values=values)
    flags.DEFINE_string("out", None, "folder of the results; default: WORKDIR/comparison", flag_values=values)


def main(argv: list[str]) -> None:
    """Trains and evaluates what `--out` lacks, and prints all it then holds."""
    config, given = parse_config(argv, define)
    out, temperatures = Path(given.out or Path(config.workdir) / "comparison"), temperatures_of(given.temperatures)
    names = list(CHANGES) if given.variants == ["all"] else given.variants
    configs = {name: _prepared(changed(config, name), out / name) for name in names}  # a wrong name stops here
    from dspark_jax.evaluation.answers import answer_sets  # after the flags: a wrong flag need not wait for JAX
    from dspark_jax.evaluation.benchmarks import load_sets
    from dspark_jax.interop.target_io import load_target
    from dspark_jax.parallel import parse_mesh
    from dspark_jax.training.data import make_answers
    from dspark_jax.training.loop import train

    sets, missing = load_sets(given.sets, given.data, out / "prompts")
    console = rich.console.Console()
    for line in missing:
        console.print(f"left out: {line}", highlight=False, markup=False, soft_wrap=True)
    if not config.data.answers:  # all learn from the same ones
        mesh = parse_mesh(config.mesh)
        target = load_target(config.target.path, dtype=config.target.dtype or None, mesh=mesh)
        make_answers(config, target, out / "answers.jsonl")
    rows = []
    for name, variant in configs.items():
        console.rule(name)
        with variant.unlocked():
            variant.data.answers = config.data.answers or str(out / "answers.jsonl")
        variant.serve.drafter = str(train(variant))
        answer_sets(variant, sets, temperatures, given.limit, 0, out / name / "evaluation")
        rows.append(_row(name, Path(variant.workdir), write_report(out / name / "evaluation")))
        write_json(out / "comparison.json", {"steps": config.train.steps, "variants": rows})
    print_rows(rows, console)


def _prepared(config: ConfigDict, workdir: Path) -> ConfigDict:
    config.workdir, config.serve.strategy = str(workdir), "auto"
    config.data.validation = config.data.validation or HELD_OUT
    return config


def _row(name: str, workdir: Path, report: dict[str, Any]) -> dict[str, Any]:
    """What a variant came to. `expected`: tokens per round on answers that were held out, by the training's losses."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    validated = [line["validation"]["tau_probabilistic"] for line in lines if "validation" in line]
    macro = {t: part["macro"]["tokens_per_round"] for t, part in report["temperatures"].items()}
    return {"variant": name, "expected": max(validated), "tokens_per_round": macro, "run": report["run"]}


def print_rows(rows: list[dict[str, Any]], console: rich.console.Console) -> None:
    """A line per variant, its tokens per round beside those of the baselines that were run."""
    temperatures = list(rows[0]["tokens_per_round"])
    known = {row["variant"]: row["tokens_per_round"] for row in rows}
    table = rich.table.Table(title="tokens per round, bonus included", title_justify="left")
    table.add_column("variant")
    for heading in ("held-out answers", *(f"sets, temperature {t}" for t in temperatures)):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [_beside(row, known, t) for t in temperatures]
        table.add_row(row["variant"], f"{row['expected']:.3f}", *cells)
    console.print(table)


def _beside(row: dict[str, Any], known: dict[str, dict[str, float]], temperature: str) -> str:
    """The number, and how many per cent it is above each baseline."""
    own = row["tokens_per_round"][temperature]
    others = [name for name in BASELINES if name in known and name != row["variant"]]
    gains = [f"{100 * (own / known[name][temperature] - 1):+.0f} % {name}" for name in others]
    return f"{own:.3f}" + (f" ({', '.join(gains)})" if gains else "")
