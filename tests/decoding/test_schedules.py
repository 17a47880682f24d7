"""Rounds whose number of verified drafts is decided round by round: exact, and cheaper where verifying is dear."""

import dataclasses

import jax
import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.errors import UserError
from dspark_jax.scheduling.cost_model import CostTable, Stamp, Time
from dspark_jax.scheduling.scheduler import row_buckets

pytestmark = pytest.mark.usefixtures("x64")

VOCAB, BLOCK, SLOTS = 41, 3, 4
STAMP = Stamp("cpu", 1, "", "tiny", "", "", "float64", "")


def cost_table(base: float, per_row: float, draft: float) -> CostTable:
    """Times of every bucket of up to SLOTS slots, linear in rows."""
    sizes = [(slots, context) for slots in (1, 2, 4) for context in (64, 128)]
    target = {
        (rows, slots, context): Time(base + per_row * rows)
        for slots, context in sizes
        for rows in row_buckets(slots, BLOCK)
    }
    return CostTable(STAMP, target, {size: Time(draft) for size in sizes})


TABLES = {
    "rows are free": cost_table(1.0, 1e-6, 1e-6),
    "rows are dear": cost_table(1e-3, 1.0, 1e-3),
    "drafting is dear": cost_table(1e-3, 1.0, 3.0),
    "between": cost_table(1.0, 0.3, 0.1),
}
COSTLY = ("load_aware", "load_aware_async", "dcut")


@pytest.fixture(scope="module")
def models(tiny_target, tiny_drafter):
    with jax.enable_x64(True):
        target = tiny_target(vocab=VOCAB)
        return target, tiny_drafter(target, "bigram", BLOCK)


def requests():
    """Four requests that run together; the last goes on alone."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, 1 + 3 * i).tolist() for i in range(SLOTS)]
    warps = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 9}, {"temperature": 0.0})
    params = [SamplingParams(**warps[i], seed=31 * i, max_tokens=14 + 5 * i) for i in range(SLOTS)]
    return prompts, params


@pytest.fixture(scope="module")
def plain(models):
    with jax.enable_x64(True):
        return [c.token_ids for c in Engine(models[0], sampler="coupled", max_slots=SLOTS).generate(*requests())]


def run(models, strategy: str, sampler: str = "coupled", table: str = "between"):
    """All in one dispatch: one program for each strategy and sampler, whatever the costs are."""
    engine = Engine(
        *models, strategy=strategy, sampler=sampler, max_slots=SLOTS, rounds_per_dispatch=64, cost_table=TABLES[table]
    )
    return engine.generate(*requests())


def verified(outs) -> float:
    """Mean verified drafts of a round."""
    return float(np.mean([v for c in outs for v in c.verified]))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("strategy", ["threshold:0.5", *COSTLY])
def test_any_schedule_gives_the_tokens_of_plain_decoding(models, plain, strategy, table):
    outs = run(models, strategy, table=table)
    assert [c.token_ids for c in outs] == plain


@pytest.mark.parametrize(("strategy", "drafts"), [("load_aware:2", 2), ("load_aware_async:1", 1)])
def test_blocks_can_be_shorter_than_the_drafters(models, plain, strategy, drafts):
    outs = run(models, strategy, table="rows are free")
    assert [c.token_ids for c in outs] == plain
    assert max(d for c in outs for d in c.drafted) == max(v for c in outs for v in c.verified) == drafts


@pytest.mark.parametrize("strategy", COSTLY)
def test_greedy_requests_of_the_rejection_sampler(models, plain, strategy):
    outs = run(models, strategy, "rejection")
    for i in (0, 3):
        assert outs[i].token_ids == plain[i]


@pytest.mark.parametrize("strategy", COSTLY)
def test_fewer_drafts_are_verified_where_rows_are_dear(models, strategy):
    """R4: the target's step itself gets smaller, it is not cut afterwards."""
    cheap, dear = (run(models, strategy, table=table) for table in ("rows are free", "rows are dear"))
    assert verified(cheap) > 2.5 and verified(dear) < 1


def test_a_load_that_does_not_pay_is_parked(models, plain):
    engine = Engine(
        *models, strategy="load_aware", sampler="coupled", max_slots=1, rounds_per_dispatch=1,
        cost_table=TABLES["drafting is dear"],
    )  # fmt: skip
    prompts, params = requests()
    (out,) = engine.generate(prompts[:1], params[0])
    assert out.token_ids == plain[0]
    assert out.drafted[0] == BLOCK and out.drafted.count(0) > len(out.drafted) / 2


def test_a_threshold_cuts_where_the_first_confidence_is_below_it(models):
    all_, none = run(models, "threshold:0"), run(models, "threshold:1")
    assert verified(all_) == BLOCK and verified(none) == 0


def test_auto_is_load_aware_with_a_table_and_whole_blocks_without(models):
    with_table = Engine(*models, cost_table=TABLES["between"])
    assert with_table.policy.strategy.name == "load_aware"
    assert Engine(*models).policy.strategy == ("fixed", BLOCK)


def test_a_table_of_shorter_blocks_is_refused_at_once(models):
    table = TABLES["between"]
    short = {size: time for size, time in table.target.items() if size[0] <= size[1] * BLOCK}
    with pytest.raises(UserError, match=f"ends at .* rows of a round, {BLOCK + 1} are needed: measure anew"):
        Engine(*models, cost_table=dataclasses.replace(table, target=short))


def test_an_engine_without_a_table_measures_one_at_start(models, plain):
    engine = Engine(*models, strategy="load_aware", sampler="coupled", max_slots=2, rounds_per_dispatch=2)
    table = engine.load.table
    assert {s for s, _ in table.draft} == {1, 2} and table.stamp.source == "measured"
    assert [c.token_ids for c in engine.generate(*requests())] == plain
