"""Evaluates a drafter on the paper's sets: python -m dspark_jax evaluate --config=configs/X.py --sets=all [--data=DIR]

Every set is answered at every temperature with whole blocks drafted and verified, so that the fate of each draft is
seen. The sets are files NAME.jsonl of `--data`, or downloaded from the hub. Answers, report.json, pictures and one
page, report.html, are left in `--out`; the same command goes on where it was stopped. `--report-only` makes the report
of what has been answered so far, without any model.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.console
from absl import flags

from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.scheduling.json_files import write_json


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list("sets", ["all"], "sets by name; all: those of the nine that can be had", flag_values=values)
    flags.DEFINE_string("data", None, "folder with a NAME.jsonl per set; without it, the hub's", flag_values=values)
    flags.DEFINE_list("temperatures", ["0", "1"], "sampling temperatures", flag_values=values)
    flags.DEFINE_integer("limit", None, "prompts of a set at most", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "plain", 16, "prompts of a set that are answered plainly too, for speed; 0: none", lower_bound=0,
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_string("sweep", None, "JSON of `bench --sweep`, whose pictures join the page", flag_values=values)
    flags.DEFINE_string("out", None, "folder of the results; default: WORKDIR/evaluation", flag_values=values)
    flags.DEFINE_bool("report-only", False, "make the report of answers that are there", flag_values=values)


def main(argv: list[str]) -> None:
    """Answers what is missing and writes the report."""
    config, given = parse_config(argv, define, required=False)
    if config is None and not (given["report-only"].value and given.out):
        raise UserError("which config? give --config=configs/smollm2_135m.py")
    out = Path(given.out or Path(config.workdir) / "evaluation")
    temperatures = temperatures_of(given.temperatures)
    if given.sweep:
        from dspark_jax.evaluation.pictures import read_sweep

        read_sweep(Path(given.sweep))  # not after hours of answers
    console = rich.console.Console()
    if not given["report-only"].value:
        # After the flags: a wrong flag need not wait for JAX.
        from dspark_jax.evaluation.answers import answer_sets
        from dspark_jax.evaluation.benchmarks import load_sets

        sets, missing = load_sets(given.sets, given.data, out / "prompts")
        for line in missing:
            console.print(f"left out: {line}", highlight=False, markup=False, soft_wrap=True)
        try:
            answer_sets(config, sets, temperatures, given.limit, given.plain, out)
        except KeyboardInterrupt:
            advice = f"--report-only --out={out} reports what there is"
            raise KeyboardInterrupt(f"stopped; the same command goes on, and {advice}") from None
    if given.sweep and Path(given.sweep).resolve() != (out / "sweep.json").resolve():
        shutil.copyfile(given.sweep, out / "sweep.json")  # so that later reports have its pictures
    _show(write_report(out), out, console)


def write_report(out: Path) -> dict[str, Any]:
    """Makes report.json, the pictures and report.html of the answers in `out`. Returns the report."""
    from dspark_jax.evaluation.page import page
    from dspark_jax.evaluation.pictures import draw, draw_loads
    from dspark_jax.evaluation.summary import read_run, summary

    run, scored = read_run(out)
    report = summary(run, scored)
    pictures = draw(report, scored, out / "pictures")
    sweep = out / "sweep.json"
    loads = draw_loads(sweep, out / "pictures") if sweep.exists() else []
    write_json(out / "report.json", report)
    html = page(report, pictures, loads)
    fresh = out / "report.html.tmp"
    fresh.write_text(html, encoding="utf-8")
    fresh.replace(out / "report.html")
    return report


def _show(report: Mapping[str, Any], out: Path, console: rich.console.Console) -> None:
    from dspark_jax.evaluation.report import describe_device
    from dspark_jax.evaluation.tables import notes, print_tables, tables

    run = report["run"]
    console.print(f"{run['target']}, drafter {run['drafter']}, on {describe_device(run)}", highlight=False)
    for temperature in report["temperatures"]:
        console.rule(f"temperature {temperature}")
        for line in notes(report, temperature):
            console.print(line, highlight=False, markup=False)
        print_tables(tables(report, temperature), console)
    console.print(f"written to {out}: report.html, report.json, pictures, answers", highlight=False, markup=False)


def temperatures_of(texts: list[str]) -> list[float]:
    """UserError unless they are temperatures."""
    try:
        values = [float(text) for text in texts]
        if values and all(0 <= value < float("inf") for value in values):
            return list(dict.fromkeys(values))
    except ValueError:
        pass
    raise UserError(f"--temperatures={','.join(texts)}: give sampling temperatures, as --temperatures=0,1")
