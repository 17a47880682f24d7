"""Penalties, bias and a minimum of tokens: at every position of a block, by everything drafted before it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding.adjust import Adjust, adjusted
from dspark_jax.decoding.draft import Proposal
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams, SlotSampling
from dspark_jax.decoding.verify import verify
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import load_target
from pallas_kernels.draft_law import Written
from pallas_kernels.ragged_attention import ragged_rows

# ------------------------------------------------------------------------------------------------- against a formula

VOCAB, STOPS = 23, (7, 11)
REQUESTS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"logit_bias": {3: 2.5, 8: -100.0}},
    {"min_tokens": 7},
    {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {2: 3.0, 7: 9.0},
     "min_tokens": 5},
]  # fmt: skip


@dataclasses.dataclass
class Past:
    params: SamplingParams
    prompt: list[int]
    emitted: list[int]

    def expected(self, logits: np.ndarray, drafted: list[int]) -> np.ndarray:
        """What the parameters say of the next token's logits, in plain numpy and `transformers`."""
        torch, processors = pytest.importorskip("torch"), pytest.importorskip("transformers")
        p, output = self.params, [*self.emitted, *drafted]
        ids, scores = torch.tensor([self.prompt + output]), torch.tensor(logits[None])
        scores = processors.RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(ids, scores).numpy()[0]
        times = np.bincount(output, minlength=VOCAB)
        scores = scores - p.presence_penalty * (times > 0) - p.frequency_penalty * times
        for token, bias in p.logit_bias:
            scores[token] += bias
        minimum = processors.MinNewTokensLengthLogitsProcessor(len(self.prompt), p.min_tokens, list(STOPS))
        return minimum(ids, torch.tensor(scores[None])).numpy()[0]


@pytest.fixture(scope="module")
def pasts() -> list[Past]:
    rng = np.random.default_rng(0)
    return [
        Past(SamplingParams(**kw), rng.integers(0, VOCAB, 4).tolist(), rng.integers(0, VOCAB, 3).tolist())
        for kw in REQUESTS
    ]


def slots_of(pasts: list[Past]) -> Adjust:
    """The slots after the emitted tokens, which came in rounds of two, the last one cut to one."""
    slots = jax.tree.map(lambda *a: jnp.stack(a), *[Adjust.of(p.params, p.prompt, VOCAB) for p in pasts])
    tokens, count = jnp.asarray([p.emitted + [0] for p in pasts]), jnp.asarray([2, 1])
    for i in range(2):
        slots = slots.emitted(tokens[:, 2 * i : 2 * i + 2], jnp.repeat(count[i], len(pasts)))
    return slots


@pytest.mark.parametrize("spoken", [None, [0, 2, 3, 7, 8, 11, 20]], ids=["full", "reduced"])
def test_every_position_of_a_block(x64, pasts, spoken):
    """Rows of all slots in one flat batch, each with the drafts before it; drafts repeat tokens of the past."""
    rng = np.random.default_rng(1)
    drafted = [[p.prompt[0], p.emitted[0], p.emitted[0], int(rng.integers(VOCAB))] for p in pasts]
    rows = [(slot, k) for k in range(5) for slot in range(len(pasts))]
    logits = rng.standard_normal((len(rows), VOCAB)) * 3
    before = np.full((len(rows), 4), -1)
    for n, (slot, k) in enumerate(rows):
        before[n, :k] = drafted[slot][:k]
    stops = np.tile([*STOPS, -1], (len(pasts), 1))
    ids = np.arange(VOCAB) if spoken is None else np.asarray(spoken)
    found = jax.jit(adjusted)(
        jnp.asarray(logits[:, ids]), slots_of(pasts), jnp.asarray([slot for slot, _ in rows]), jnp.asarray(before),
        jnp.asarray(stops), None if spoken is None else jnp.asarray(ids),
    )  # fmt: skip
    for n, (slot, k) in enumerate(rows):
        wanted = pasts[slot].expected(logits[n], drafted[slot][:k])[ids]
        np.testing.assert_allclose(found[n], wanted, rtol=1e-6, atol=1e-6, err_msg=f"{pasts[slot].params} at {k}")


def test_neutral_slots_change_no_bit(x64):
    logits = np.random.default_rng(2).standard_normal((6, VOCAB)) * 30
    drafted = jnp.asarray([[3, 3, 3]] * 6)
    for dtype in (jnp.float32, jnp.float64, jnp.bfloat16):
        given = jnp.asarray(logits, dtype)
        found = jax.jit(adjusted)(given, Adjust.neutral(2, VOCAB), jnp.arange(6) % 2, drafted, jnp.full((2, 3), 5))
        assert found.dtype == dtype and np.array_equal(found, given)


@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
@pytest.mark.parametrize("params", [{"presence_penalty": 99.0}, {"frequency_penalty": 9.0}], ids=str)
def test_only_the_first_of_a_run_is_accepted(sampler, params):
    """G1: the drafter proposes A A A, and a penalty forbids A after one use."""
    token, drafts, slots = 5, 3, 2
    adjust = jax.tree.map(
        lambda *a: jnp.stack(a),
        Adjust.of(SamplingParams(**params), [1], VOCAB),
        Adjust.of(SamplingParams(), [1], VOCAB),
    )
    one = SlotSampling.of(SamplingParams(temperature=0.0), 0, (), 1)
    sampling = jax.tree.map(lambda a: jnp.stack([jnp.asarray(a)] * slots), one)
    drafted = jnp.full((slots, drafts), token)

    @jax.jit
    def judge():
        rows = ragged_rows(jnp.full(slots, drafts + 1), jnp.full(slots, 4), slots * (drafts + 1), drafts + 1)
        logits = jnp.zeros((slots * (drafts + 1), VOCAB)).at[:, token].set(8.0).at[:, 6].set(1.0)
        before = jnp.where(jnp.arange(drafts) < rows.offset_N[:, None], token, -1)
        logits = adjusted(logits, adjust, rows.slot_N, before, sampling.stop_RxE)
        no = jnp.zeros(drafted.shape)
        proposal = Proposal(drafted, no, Written(jnp.zeros((slots, drafts, VOCAB))), no)
        return verify(logits, rows, proposal, jnp.arange(VOCAB), sampling, sampler)

    verdict = judge()
    assert verdict.accepted_R.tolist() == [1, drafts] and verdict.next_R.tolist() == [6, token]


# ------------------------------------------------------------------------------------------------------ in the engine

ANSWER, COUNT = 18, 21
KINDS = [
    {}, {"repetition_penalty": 1.4}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.8},
    {"logit_bias": {3: 2.0, 9: -100.0, 20: 3.0}}, {"min_tokens": 9, "ignore_eos": False},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.3, "logit_bias": {5: 4.0, 7: 6.0},
     "min_tokens": 4, "ignore_eos": False},
]  # fmt: skip


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 30, 2 + i % 7).tolist() for i in range(COUNT)]


def params(i: int, **changes) -> SamplingParams:
    base = {"temperature": (0.0, 0.8, 1.2)[(i // 7) % 3], "seed": i, "max_tokens": ANSWER, "ignore_eos": True}
    return SamplingParams(**(base | {"logprobs": 1} | KINDS[i % 7] | changes))


@pytest.fixture
def shared(x64, few_programs, pages_come_back) -> None:
    """What tests of the shared engines want."""


def test_speculation_changes_nothing(shared, talk):
    """Mixed in one batch: coupled for every request, rejection for the greedy ones."""
    everything = [params(i) for i in range(COUNT)]
    plain = talk.plain.generate(prompts(), everything)
    for engine, exact in ((talk.whole, range(COUNT)), (talk.two, range(7))):
        outs = engine.generate(prompts(), everything)
        assert [outs[i].token_ids for i in exact] == [plain[i].token_ids for i in exact]
        assert sum(sum(c.accepted) for c in outs) > COUNT
    for i, out in enumerate(plain):
        minimum = KINDS[i % 7].get("min_tokens", 0)
        assert talk.target.config.eos_token_ids[0] not in out.token_ids[:minimum]
    assert any(len(out.token_ids) == KINDS[i % 7].get("min_tokens", 0) + 1 for i, out in enumerate(plain))


@pytest.mark.parametrize("name", ["plain", "whole", "two"])
def test_a_token_banned_after_one_use(shared, talk, name):
    """G1, end to end: without the penalty the same request says A and nothing else."""
    wish = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True, "logit_bias": {5: 60.0}, "logprobs": 1}
    penalties = ({}, {"presence_penalty": 120.0}, {"frequency_penalty": 40.0})
    outs = getattr(talk, name).generate(prompts()[:3], [SamplingParams(**wish, **penalty) for penalty in penalties])
    assert [out.token_ids.count(5) for out in outs] == [ANSWER, 1, 2]
    assert [out.token_ids[0] for out in outs] == [5, 5, 5] and outs[2].token_ids[1] == 5


def test_adjustments_come_and_go(x64, pages_come_back, talk, monkeypatch):
    """Slots carry them only while somebody asks: the others notice neither that they come nor that they go."""
    monkeypatch.setattr(engine_module, "bucket", lambda count: max(64, count))
    kinds = [0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 4, 1, 0, 0]
    given = [params(7 + kind, seed=i, max_tokens=4 + i) for i, kind in enumerate(kinds)]
    together, seen = {}, []
    for request, _ in talk.plain.run(talk.plain.requests(prompts()[:14], given), 3):
        together[request.index] = request.completion.token_ids
        seen.append(bool(talk.plain.slots.adjust))
    assert sum(a != b for a, b in zip(seen, seen[1:], strict=False)) >= 3
    with monkeypatch.context() as patch:
        patch.setattr(SamplingParams, "adjusts", True)
        always = talk.plain.generate(prompts()[:14], given)
    assert [together[i] for i in range(14)] == [c.token_ids for c in always]


def test_repetition_penalty_of_transformers(golden, few_programs):
    """Greedy, float32, against `generate` of the same weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(golden / "target").eval()
    target = load_target(golden / "target", dtype="float32")
    engine = Engine(
        target, load_drafter(golden / "dspark_vanilla", target), max_slots=4, max_length=64, rounds_per_dispatch=32
    )
    asked = [np.random.default_rng(i).integers(0, 256, 9).tolist() for i in range(4)]
    penalties = (1.3, 0.9, 1.1, 2.0)
    wishes = [
        SamplingParams(temperature=0.0, repetition_penalty=p, max_tokens=24, min_tokens=5, logprobs=1)
        for p in penalties
    ]
    for prompt, penalty, out in zip(asked, penalties, engine.generate(asked, wishes), strict=True):
        with torch.no_grad():
            ids = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=5,
                repetition_penalty=penalty, pad_token_id=0,
            )  # fmt: skip
        assert out.token_ids == ids[0, len(prompt) :].tolist()
