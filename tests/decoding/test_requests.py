"""What cannot be answered is refused by name, alone, and before anything runs."""

import numpy as np
import pytest

from dspark_jax.decoding.requests import prompt_token_ids
from dspark_jax.decoding.sampling import SamplingParams, SlotSampling
from dspark_jax.errors import UserError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "bad",
    [
        *({name: value} for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                                     "frequency_penalty") for value in (NAN, INF, -INF, None, "1", True, [1.0], 1e300)),
        *({name: value} for name in ("top_k", "max_tokens", "min_tokens") for value in (1.5, None, "1", True, -1)),
        *({"temperature": value} for value in (-1, 1e-40, 10**400)),
        *({"repetition_penalty": value} for value in (0, -1.0, 1e-46)),
        *({"seed": value} for value in (1.5, "1", True)), *({"logprobs": value} for value in (-1, 21, 1.5, True)),
        *({"stop": value} for value in (5, [""], ["a", ""], "", [5], {"a": 1})),
        *({"stop_token_ids": value} for value in (3, ["x"], [1.5], [-1], [2**31], "ab")),
        *({"logit_bias": value} for value in ({"x": 1}, [1], {3: INF}, {3: NAN}, {3: 1e300}, {3: 10**400}, {3: "x"})),
        {"min_tokens": 5, "max_tokens": 4}, {"ignore_eos": "no"},
    ],
    ids=lambda bad: str(bad)[:60],
)  # fmt: skip
def test_impossible_parameters(bad):
    with pytest.raises(UserError, match=next(iter(bad))) as error:
        SamplingParams(**bad)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "odd",
    [
        {"top_k": 10**12}, {"seed": -1}, {"seed": 10**40}, {"temperature": 1e-6}, {"temperature": 1e6},
        {"top_p": 1e-30}, {"stop": None}, {"stop_token_ids": range(4)}, {"stop_token_ids": np.arange(3)},
        {"logit_bias": {"3": 1}}, {"logit_bias": None}, {"temperature": 0}, {"temperature": np.float64(0.5)},
        {"max_tokens": 10**12},
    ],
    ids=str,
)  # fmt: skip
def test_odd_but_possible_parameters(odd):
    params = SamplingParams(**odd)
    slot = SlotSampling.of(params, params.seed or 0, params.stop_token_ids, 8)
    assert np.isfinite(slot.warp.temperature) and slot.warp.top_k >= 0 and hash(params) is not None


BAD_PROMPTS = [
    "", "  ", "a\ud800", None, 5, 1.5, [], [1.5], ["a", "b"], [[1]], [None], {"role": "user", "content": "a"}, b"ab",
    [{"role": "user", "content": "a"}], [{"role": "user"}, 3], [-1], [10**30], np.ones((2, 2), int), np.ones(2),
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: repr(prompt)[:40])
def test_impossible_prompts(spelling, prompt):
    with pytest.raises(UserError) as error:
        prompt_token_ids(prompt, spelling, 40)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8)], ids=repr)
def test_token_ids_of_all_kinds(spelling, prompt):
    ids = prompt_token_ids(prompt, spelling, 40)
    assert ids == [1, 2] and all(type(i) is int for i in ids)


def test_refusals_among_good_requests(x64, few_programs, pages_come_back, talk):
    """Each ends with the reason "error" and its own line; the others do not notice."""
    good = SamplingParams(temperature=0.8, seed=3, max_tokens=9, logprobs=1, ignore_eos=True)
    changes = [
        ({"max_tokens": 65}, "max_tokens=65"), ({"stop_token_ids": range(9)}, "9 stop tokens"),
        ({"logit_bias": {46: 1.0}}, r"biases token [46]"),
    ]  # fmt: skip
    impossible = [SamplingParams(**({"logprobs": 1, "seed": 3, "max_tokens": 9} | change)) for change, _ in changes]
    prompts = [[1, 2, 3], *BAD_PROMPTS, [1, 2, 3], *[[1, 2, 3]] * len(changes), [0] * 64, [1, 2, 3]]
    params = [good, *[good] * len(BAD_PROMPTS), good, *impossible, good, good]
    requests = talk.whole.requests(prompts, params)
    events = [(request.index, event.finish_reason) for request, event in talk.whole.run(requests, 3)]
    outs = [request.completion for request in requests]
    fine = {0, len(BAD_PROMPTS) + 1, len(prompts) - 1}
    assert len({tuple(outs[i].token_ids) for i in fine}) == 1 and len(outs[0].token_ids) == 9
    for i, out in enumerate(outs):
        if i not in fine:
            assert out.finish_reason == "error" and out.error and not out.token_ids
            assert events.count((i, "error")) == 1
    for out, (_, words) in zip(outs[len(BAD_PROMPTS) + 2 :], changes, strict=False):
        assert words in out.error
