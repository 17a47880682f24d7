"""A round with kernels says what a round without them says, and holds them where it is compiled for a TPU."""

import functools
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.state import Caches, Weights
from dspark_jax.errors import UserError
from dspark_jax.planning.models import place_params, place_pools, place_tables, replicated
from pallas_kernels.backends import choose
from pallas_kernels.targets import kernels_in
from tests.decoding.eight_devices import collectives
from tests.decoding.test_drafter_kinds import VOCAB, Kind, make
from tests.kernels.targets import compile_tpu, has_kernel, needs_libtpu, tpu_interpreter, tpu_mesh

OPTIONS = {"strategy": "fixed:2", "max_slots": 2, "rounds_per_dispatch": 2, "cache_tokens": 128}


@pytest.fixture(scope="module")
def models(tiny_target, tiny_drafter):
    target = tiny_target(dtype="float32")
    return target, tiny_drafter(target, "bigram", 3)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
def test_an_engine_with_kernels_says_the_same(models, sampler):
    prompts = [[1, 2, 3], [7, 8, 9, 10], [4, 5]]
    asked = ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9})
    params = [SamplingParams(**warp, seed=5, max_tokens=6) for warp in asked]
    plain = Engine(*models, sampler=sampler, kernels="xla", **OPTIONS).generate(prompts, params)
    engine = Engine(*models, sampler=sampler, kernels="tpu", **OPTIONS)
    with tpu_interpreter():
        by_kernel = engine.generate(prompts, params)
    assert [c.token_ids for c in by_kernel] == [c.token_ids for c in plain]
    assert [c.accepted for c in by_kernel] == [c.accepted for c in plain]


@pytest.mark.parametrize("kind", [Kind("vanilla", 0, True), Kind("gated", 1), Kind("rnn", 1, True), Kind("domino", 0)])
def test_blocks_drawn_by_the_kernel_are_those_of_logits_in_memory(tiny_target, drafts_after, kind):
    """Their tokens, what these weigh, and the law that the residual asks for, of every head that is a table."""
    target = tiny_target(dtype="float32", vocab=VOCAB)
    drafter, tokens, lengths = make(target, kind, taps=(-1, 0)), [3, 1, 4, 1, 5, 9, 2, 6], [2, 5, 8]
    for temperature in (0.0, 0.8):
        asked = target, drafter, tokens, lengths, SamplingParams(temperature=temperature, seed=7), "rejection"
        want = drafts_after(*asked)
        with tpu_interpreter():
            got = drafts_after(*asked, "tpu")
        np.testing.assert_array_equal(got.token_RxK, want.token_RxK)
        np.testing.assert_allclose(got.law.warped_RxKxVd, want.law.warped_RxKxVd, rtol=1e-4, atol=1e-5)
        for name in ("log_q_RxK", "log_largest_RxK", "confidence_RxK"):
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5)


def test_what_the_gpu_kernel_does_not_take_is_drawn_from_logits(models, drafts_after):
    """Here a float32 drafter. Its kernel would not run on a CPU."""
    asked = *models, [3, 1, 4, 1, 5, 9, 2, 6], [2, 5, 8], SamplingParams(seed=7), "rejection"
    want, got = drafts_after(*asked), drafts_after(*asked, "gpu")
    np.testing.assert_array_equal(got.token_RxK, want.token_RxK)


@needs_libtpu
@pytest.mark.parametrize(
    ("kernels", "top_logprobs", "held"),
    [("tpu", -1, ("fused_verify", "markov_sampler")), ("tpu", 2, ("markov_sampler",)), ("xla", -1, ())],
    ids=["kernels", "the likeliest tokens take the logits themselves", "xla"],
)
def test_the_round_of_a_tpu_holds_the_kernels(models, kernels, top_logprobs, held):
    engine = Engine(*models, kernels=kernels, **OPTIONS)
    sizes = {"drafts": 2, "context_pages": 2, "top_logprobs": top_logprobs}
    one_round = functools.partial(decode_round, engine.models, engine.policy, **sizes)
    compiled = compile_tpu("v5e", one_round, engine.weights, engine.caches, engine.slots)
    assert kernels_in(compiled.as_text()) == held and has_kernel(compiled) == bool(held)


@needs_libtpu
@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_on_a_mesh_kernels_have_their_own_words_and_exchange_statistics(tiny_target, shape):
    """The round of eight chips: nothing that crosses them has a number for each row and word."""
    vocab, mesh = 1 << 15, tpu_mesh("v5e", shape)
    target = tiny_target(dtype="float32", vocab=vocab)
    drafter = make(target, Kind("vanilla", 0, True), taps=(-1, 0))
    engine = Engine(target, drafter, kernels="tpu", **OPTIONS)
    weights = Weights(
        place_params(target.params, target.config, mesh), place_params(drafter.params, drafter.config.decoder, mesh),
        place_tables(drafter.borrowed, mesh, reduced=False),
    )  # fmt: skip
    caches = Caches(*(place_pools(pools, mesh) for pools in (engine.caches.target, engine.caches.draft)))
    one_round = functools.partial(decode_round, engine.models, engine.policy, drafts=2, context_pages=2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(one_round).lower(weights, caches, replicated(engine.slots, mesh)).compile()
    assert kernels_in(compiled.as_text()) == ("fused_verify", "markov_sampler")
    rows, candidates = 6, 8 * 512
    assert max(size for size, _ in collectives(compiled.as_text())) <= rows * candidates * 4 < rows * vocab * 4


@needs_libtpu
@pytest.mark.parametrize(("top_p", "held"), [(1.0, False), (0.9, True)])
def test_the_logits_of_all_rows_are_in_memory_only_where_top_p_is_asked_for(tiny_target, tiny_drafter, top_p, held):
    target = tiny_target(dtype="float32", vocab=300)
    engine = Engine(target, tiny_drafter(target, "bigram", 3), kernels="tpu", **OPTIONS)
    engine.fill(engine.requests([[1, 2, 3]], SamplingParams(temperature=1.0, top_p=top_p, max_tokens=4)))
    one_round = functools.partial(decode_round, engine.models, engine.policy, drafts=2, context_pages=2)
    compiled = compile_tpu("v5e", one_round, engine.weights, engine.caches, engine.slots)
    assert ("f32[6,300]" in compiled.as_text()) == held


class Card(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str


@pytest.mark.parametrize(
    ("card", "written", "taken", "why"),
    [(Card("gpu", "NVIDIA H100", "9.0"), ("tpu", "gpu"), "gpu", "NVIDIA H100"),
     (Card("gpu", "NVIDIA H100", "9.0"), ("tpu",), "xla", "no kernel for gpu"),
     (Card("gpu", "NVIDIA B200", "10.0"), ("tpu", "gpu"), "xla", "need a Hopper.*NVIDIA B200 has 10.0"),
     (Card("gpu", "NVIDIA A100", "8.0"), ("tpu", "gpu"), "xla", "need a Hopper.*NVIDIA A100 has 8.0")],
)  # fmt: skip
def test_of_gpus_a_hopper_has_kernels(card, written, taken, why, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [card])
    chosen, reason = choose("auto", written=written, untried=True)
    assert chosen == taken and re.search(why, reason)
    assert choose("auto", written=written)[0] == "xla"  # until a card has run them


def test_the_device_decides(models):
    assert Engine(*models, **OPTIONS).policy.kernels == "xla"
    assert choose("auto") == ("xla", f"there is no kernel for {jax.devices()[0].platform} devices")
    assert choose("tpu")[0] == "tpu"
    with pytest.raises(UserError, match="unknown kernels 'cuda'"):
        Engine(*models, kernels="cuda", **OPTIONS)
