"""A drafter's vocabulary: its own tables or the target's, reduced, padded or whole."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.errors import UserError
from dspark_jax.interop.drafter_io import load_drafter
from dspark_jax.interop.target_io import Target
from tests.interop.layouts import (
    HIDDEN,
    LLAMA,
    MASK,
    QWEN,
    SPOKEN,
    VOCAB,
    block,
    deepspec,
    dflash,
    eagle3,
    files_of,
    headless,
    make_target,
    midlayer,
    random_params,
    random_tables,
    speculators_dspark,
    vocabulary_map,
    write,
)

COUNT = len(SPOKEN)
OWN_HEAD = {"lm_head.weight": random_tables(spoken=COUNT)["lm_head.weight"]}
LOW = np.array([0, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17])  # low enough to pass for offsets
NARROW = {"target_hidden_size": HIDDEN}


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def reduced(tmp_path: Path, **tensors: np.ndarray) -> Path:
    raw, own = files_of(block(draft_vocab_size=COUNT), speculators_dspark)
    return write(tmp_path, raw, own | OWN_HEAD | tensors)


def refuses(path: Path, target: Target, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load_drafter(path, target)
    message = str(error.value)
    assert "\n" not in message and len(message) < 300
    for word in words:
        assert word in message, message


# ---------------------------------------------------------------------------------------------------- own and borrowed


@pytest.mark.parametrize(
    "own", [(), ("embed_tokens.weight",), ("lm_head.weight",), ("embed_tokens.weight", "lm_head.weight")]
)
def test_a_missing_table_is_the_targets_and_a_different_one_is_kept(tmp_path, target, own):
    tables = {name: array for name, array in random_tables().items() if name in own}
    raw, tensors = files_of(block())
    borrowed = load_drafter(write(tmp_path, raw, tensors | tables), target).borrowed
    np.testing.assert_array_equal(borrowed.embedding_VxH, tables.get("embed_tokens.weight", target.params["embedding"]))
    np.testing.assert_array_equal(
        borrowed.head_VdxH, tables.get("lm_head.weight", target.params["lm_head"]["kernel"].T)
    )


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_narrower_drafter_cannot_borrow(tmp_path, target, name):
    raw, tensors = files_of(eagle3(dataclasses.replace(LLAMA, hidden_size=24), **NARROW), midlayer, **NARROW)
    tables = random_tables(24)
    del tables[name]
    refuses(write(tmp_path, raw, tensors | tables), target, f"lacks the tensor '{name}'")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_table_of_another_size(tmp_path, target, name):
    raw, tensors = files_of(block())
    table = random_tables()[name][:-1]
    refuses(write(tmp_path, raw, tensors | {name: table}), target, f"tensor '{name}' has shape [39, 32]", "[40, 32]")


def test_a_mask_vector_of_its_own(tmp_path, target):
    """Some DFlash files train the mask's embedding and nothing else of the table."""
    raw, tensors = files_of(headless(logits_start=1), dflash)
    row = np.arange(HIDDEN, dtype=np.float32)
    embedding = np.asarray(
        load_drafter(write(tmp_path, raw, tensors | {"mask_embedding": row}), target).borrowed.embedding_VxH
    )
    np.testing.assert_array_equal(embedding[MASK], row)
    np.testing.assert_array_equal(embedding[:MASK], target.params["embedding"][:MASK])


# -------------------------------------------------------------------------------------------------------------- reduced


@pytest.mark.parametrize(
    ("ids", "d2t", "with_t2d"),
    [
        (SPOKEN, SPOKEN - np.arange(COUNT), True),
        (SPOKEN, SPOKEN - np.arange(COUNT), False),
        (SPOKEN, SPOKEN, True),  # target ids themselves
        (SPOKEN, SPOKEN, False),  # no offsets: the last id would leave the vocabulary
        (LOW, LOW, True),  # either would do; the mask tells
        (LOW + np.arange(COUNT), LOW, False),  # either would do; offsets are the convention
    ],
    ids=["offsets", "offsets alone", "ids", "ids alone", "ids that pass for offsets", "ambiguous"],
)
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_d2t(tmp_path, target, ids, d2t, with_t2d, dtype):
    t2d = {"t2d": np.isin(np.arange(VOCAB), ids)} if with_t2d else {}
    loaded = load_drafter(reduced(tmp_path, d2t=d2t.astype(dtype), **t2d), target)
    np.testing.assert_array_equal(loaded.borrowed.token_ids_Vd, ids)
    np.testing.assert_array_equal(loaded.borrowed.head_VdxH, OWN_HEAD["lm_head.weight"])
    assert loaded.config.reduced and loaded.config.draft_vocab_size == COUNT


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"d2t": SPOKEN - 2 * np.arange(COUNT)}, ("d2t is no increasing map",)),
        ({"d2t": np.full(COUNT, VOCAB)}, ("d2t is no increasing map",)),
        ({"d2t": SPOKEN[::-1].copy()}, ("d2t is no increasing map",)),
        (vocabulary_map() | {"t2d": np.isin(np.arange(VOCAB), LOW)}, ("d2t is no increasing map", "t2d")),
        ({"d2t": np.arange(COUNT - 1)}, ("tensor 'd2t' has shape [11]", "[12]")),
        ({}, ("lacks the tensor 'd2t'",)),
        (vocabulary_map() | {"t2d": np.ones(VOCAB - 1, bool)}, ("tensor 't2d' has shape [39]", "[40]")),
    ],
    ids=["repeated", "outside", "decreasing", "not what t2d says", "short", "missing", "short t2d"],
)
def test_d2t_that_fits_nothing(tmp_path, target, tensors, words):
    refuses(reduced(tmp_path, **tensors), target, *words)


def test_a_reduced_head_is_not_borrowed(tmp_path, target):
    """Its rows were trained; the target's would pass unnoticed."""
    raw, tensors = files_of(block(draft_vocab_size=COUNT), speculators_dspark)
    refuses(write(tmp_path, raw, tensors | vocabulary_map()), target, "lacks the tensor 'lm_head.weight'")


def test_a_map_tells_of_a_reduced_vocabulary_where_the_config_does_not(tmp_path, target):
    raw, tensors = files_of(eagle3(LLAMA, draft_vocab_size=COUNT), midlayer)
    del raw["draft_vocab_size"]
    loaded = load_drafter(write(tmp_path, raw, tensors | OWN_HEAD | vocabulary_map()), target)
    np.testing.assert_array_equal(loaded.borrowed.token_ids_Vd, SPOKEN)


# ------------------------------------------------------------------------------------------------------ whole or padded


@pytest.mark.parametrize("d2t", [np.zeros(VOCAB, np.int64), np.arange(VOCAB)], ids=["offsets", "ids"])
def test_an_identity_map_is_no_reduction(tmp_path, target, d2t):
    raw, tensors = files_of(eagle3(LLAMA), midlayer)
    loaded = load_drafter(write(tmp_path, raw, tensors | {"d2t": d2t, "t2d": np.ones(VOCAB, bool)}), target)
    assert not loaded.config.reduced
    np.testing.assert_array_equal(loaded.borrowed.token_ids_Vd, np.arange(VOCAB))
    np.testing.assert_array_equal(loaded.borrowed.head_VdxH, target.params["lm_head"]["kernel"].T)


@pytest.mark.parametrize("with_head", [True, False])
def test_a_padded_head_is_whole_and_loses_its_padding(tmp_path, target, with_head):
    """N1: a head with rows past the vocabulary covers it; no map is needed, and no padding id can be drafted."""
    raw, tensors = files_of(block(), deepspec, draft_vocab_size=VOCAB + 8)
    pad = lambda table: np.pad(table, ((0, 8), (0, 0)), constant_values=9)  # noqa: E731
    tensors["markov_head.markov_w2.weight"] = pad(tensors["markov_head.markov_w2.weight"])
    head = random_tables()["lm_head.weight"]
    loaded = load_drafter(write(tmp_path, raw, tensors | ({"lm_head.weight": pad(head)} if with_head else {})), target)
    assert loaded.config == block() and not loaded.config.reduced
    np.testing.assert_array_equal(
        loaded.params["markov_head"]["markov_w2"], random_params(block())["markov_head"]["markov_w2"]
    )
    wanted = head if with_head else target.params["lm_head"]["kernel"].T
    np.testing.assert_array_equal(loaded.borrowed.head_VdxH, wanted)


@pytest.mark.parametrize("vocab", [VOCAB - 1, VOCAB + 1, VOCAB + 64])
def test_another_vocabulary(tmp_path, target, vocab):
    config = block(dataclasses.replace(QWEN, vocab_size=vocab), draft_vocab_size=vocab)
    refuses(write(tmp_path, *files_of(config)), target, f"vocabulary is {vocab}", "has 40")
