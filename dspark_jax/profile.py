"""Measures what rounds cost on the devices at hand: python -m dspark_jax profile --config=configs/X.py

The table lets the engine verify as many drafts as pay. It is written to serve.cost_table, or to costs.json in the
config's workdir, where `serve.py` and `bench` find it.
"""

import rich.console
import rich.table

from dspark_jax.door import parse_config
from dspark_jax.errors import UserError
from dspark_jax.evaluation.report import describe_device, environment
from dspark_jax.scheduling.cost_model import CostTable, save_table
from dspark_jax.serving import cost_table_path, load_models, make_engine


def main(argv: list[str]) -> None:
    config, _ = parse_config(argv)
    target, drafter = load_models(config)
    if drafter is None:
        raise UserError("a cost table is measured with a drafter: set serve.drafter")
    path = cost_table_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    strategy = config.serve.strategy
    strategy = strategy if strategy.startswith("load_aware") else "load_aware"  # with blocks of the length served
    engine = make_engine(config, target, drafter, strategy=strategy, cost_table=None)
    save_table(path, engine.load.table)
    print_table(engine.load.table)
    print(f"written to {path}")


def print_table(table: CostTable) -> None:
    """Median milliseconds with their interquartile range, a line for every number of slots and context."""
    grid = rich.table.Table(title=f"cost of a round: {describe_device(environment())}")
    for name in ("slots", "context", "drafting adds", "rows of the target's step: ms"):
        grid.add_column(name)
    for (slots, context), draft in sorted(table.draft.items()):
        times = sorted((rows, time) for (rows, s, c), time in table.target.items() if (s, c) == (slots, context))
        steps = "  ".join(f"{rows}: {1e3 * time.seconds:.1f} ±{500 * time.spread:.1f}" for rows, time in times)
        grid.add_row(str(slots), str(context), f"{1e3 * draft.seconds:.1f} ±{500 * draft.spread:.1f}", steps)
    rich.console.Console().print(grid)
