"""Shared pages of prompts: whom they may be given to, what they hold, which are reused first."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decoding.caches import PageAllocator, prefix_keys

PAGE = 4


def test_keys_stand_for_everything_before():
    """A page's key depends on all tokens up to its end, and on as many behind it as are asked for."""
    text = np.random.default_rng(0).integers(0, 30, 20).tolist()
    for lookahead in (0, 1):
        keys = prefix_keys(text, PAGE, lookahead)
        assert len(keys) == (20 - lookahead) // PAGE and len(set(keys)) == len(keys)
        for place in range(20):
            other = list(text)
            other[place] += 1
            same = [a == b for a, b in zip(keys, prefix_keys(other, PAGE, lookahead), strict=True)]
            assert same == [(i + 1) * PAGE + lookahead <= place for i in range(len(keys))]
    # Neither the end of a text nor the size of its numbers runs two keys together.
    assert prefix_keys([1, 2], 1, 0) != prefix_keys([1 << 32, 2], 1, 0) and prefix_keys([], PAGE, 1) == []


class Model:
    """What the pages must do, told by an honest book: every held page's users, and what every filed page holds."""

    def __init__(self, pages: int):
        self.allocator, self.pages = PageAllocator(pages), pages
        self.held: list[tuple[list[int], tuple[int, ...], int]] = []  # pages, prompt (a page a token), shared pages
        self.content: dict[int, tuple[int, ...]] = {}  # page -> prefix written into it

    def start(self, prompt: tuple[int, ...], more: int) -> None:
        keys = [prompt[: i + 1] for i in range(len(prompt))]
        shared = self.allocator.match(keys)
        assert all(self.content[page] == key for page, key in zip(shared, keys, strict=False))
        free_before = self.allocator.available
        pages = self.allocator.take(len(prompt) + more, shared)
        in_use = {page for pages_, *_ in self.held for page in pages_}
        fits = len(prompt) + more - len(set(shared)) <= self.pages - len(in_use | set(shared))
        assert (pages is not None) == fits
        if pages is None:
            assert self.allocator.available == free_before
            return
        assert pages[: len(shared)] == shared and len(set(pages)) == len(pages) == len(prompt) + more
        fresh = pages[len(shared) :]
        assert not in_use & set(fresh)
        self.content.update(zip(pages, keys, strict=False))
        for page in pages[len(prompt) :]:
            self.content[page] = ()
        self.held.append((pages, prompt, len(shared)))

    def publish(self, index: int) -> None:
        pages, prompt, _ = self.held[index % len(self.held)]
        self.allocator.publish([prompt[: i + 1] for i in range(len(prompt))], pages[: len(prompt)])

    def end(self, index: int) -> None:
        self.allocator.give(self.held.pop(index % len(self.held))[0])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "publish", "end"]), st.integers(0, 5),
            st.lists(st.integers(0, 1), max_size=4).map(tuple), st.integers(1, 3),
        ),
        max_size=40,
    )
)  # fmt: skip
def test_pages_are_never_confused(steps):
    """No page is held twice but shared ones, and a filed page still holds the rows that it is filed under."""
    model = Model(10)
    for step, index, prompt, more in steps:
        if step == "start":
            model.start(prompt, more)
        elif model.held:
            getattr(model, step)(index)
        in_use = {page for pages, *_ in model.held for page in pages}
        assert model.allocator.available == 10 - len(in_use)
    while model.held:
        model.end(0)
    assert sorted(model.allocator.take(10)) == list(range(10)) and model.allocator.match([(0,), (1,)]) == []


def test_filed_pages_are_reused_last_and_from_their_end():
    allocator = PageAllocator(8)
    old, new = [("old", i) for i in range(3)], [("new", i) for i in range(3)]
    for keys in (old, new):
        pages = allocator.take(3)
        allocator.publish(keys, pages)
        allocator.give(pages)
    assert allocator.available == 8
    allocator.take(2)  # the two that were never filed
    assert (len(allocator.match(old)), len(allocator.match(new))) == (3, 3)
    for left in (2, 1, 0):
        allocator.take(1)
        assert (len(allocator.match(old)), len(allocator.match(new))) == (left, 3)
    held = allocator.take(3, allocator.match(new))
    assert allocator.take(1) is None and held == allocator.match(new)


def test_forgotten_pages_are_free_once():
    """Pages of a prefix that nobody holds are not handed out twice when their filing is forgotten."""
    pages = PageAllocator(4)
    held = pages.take(2)
    pages.publish(["a", "b"], held)
    pages.give(held)
    pages.forget()
    assert pages.available == 4 and pages.match(["a"]) == []
    assert sorted(pages.take(4)) == [0, 1, 2, 3] and pages.take(1) is None
