"""Every kind of block drafter in the engine: it changes no token, and it drafts as its trainer's forward does."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding import round as round_module
from dspark_jax.decoding.draft import Proposal, propose
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.interop.drafter_io import Drafter, abstract_drafter, borrow
from dspark_jax.interop.target_io import Target
from dspark_jax.models.config import DrafterConfig, draft_decoder
from dspark_jax.training.anchors import make_blocks
from dspark_jax.training.step import draft_blocks

VOCAB, BLOCK = 31, 3
LENGTHS, ANSWER = (1, 9, 20, 6), 19  # tokens of the prompts, and of every answer
TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
WINDOWED = {"window": 6, "window_from_anchor": True, "causal": True}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A drafter to make. `attention`: changes of each kind of its layers' attention, which alternate."""

    head: str = "vanilla"
    start: int = 0
    confidence: bool = False
    attention: tuple[dict, ...] = ({},)
    convolutions: int = 0

    def __str__(self) -> str:
        window = "-".join(f"{k}={v}" for part in self.attention for k, v in part.items())
        parts = (self.head, f"s{self.start}", "confidence" * self.confidence, window, "conv" * bool(self.convolutions))
        return "-".join(filter(None, parts))


HEADS = ("none", "vanilla", "gated", "rnn", "domino", "selector")
# Compiling takes all the time: one kind for each part here, and every combination in the slow tests.
KINDS = [
    Kind("gated", 0, True), Kind("domino", 0, True), Kind("domino", 1),
    Kind("rnn", 1, True, (WINDOWED,)), Kind("selector", 1, convolutions=2),
    Kind("vanilla", 0, True, ({}, {"window": 5}, {"window": 7, "causal": True})),
]  # fmt: skip
OTHERS = [
    kind for head, start, confidence in itertools.product(HEADS, (0, 1), (False, True))
    if (kind := Kind(head, start, confidence)) not in KINDS
]  # fmt: skip


def make(target: Target, kind: Kind, taps: tuple[int, ...] = (-1, 1), seed: int = 1) -> Drafter:
    """A drafter with random weights that has the kind's parts."""
    t, vocab = target.config, target.config.vocab_size
    decoder = draft_decoder(t, len(kind.attention))
    (full,) = decoder.attention
    attention = tuple(dataclasses.replace(full, **changes) for changes in kind.attention)
    decoder = dataclasses.replace(decoder, attention=attention, layer_kinds=tuple(range(len(attention))))
    config = DrafterConfig(
        decoder=decoder, block_size=BLOCK, mask_token_id=vocab - 1, tap_layers=taps,
        num_target_layers=t.num_layers, draft_vocab_size=vocab, logits_start=kind.start,
        markov_rank=0 if kind.head == "none" else 6, head_type="vanilla" if kind.head == "none" else kind.head,
        gru_width=5, pure_prefix=1, selector_top_k=8, conv_taps=kind.convolutions, conv_group=8,
        confidence=kind.confidence, confidence_with_markov=kind.confidence and kind.head in ("vanilla", "gated", "rnn"),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape) / np.sqrt(a.shape[-2] if a.ndim > 1 else 1), target.dtype),
        abstract_drafter(config),
    )
    return Drafter(config, params, borrow(target))


class Recorder:
    """Keeps an engine's drafts: `drafts[seed of the request][position of the anchor]` is tokens, logits, confidences.

    The logits are over the request's temperature.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.drafts: dict[int, dict[int, tuple[np.ndarray, ...]]] = {}
        signature = inspect.signature(propose)

        def recorded(*args, **options) -> Proposal:
            given = signature.bind(*args, **options).arguments
            out, seed, position = propose(*args, **options), given["sampling"].seed[0], given["prefixes"][0].length_R
            jax.debug.callback(self._keep, seed, position, out.token_RxK, out.law.warped_RxKxVd, out.confidence_RxK)
            return out

        patch.setattr(round_module, "propose", recorded)

    def _keep(self, seeds, positions, *outs) -> None:
        for seed, position, *own in zip(seeds.tolist(), positions.tolist(), *map(np.array, outs), strict=True):
            self.drafts.setdefault(seed, {})[position] = tuple(own)


def run(target: Target, drafter: Drafter | None, lengths=LENGTHS, temperatures=TEMPERATURES, **options):
    """Requests with prompts of different lengths, answered in one batch, and what was drafted for each."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    params = [SamplingParams(temperature=t, seed=i + 1, max_tokens=ANSWER) for i, t in enumerate(temperatures)]
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        options = {"sampler": "coupled", "strategy": "auto" if drafter else "off", "max_slots": len(lengths)} | options
        engine = Engine(target, drafter, **options)
        requests = engine.requests(prompts, params[: len(prompts)])
        for _ in engine.run(requests, 32):  # one dispatch, one program
            pass
        jax.effects_barrier()
    return requests, recorder.drafts


def tokens_of(request) -> list[int]:
    return request.prompt_ids + request.completion.token_ids


def taps_of(target: Target, drafter: Drafter, sequence: np.ndarray) -> jax.Array:
    if drafter.config.tap_layers == (-1,):  # long sequences: no need to run the target
        return target.params["embedding"][sequence]
    return target.with_taps(drafter.config.tap_layers)(sequence).taps


def check_against_training(target: Target, drafter: Drafter, requests, drafts, tolerance: float) -> int:
    """Compares every draft with the trainer's forward: one sequence a request, a block at every anchor it had (A6).

    A draft counts when those before it are the sequence's own tokens, which training sees. Returns how many did.
    """
    count, drafter_forward = 0, jax.jit(draft_blocks, static_argnums=0)
    width, num_drafts = max(len(tokens_of(r)) for r in requests) + BLOCK, drafter.config.num_drafts
    for request in requests:
        tokens, own = tokens_of(request), drafts[request.params.seed]
        anchors = [a for a in sorted(own) if a < len(tokens)]
        keep = np.arange(ANSWER + 1) < len(anchors)
        sequence = np.array([tokens + [-1] * (width - len(tokens))])
        taps = taps_of(target, drafter, sequence % VOCAB)
        blocks = make_blocks(
            sequence % VOCAB, jnp.ones(sequence.shape), np.resize(anchors, (1, len(keep))), keep[None], num_drafts
        )
        outs = drafter_forward(drafter.module, drafter.params, drafter.borrowed, taps, blocks)
        for a, logits, confidence in zip(anchors, *map(lambda x: np.asarray(x[0]), outs), strict=False):
            drafted, warped, trusted = own[a]
            same = 1 + np.cumprod(drafted[:-1] == sequence[0, a + 1 : a + num_drafts]).sum(dtype=int)
            logits, count = logits / np.float32(request.params.temperature or 1), count + same
            np.testing.assert_allclose(warped[:same], logits[:same], rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(trusted[:same], confidence[:same], rtol=tolerance, atol=tolerance)
    return count


@pytest.fixture(scope="module", autouse=True)
def x64_in_all_threads():
    """`jax.enable_x64` holds in its own thread only; the recorder is called in another."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    """Flat enough that a drafter with the same noise is often right, whatever it thinks."""
    return tiny_target(vocab=VOCAB, hidden=16, layers=2, sharpness=0.7)


@pytest.fixture(scope="module")
def plain(target) -> list[list[int]]:
    """The answers without speculation."""
    return [r.completion.token_ids for r in run(target, None)[0]]


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)], ids=str)
def test_answers_are_the_targets_and_drafts_the_trainers(target, plain, kind):
    drafter = make(target, kind)
    requests, drafts = run(target, drafter)
    assert [r.completion.token_ids for r in requests] == plain
    accepted = [count for r in requests for count in r.completion.accepted]
    assert {0, 1, 2} <= set(accepted)  # rounds of many outcomes lie behind the drafts
    assert check_against_training(target, drafter, requests, drafts, 1e-8) > 40


def test_drafts_past_position_4096_are_the_trainers(tiny_target, monkeypatch):
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 2112)
    target = tiny_target("float32", vocab=VOCAB, hidden=16, layers=1, max_length=4352, sharpness=0.7)
    window = {"window": 300, "window_from_anchor": True}
    drafter = make(target, Kind("rnn", 1, True, ({}, window), convolutions=2), taps=(-1,))
    requests, drafts = run(target, drafter, (4200,), (1.0,), cache_tokens=4400)
    assert min(drafts[1]) == 4199
    assert check_against_training(target, drafter, requests, drafts, 1e-4) > 10


# ----------------------------------------------------------------- what the anchor's slot means (logits_start, A3, A16)


def counting_target(tiny_target) -> Target:
    """A target whose most likely token is always the next number: no two tokens of an answer are alike."""
    target = tiny_target(vocab=48, hidden=48, layers=2)
    head = {"kernel": jnp.roll(target.params["embedding"], 1, axis=0).T}
    return dataclasses.replace(target, params={**target.params, "lm_head": head})


def overfitted(target: Target, start: int, prompt: list[int], answer: int) -> Drafter:
    """A drafter without an in-block head that knows the answer to one prompt by heart.

    Its slots' hidden states at all anchors of the answer are fewer than their width: some head maps each to its token.
    """
    drafter = make(target, Kind("none", start))
    count, vocab = drafter.config.num_drafts, target.config.vocab_size
    tokens = np.array([prompt + [prompt[-1] + 1 + i for i in range(answer + count)]])
    anchors = np.arange(len(prompt) - 1, len(prompt) + answer - 1)[None]
    bare = drafter.borrowed.replace(head_VdxH=jnp.eye(vocab))  # as wide as the vocabulary: "logits" are hidden states
    taps = target.with_taps(drafter.config.tap_layers)(tokens).taps
    blocks = make_blocks(tokens, jnp.ones(tokens.shape), anchors, jnp.ones(anchors.shape, bool), count)
    hidden = jax.jit(draft_blocks, static_argnums=0)(drafter.module, drafter.params, bare, taps, blocks)[0]
    wanted = np.eye(vocab)[blocks.label_BxNxK]
    head = np.linalg.lstsq(np.asarray(hidden).reshape(-1, vocab), wanted.reshape(-1, vocab), rcond=None)[0]
    return dataclasses.replace(drafter, borrowed=bare.replace(head_VdxH=jnp.asarray(head.T)))


@pytest.mark.parametrize("start", [0, 1])
def test_an_overfitted_drafter_is_always_right_unless_its_anchors_slot_is_misread(tiny_target, start):
    """checkpoint_formats.md section 12, test 3; greedy answers do not change either way."""
    target, prompt, answer = counting_target(tiny_target), [3, 11, 4, 1, 5], 12
    drafter = overfitted(target, start, prompt, answer)
    misread = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, logits_start=1 - start))
    for one, right in ((drafter, True), (misread, False)):
        engine = Engine(target, one, max_slots=1, rounds_per_dispatch=32)
        (out,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=answer))
        assert out.token_ids == list(range(6, 18))
        assert len(out.accepted) == -(-answer // (one.config.num_drafts + 1)) if right else sum(out.accepted) <= 2
