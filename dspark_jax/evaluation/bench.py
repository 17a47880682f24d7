"""Speed, measured or computed.

    python -m dspark_jax bench --config=configs/smollm2_135m.py [--repeats=11] [--json=FILE]
    python -m dspark_jax bench --sweep --config=configs/smollm2_135m.py [--loads=1,4,16] [--json=FILE]
    python -m dspark_jax bench --simulate=docs/tables/qwen3_8b_v5e8.json [--trace=FILE] [--json=FILE]
    python -m dspark_jax bench --scheduler [--config=configs/smollm2_135m.py]
    python -m dspark_jax bench --train --config=configs/smollm2_135m.py [--json=FILE]

Alone: a decoding step of ours against one of `transformers` on the same weights, and against the memory's bandwidth;
how much of a speculative round lies outside the target's forward; tokens per second with drafting and without.
`--sweep`: every strategy at every load, with pictures; a sweep that was stopped goes on where it was. `--simulate`: the
same from a cost table, with no model. `--scheduler`: what planning a round costs. `--train`: a training step on random
tokens, against the operations that it cannot do without, and its memory.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from dspark_jax.door import define_json, parse_config
from dspark_jax.errors import UserError
from dspark_jax.scheduling.json_files import write_json

BUSY = 10.0  # percent of the CPUs in others' hands, from which on goals are not judged
# Section of the report, row and column; the goal in words; the most that the value may be.
GOALS = (
    ("step", "1", "ratio", "batch 1: step / transformers", 1.15),
    ("step", "16", "ratio", "batch 16: step / transformers", 1.0),
    ("round", "1", "outside_percent", "batch 1: % of round outside target", 25.0),
    ("round", "16", "outside_percent", "batch 16: % of round outside target", 25.0),
)


def main(argv: list[str]) -> None:
    """Measures what the flags ask for, prints it and, on request, writes JSON."""
    config, given = parse_config(argv, define, required=False)
    if sum((given.sweep, given.scheduler, given.train, given.simulate is not None)) > 1:
        raise UserError("--sweep, --simulate, --scheduler and --train are measured one at a time")
    if config is None and not (given.scheduler or given.simulate is not None):
        raise UserError("which config? give --config=configs/smollm2_135m.py")
    if given.train:
        return _train(config, given)
    if given.sweep:
        return _sweep(config, given)
    if given.simulate is not None:
        return _simulate(given)
    return _scheduler(config, given) if given.scheduler else _steps(config, given)


def define(values: flags.FlagValues) -> None:
    """The flags of `bench`."""
    flags.DEFINE_integer("repeats", 11, "times that each step is measured", lower_bound=7, flag_values=values)
    flags.DEFINE_bool("sweep", False, "measure every strategy at every load", flag_values=values)
    flags.DEFINE_string("simulate", None, "cost table: compute every strategy at every load", flag_values=values)
    flags.DEFINE_bool("scheduler", False, "measure what planning a round costs", flag_values=values)
    flags.DEFINE_bool("train", False, "measure a training step", flag_values=values)
    flags.DEFINE_list("loads", [], "concurrent requests; default 1,2,4,8,16,32,64", flag_values=values)
    flags.DEFINE_list("strategies", [], "of a sweep or a simulation; default: all kinds", flag_values=values)
    flags.DEFINE_integer("turns", 5, "of every strategy at a load", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("tokens", 64, "of an answer in a sweep", lower_bound=1, flag_values=values)
    flags.DEFINE_string("trace", None, "of a simulation: file that `calibrate` recorded", flag_values=values)
    flags.DEFINE_float("acceptance", 0.85, "of a synthetic trace, typical of every position", flag_values=values)
    define_json(values)


def _steps(config: ConfigDict, given: flags.FlagValues) -> None:
    # After the flags: a wrong flag need not wait for JAX.
    from dspark_jax.evaluation.measurements import measure

    report = measure(config, given.repeats)
    report["goals"] = goals(report)
    print_tables(report)
    if given.json:
        write_json(given.json, report)


def _train(config: ConfigDict, given: flags.FlagValues) -> None:
    from dspark_jax.training.bench import measure, print_report

    report = measure(config, given.repeats)
    print_report(report)
    warn_if_busy(report)
    if given.json:
        write_json(given.json, report)


def _sweep(config: ConfigDict, given: flags.FlagValues) -> None:
    loads = _loads(given.loads)
    from dspark_jax.evaluation.load_report import LOADS
    from dspark_jax.evaluation.load_sweep import Plan, points_of, sweep
    from dspark_jax.evaluation.report import describe_device

    path = Path(given.json or Path(config.workdir) / "sweep.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    plan = Plan(loads or LOADS, given.strategies, given.turns, given.tokens)
    report = sweep(config, plan, path)
    run = report["run"]
    _show(path, f"{run['target']} on {describe_device(run)}", points_of(report, plan.loads))
    warn_if_busy(report)


def _simulate(given: flags.FlagValues) -> None:
    loads = _loads(given.loads)
    from dspark_jax.evaluation.load_report import Point
    from dspark_jax.evaluation.simulation import simulation

    report = simulation(given.simulate, given.trace, loads, given.strategies, given.acceptance)
    path, stamp = Path(given.json or "simulation.json"), report["stamp"]
    write_json(path, report)
    title = f"simulated: {stamp['model']} on {stamp['devices']} x {stamp['device']}, {stamp['source']} costs"
    trace = f"trace {report['trace']}, {report['tokens_of_a_whole_block']:.2f} tokens per whole block"
    _show(path, f"{title}, context {report['context']}; {trace}", [Point(**row) for row in report["points"]])


def _show(path: Path, title: str, points: Sequence[Any]) -> None:
    """Table, verdicts and pictures of strategies over loads."""
    from dspark_jax.evaluation.load_report import print_points, verdicts
    from dspark_jax.evaluation.plots import load_pictures

    print_points(points, title)
    for line in verdicts(points):
        print(line)
    print("written to", ", ".join(map(str, (path, *load_pictures(path, title, points)))))


def _scheduler(config: ConfigDict | None, given: flags.FlagValues) -> None:
    from dspark_jax.evaluation.report import describe_device
    from dspark_jax.evaluation.scheduler_cost import scheduler_cost

    report = scheduler_cost(config, given.repeats)
    print(f"{describe_device(report)}; microseconds of a plan: median ± half the interquartile range")
    for row in report["scheduler"]:
        print(f"{row['requests']} requests, {row['drafts']} drafts: " + ", ".join(_plan_words(row)))
    if given.json:
        write_json(given.json, report)


def _plan_words(row: dict[str, Any]) -> Iterator[str]:
    """A phrase for every strategy of a row."""
    for name in (key.removesuffix("_ms") for key in row if key.endswith("_ms") and not key.endswith("_iqr_ms")):
        if name != "round":
            share = f" ({row[f'{name}_percent']:.2f} % of a round)" if f"{name}_percent" in row else ""
            yield f"{name} {1e3 * row[f'{name}_ms']:.1f} ±{500 * row[f'{name}_iqr_ms']:.1f}{share}"


def _loads(texts: list[str]) -> list[int]:
    """UserError unless they are counts of requests."""
    if not all(text.isdecimal() and int(text) > 0 for text in texts):
        raise UserError(f"--loads={','.join(texts)}: give numbers of requests, as --loads=1,4,16")
    return sorted({int(text) for text in texts})


def busy(report: dict[str, Any]) -> bool:
    """Whether other processes used so much of the machine that ratios say little."""
    return (report.get("others_cpu_percent") or 0.0) > BUSY


def goals(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's goals for speed. `met` is None where the value was not measured, or on a busy machine."""
    rows = []
    for section, batch, key, words, most in GOALS:
        value = report[section].get(batch, {}).get(key)
        met = None if value is None or busy(report) else value <= most
        rows.append({"goal": words, "at_most": most, "value": value, "met": met})
    return rows


def print_tables(report: dict[str, Any]) -> None:
    """Everything measured, and what was left out and why."""
    from dspark_jax.evaluation.report import describe_device

    print(f"{describe_device(report)}, {report['threads']} threads")
    print(f"{report['target']}, {report['dtype']}; drafter {report['drafter'] or 'none'}; {report['repeats']} repeats")
    print("times in ms: median ± half the interquartile range\n")
    floor, strategy, ratios = report["floor"], report["strategy"], report["floor"]["step_over_floor"]
    step = {batch: row | {"times_floor": ratios[batch]} for batch, row in report["step"].items()}
    _print_rows(f"one plain decoding step behind {report['context_tokens']} tokens", "batch", step)
    speed = f"{floor['weight_bytes'] / 1e6:.0f} MB of weights at {floor['read_gb_per_s']:.1f} GB/s"
    print(f"floor: {speed} take {floor['floor_ms']:.2f} ms")
    _print_rows(f"one round, strategy {strategy}", "batch", report["round"])
    title = f"answers of {report['answer_tokens']} tokens to four prompts: off and {strategy}"
    _print_rows(title, "at a time", report["end_to_end"])
    for what, why in report["skipped"].items():
        print(f"not measured: {what}: {why}")
    count = report["compilations_after_warm_up"]
    verdict = "no program was compiled after warm-up" if not count else f"{count} programs were compiled after warm-up"
    print(f"{verdict} (size of the jit caches before and after the timed parts)")
    _print_goals(report["goals"])
    warn_if_busy(report)


def warn_if_busy(report: dict[str, Any]) -> None:
    """Says so where other processes used so much of the machine that ratios say little."""
    if busy(report):
        share = f"other processes used {report['others_cpu_percent']:.0f} % of the CPUs"
        print(f"warning: {share}. PyTorch's waiting threads suffer more from that than XLA's: measure again in quiet")


def _print_rows(title: str, key: str, rows: dict[str, dict[str, Any]]) -> None:
    """One line per batch size; a time and its interquartile range share a column."""
    import rich.console
    import rich.table

    if not rows:
        return
    table = rich.table.Table(title=title, title_justify="left")
    names = [name for name in next(iter(rows.values())) if not name.endswith("_iqr_ms")]
    for name in (key, *names):
        table.add_column(name.replace("_percent", " %").replace("_", " "), justify="right")
    for batch, row in rows.items():
        table.add_row(batch, *(_cell(row[name], row.get(f"{name.removesuffix('_ms')}_iqr_ms")) for name in names))
    rich.console.Console().print(table)


def _cell(value: float | int | str, spread: float | None) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text if spread is None else f"{text} ±{spread / 2:.2f}"


def _print_goals(rows: list[dict[str, Any]]) -> None:
    import rich.console
    import rich.table

    table = rich.table.Table("goal", "at most", "measured", "", title="the project's goals", title_justify="left")
    for row in rows:
        unknown = "not measured" if row["value"] is None else "not judged"
        verdict = {None: unknown, True: "met", False: "not met"}[row["met"]]
        measured = "-" if row["value"] is None else f"{row['value']:.2f}"
        table.add_row(row["goal"], f"{row['at_most']:g}", measured, verdict)
    rich.console.Console().print(table)
