"""The engine on meshes of eight virtual devices; `tests/test_parallel.py` runs this file in a process that has them."""

import re

import numpy as np
import pytest

from dspark_jax.decoding.adjust import Adjust
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode, prefill
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.config import Attention, Rope
from dspark_jax.parallel import make_mesh, on
from dspark_jax.scheduling.cost_model import CostTable, Stamp, Time
from dspark_jax.scheduling.scheduler import row_buckets

pytestmark = pytest.mark.usefixtures("x64", "few_programs")

SLOTS, DRAFTS, HIDDEN = 4, 2, 48
EVEN = {"num_heads": 8, "attention": (Attention(4, 8, Rope(10000.0)),), "vocab": 64}
FEW = {"num_heads": 8, "attention": (Attention(2, 8, Rope(10000.0)),), "vocab": 64}
ODD = {"num_heads": 6, "attention": (Attention(3, 8, Rope(10000.0)),), "vocab": 331, "intermediate_size": 50}


def cost_table() -> CostTable:
    sizes = [(slots, context) for slots in (1, 2, 4) for context in (64, 128)]
    target = {(n, s, c): Time(1.0 + 0.3 * n) for s, c in sizes for n in row_buckets(s, DRAFTS)}
    return CostTable(Stamp("cpu", 1, "", "tiny", "", "", "float64", ""), target, {size: Time(0.1) for size in sizes})


@pytest.fixture
def models(tiny_target, tiny_drafter, tiny_eagle):
    def make(sizes: dict, kind: str):
        target = tiny_target(hidden=HIDDEN, **sizes)
        if kind == "eagle3":
            return target, tiny_eagle(target, drafts=DRAFTS)
        spoken = range(0, sizes["vocab"], 3) if kind == "reduced" else None
        return target, tiny_drafter(target, block=DRAFTS, spoken=spoken)

    return make


def answers(target, drafter, strategy: str, sampler: str):
    """Greedy and sampled requests, warped and penalised, in one dispatch."""
    prompts = [np.random.default_rng(i).integers(0, target.config.vocab_size, 1 + 5 * i).tolist() for i in range(SLOTS)]
    warps = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 9}, {"presence_penalty": 0.5})
    params = [SamplingParams(**warps[i], seed=31 * i, max_tokens=12 + 3 * i) for i in range(SLOTS)]
    engine = Engine(
        target, drafter, strategy=strategy, sampler=sampler, max_slots=SLOTS, rounds_per_dispatch=64, page_size=4,
        cost_table=cost_table(),
    )  # fmt: skip
    return [(c.token_ids, c.verified, c.accepted) for c in engine.generate(prompts, params)], engine


@pytest.mark.parametrize(
    ("sizes", "mesh", "kind", "strategy", "sampler"),
    [
        (EVEN, (2, 4), "whole", "fixed:2", "rejection"),
        (ODD, (1, 8), "whole", "off", "rejection"),
        pytest.param(ODD, (1, 8), "whole", "load_aware", "coupled", marks=pytest.mark.slow),
        pytest.param(ODD, (2, 4), "whole", "fixed:2", "rejection", marks=pytest.mark.slow),
        pytest.param(EVEN, (1, 8), "whole", "off", "coupled", marks=pytest.mark.slow),
        pytest.param(EVEN, (2, 4), "whole", "load_aware", "rejection", marks=pytest.mark.slow),
        pytest.param(FEW, (4, 2), "reduced", "fixed:2", "rejection", marks=pytest.mark.slow),
        pytest.param(FEW, (1, 8), "eagle3", "fixed:2", "coupled", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_gives_the_tokens_of_one_device(models, sizes, mesh, kind, strategy, sampler):
    target, drafter = models(sizes, kind)
    alone, _ = answers(target, drafter, strategy, sampler)
    mesh = make_mesh(*mesh)
    together, engine = answers(target.on_mesh(mesh), drafter.on_mesh(mesh), strategy, sampler)
    assert together == alone
    pool = engine.caches.target[0].k_LxPxKVxSxD
    shares = mesh.shape["model"] if target.config.heads[0][1] % mesh.shape["model"] == 0 else 1
    assert pool.addressable_shards[0].data.size * shares == pool.size
    head = engine.weights.target["lm_head"]["kernel"]
    assert head.addressable_shards[0].data.size * (1 if sizes is ODD else mesh.size) == head.size


VOCAB, TOP = 4096, 20


def collectives(hlo: str) -> list[tuple[int, str]]:
    """Bytes of every array that a compiled program's collectives give, and their lines."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter|ragged-all-to-all"
    found = []
    for line in hlo.splitlines():
        made = re.search(rf"= (.*?) (?:{kinds})(?:-start)?\(", line)
        for bits, sizes in re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", made[1] if made else ""):
            found.append((int(bits or 8) // 8 * int(np.prod([int(n) for n in sizes.split(",") if n])), line.strip()))
    return found


def check_collectives(hlo: str, hidden_rows: int, top_k: int) -> None:
    """At most so many bytes each, and there are some."""
    moved = collectives(hlo)
    wrong = [line for size, line in moved if size > (top_k if "top_k" in line else hidden_rows)]
    assert moved and not wrong, wrong[:1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "mesh", "kind", "strategy", "sampler"),
    [
        (EVEN, (2, 4), "whole", "fixed:2", "rejection"),
        (FEW, (4, 2), "reduced", "fixed:2", "rejection"),
        (EVEN, (2, 4), "eagle3", "fixed:2", "coupled"),
        (EVEN, (1, 8), "whole", "dcut", "rejection"),
    ],
)
def test_collectives_move_hidden_rows_and_statistics_of_rows(models, sizes, mesh, kind, strategy, sampler):
    mesh = make_mesh(*mesh)
    target, drafter = (part.on_mesh(mesh) for part in models({**sizes, "vocab": VOCAB}, kind))
    engine = Engine(target, drafter, strategy=strategy, sampler=sampler, max_slots=SLOTS, cache_tokens=256,
                    cost_table=cost_table())  # fmt: skip
    slots = engine.slots.replace(adjust=Adjust.neutral(SLOTS, VOCAB))
    cost = engine.load.cost((SLOTS, 64)) if engine.load else None
    with on(mesh):
        program = decode.lower(
            engine.models, engine.policy, engine.weights, engine.caches, slots, cost, active=SLOTS, drafts=DRAFTS,
            context_pages=4, rounds=1, top_logprobs=TOP,
        ).compile()  # fmt: skip
    rows = SLOTS * (DRAFTS + 1)
    # The likeliest tokens of the log-probabilities: every device sends its own TOP.
    statistics = rows * TOP * mesh.size * 8
    check_collectives(program.as_text(), rows * HIDDEN * 8, statistics)
    assert max(rows * HIDDEN * 8, statistics) < SLOTS * VOCAB * 4  # one number for each slot and word would show


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "mesh"), [(EVEN, (2, 4)), (ODD, (1, 8))])
def test_prefill_moves_hidden_rows(models, sizes, mesh):
    mesh, size = make_mesh(*mesh), 8
    target, drafter = (part.on_mesh(mesh) for part in models(sizes, "whole"))
    engine = Engine(target, drafter, max_slots=SLOTS, cache_tokens=256)
    zeros = np.zeros(SLOTS, np.int32)
    tokens = np.zeros((SLOTS, size), np.int32)
    with on(mesh):
        program = prefill.lower(
            engine.models, engine.weights, engine.caches, np.zeros((SLOTS, 4), np.int32), tokens, tokens, zeros,
            zeros + size, (), context_pages=4,
        ).compile()  # fmt: skip
    check_collectives(program.as_text(), SLOTS * size * HIDDEN * 8, 0)
