"""Tiny models of the decoding tests: random targets, drafters that know nothing, and drafters that know a lot.

Everything is built from seeded numpy arrays in the dtype that the test asks for, so float64 is exact from end to end.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from dspark_jax.decoding import engine as engine_module
from dspark_jax.decoding.caches import empty_pools, view_pools, write_pools
from dspark_jax.decoding.draft import Proposal, propose
from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.sampling import SamplingParams, SlotSampling
from dspark_jax.interop.drafter_io import Drafter, abstract_drafter, borrow
from dspark_jax.interop.target_io import Target, abstract_params, dense_forward
from dspark_jax.interop.tokenizer import Tokenizer
from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Eagle3Config, Rope, draft_decoder
from dspark_jax.models.target import Decoder
from pallas_kernels.draft_law import Written
from pallas_kernels.ragged_attention import ragged_rows

TargetMaker = Callable[..., Target]
DrafterMaker = Callable[..., Drafter]


def random_params(shapes, seed: int, dtype: str):
    """N(0, 1 / fan-in) kernels and nearly-one norms: hidden states of size one, whatever the width."""
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        noise = rng.standard_normal(like.shape)
        name = path[-1].key
        if name in ("scale", "layer_scalar"):
            return jnp.asarray(1 + 0.1 * noise, dtype)
        fan_in = like.shape[-2] if name == "kernel" else 1
        return jnp.asarray(noise / np.sqrt(fan_in), dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def make_target(
    dtype: str = "float64",
    vocab: int = 41,
    hidden: int = 32,
    layers: int = 3,
    max_length: int = 64,
    eos: tuple[int, ...] = (),
    sharpness: float = 2.0,
    context: float = 0.25,
    seed: int = 0,
    **changes,
) -> Target:
    """A random target. `sharpness`: size of its logits. `context`: how much the layers add to the last token's say.

    `changes`: of its config, which is a Qwen3's with full attention.
    """
    config = DecoderConfig(
        family="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_heads=4,
        attention=(Attention(num_kv_heads=2, head_dim=8, rope=Rope(10000.0)),),
        layer_kinds=(0,) * layers,
        max_length=max_length,
        qk_norm=True,
        tied=False,
        eos_token_ids=eos,
    )
    config = dataclasses.replace(config, **changes)
    params = random_params(abstract_params(Decoder(config)), seed, dtype)
    if not config.tied:
        params["lm_head"]["kernel"] *= sharpness
    for layers in params["layers"]:
        if config.sandwich:  # norms behind the projections undo their size
            layers["post_attention_layernorm"]["scale"] *= context
            layers["post_feedforward_layernorm"]["scale"] *= context
        layers["o_proj"]["kernel"] *= context
        layers["mlp"]["down_proj"]["kernel"] *= context
    return Target(config, params, None, "tiny target")


def make_drafter(
    target: Target,
    kind: str = "bigram",
    block: int = 4,
    spoken: Sequence[int] | None = None,
    noise: float = 0.1,
    seed: int = 1,
    **changes,
) -> Drafter:
    """A drafter for `target`; `spoken`: the target ids of a reduced vocabulary. `changes`: of its layers' config.

    "bigram": its Markov table holds the target's logits after each single token, plus `noise` times the backbone's own
    opinion: right often, not always. "random": it knows nothing of the target.
    """
    t = target.config
    vocab, dtype = t.vocab_size, str(target.dtype)
    ids = np.arange(vocab) if spoken is None else np.sort(np.asarray(spoken))
    config = DrafterConfig(
        decoder=dataclasses.replace(draft_decoder(t, num_layers=2), **changes),
        block_size=block,
        mask_token_id=vocab - 1,
        tap_layers=(-1, t.num_layers - 1),
        num_target_layers=t.num_layers,
        draft_vocab_size=len(ids),
        markov_rank=vocab,
    )
    params = random_params(abstract_drafter(config), seed, dtype)
    if kind == "bigram":
        logits = dense_forward(target.module, target.params, jnp.arange(vocab)[:, None]).logits[
            :, 0
        ]  # [previous, next]
        params["markov_head"] = {"markov_w1": jnp.eye(vocab, dtype=dtype), "markov_w2": logits.T[ids].astype(dtype)}
        params["backbone"]["norm"]["scale"] *= noise
    else:
        params["markov_head"]["markov_w1"] *= 0.3
        params["markov_head"]["markov_w2"] *= 0.3
    return Drafter(config, params, borrow(target, None if spoken is None else ids))


def make_eagle(target: Target, drafts: int = 3, seed: int = 4) -> Drafter:
    """An Eagle3 drafter with random weights."""
    t = target.config
    config = Eagle3Config(
        draft_decoder(t, 1, causal=True), drafts, (-1, 1, t.num_layers - 1), t.num_layers, t.vocab_size
    )
    return Drafter(config, random_params(abstract_drafter(config), seed, str(target.dtype)), borrow(target))


_PAGE = 16


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _propose_after(
    target_module, module, sampler, kernels, target_params, params, borrowed, tokens, length, sampling
) -> Proposal:
    size, slots, c = len(tokens), len(length), module.config
    taps = dense_forward(target_module, target_params, tokens[None]).taps[0]
    position, following = jnp.arange(size), jnp.roll(tokens, -1)
    kv = module.apply({"params": params}, taps, position, following, borrowed, method=type(module).context)
    table = jnp.arange(size // _PAGE)[None]
    rows = ragged_rows(jnp.asarray([size]), jnp.asarray([0]), size, size)
    pools = write_pools(empty_pools(c.decoder, size // _PAGE, _PAGE, taps.dtype), kv, table, rows, rows.valid_N)
    prefixes = view_pools(pools, jnp.repeat(table, slots, axis=0), length - 1)
    carry = module.apply({"params": params}, taps[length - 2], method=type(module).carry)
    parts = params, borrowed, tokens[length - 1], prefixes, carry, sampling
    out = propose(module, *parts, sampler, c.num_drafts, kernels=kernels)
    rows = [out.law.row(jnp.full(slots, k)) for k in range(c.num_drafts)]
    return out.replace(law=Written(jnp.stack(rows, axis=1)))  # whatever it was


def proposals_after(
    target: Target,
    drafter: Drafter,
    tokens: Sequence[int],
    lengths: Sequence[int],
    params: SamplingParams,
    sampler: str,
    kernels: str = "xla",
) -> Proposal:
    """`propose` after `tokens[:n]` for every n of `lengths`, its context made by the dense target, not the engine.

    Sequences and slots are padded, so that few programs are compiled.
    """
    size, slots = -(-len(tokens) // 64) * 64, -(-len(lengths) // 32) * 32
    padded = jnp.asarray([*tokens, *[0] * (size - len(tokens))], jnp.int32)
    length = jnp.asarray([*lengths, *[lengths[-1]] * (slots - len(lengths))], jnp.int32)
    one = SlotSampling.of(params, params.seed or 0, (), 1, params.sampled, params.limited)
    sampling = jax.tree.map(lambda a: np.repeat(np.asarray(a)[None], slots, axis=0), one)
    out = _propose_after(
        target.with_taps(drafter.config.tap_layers).module, drafter.module, sampler, kernels, target.params,
        drafter.params, drafter.borrowed, padded, length, sampling,
    )  # fmt: skip
    return jax.tree.map(lambda a: np.asarray(a)[: len(lengths)], out)


@pytest.fixture(scope="session")
def drafts_after() -> Callable[..., Proposal]:
    return proposals_after


@pytest.fixture(scope="session")
def tiny_target() -> TargetMaker:
    return make_target


@pytest.fixture(scope="session")
def tiny_drafter() -> DrafterMaker:
    return make_drafter


@pytest.fixture(scope="session")
def tiny_eagle() -> DrafterMaker:
    return make_eagle


# ------------------------------------------------------------------------------- a target that talks, and its engines

EOS = 7
SPELLINGS = [
    *"abcdefg", "<end>", *"hijklmnop", *"ABC", "Ġ", "ab", "bc", "abc", "cde", "aĠb",
    # Bytes of é (C3 A9) and € (E2 82 AC) in GPT-2's alphabet, alone and with letters.
    *"Ã©âĤ¬", "bÃ", "©c", "Ĥ¬", "aâ", "Ã©", "¬dÃ", "fg", "<note>",
]  # fmt: skip


@pytest.fixture(scope="session")
def spelling() -> Tokenizer:
    """Byte-level tokens: letters, pieces of words, pieces of characters, an end token and one that has no text."""
    backend = tokenizers.Tokenizer(tokenizer_models.BPE({text: i for i, text in enumerate(SPELLINGS)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<note>"])
    return Tokenizer(backend, {"eos_token": "<end>"}, None, "test")


@dataclasses.dataclass(frozen=True)
class Talk:
    """A target with text, whose vocabulary is padded, and engines without and with a drafter."""

    target: Target
    drafter: Drafter
    plain: Engine
    whole: Engine  # whole blocks, coupled: equal to `plain` token for token
    two: Engine  # two drafts a round, rejection

    @property
    def engines(self) -> dict[str, Engine]:
        return {"plain": self.plain, "whole": self.whole, "two": self.two}


TALK = {"max_slots": 3, "rounds_per_dispatch": 3, "page_size": 4}


@pytest.fixture(scope="session")
def talk(spelling) -> Talk:
    with jax.enable_x64(True):
        target = make_target(vocab=len(SPELLINGS) + 7, eos=(EOS,))
        target = dataclasses.replace(target, tokenizer=spelling)
        drafter = make_drafter(target, block=3)
        return Talk(
            target, drafter, Engine(target, strategy="off", sampler="coupled", **TALK),
            Engine(target, drafter, sampler="coupled", **TALK), Engine(target, drafter, strategy="fixed:2", **TALK),
        )  # fmt: skip


@pytest.fixture
def few_programs(monkeypatch) -> Iterator[None]:
    """One program for every number of slots, and the one with adjustments for everybody: compilation is slow."""
    monkeypatch.setattr(engine_module, "bucket", lambda count: max(64, count))
    monkeypatch.setattr(SamplingParams, "adjusts", True)
    yield


@pytest.fixture
def pages_come_back(talk) -> Iterator[None]:
    """Whatever a test does, the engines hold no page afterwards."""
    yield
    for engine in talk.engines.values():
        assert not engine.pages._users and engine.pages.available == engine.pages.total
