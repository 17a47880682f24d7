"""Loss masks of chats, against the reference's rule (spec 9.3) and transformers'."""

import re

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dspark_jax.data.batches import Batches, draft_vocabulary
from dspark_jax.data.masks import chat_tokens, join_turns, masked_row, turn_marks
from dspark_jax.errors import UserError
from dspark_jax.interop.tokenizer import Tokenizer

# The published templates' behaviour in short: Qwen3 writes an empty block of thoughts into the last answer alone.
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<bos>", "</s>"]
THOUGHT = "<|channel>thought\n<channel|>"


def tokenizer(template):
    """Byte-level, with a merge that reaches over the end of a header."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "ĊĊ", "th"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, {"eos_token": "</s>"}, template, "test")


def chat(*texts, system="be brief", prefix=""):
    """System, then user and assistant in turn."""
    turns = [("user", text) if i % 2 == 0 else ("assistant", prefix + text) for i, text in enumerate(texts)]
    return [{"role": role, "content": text} for role, text in [("system", system), *turns]]


def reference_mask(tok, messages, header, end, skipped=""):
    """The rule of 9.3: from behind each header, lazily, through the end of turn, or to the end of the text."""
    text = tok.render(messages, add_generation_prompt=False)
    mask = [0] * len(tok.encode(text))
    for match in re.finditer(f"{re.escape(header)}(.*?)(?:{re.escape(end)}|$)", text, re.DOTALL):
        start = match.start(1)
        if text.startswith(skipped, start):
            start += len(skipped)
        first, last = (len(tok.encode(text[:at])) for at in (start, match.end()))
        mask[first:last] = [1] * (last - first)
    return mask


def mask_of(tok, messages, **options):
    ids, spans = chat_tokens(tok, messages, **options)
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    return mask


CHATS = [
    chat("hi", "hello the\n\nthing"),
    chat("one", "1", "two", "it is 2", "three", "é 3"),
    chat("begins with a line", "\nanswer", "next", "\n\nmore"),
    chat("last is a question", "ja", "and?"),
]


@pytest.mark.parametrize("messages", CHATS)
def test_masks_are_the_references_for_qwen(messages):
    tok = tokenizer(QWEN)
    assert mask_of(tok, messages) == reference_mask(tok, messages, "<|im_start|>assistant\n", "<|im_end|>\n")


@pytest.mark.parametrize("messages", [[*chat(*texts, prefix=THOUGHT)[1:]] for texts in (["a", "b"], ["a", "b"] * 3)])
def test_masks_are_the_references_for_gemma_which_skips_what_it_prepends(messages):
    tok = tokenizer(GEMMA)
    expected = reference_mask(tok, messages, "<|turn>model\n", "<turn|>\n", THOUGHT)
    assert mask_of(tok, messages) == expected
    bare = [{**message, "content": message["content"].removeprefix(THOUGHT)} for message in messages]
    assert chat_tokens(tok, bare) == chat_tokens(tok, messages)
    thinking = mask_of(tok, bare, enable_thinking=True)
    assert thinking == reference_mask(tok, bare, "<|turn>model\n", "<turn|>\n")


def test_what_the_template_writes_for_the_model_is_not_learnt():
    tok, messages = tokenizer(QWEN), chat("q", "the answer")
    for variables, learnt in (({}, "<think>\n\n</think>\n\nthe answer"), ({"enable_thinking": False}, "the answer")):
        ids, ((start, end),) = chat_tokens(tok, messages, **variables)
        assert tok.decode(ids[start:end], skip_special_tokens=False) == learnt + "<|im_end|>\n"


@pytest.mark.parametrize("messages", CHATS)
def test_generation_spans_are_those_of_transformers(messages):
    from transformers import PreTrainedTokenizerFast

    tok = tokenizer(MARKED)
    other = PreTrainedTokenizerFast(tokenizer_object=tok._backend, chat_template=MARKED)
    found = other.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert mask_of(tok, messages) == found["assistant_masks"]


def test_a_template_that_works_on_its_marked_text_is_refused():
    tok = tokenizer(
        "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}{{ x | trim }}"
    )
    with pytest.raises(UserError, match="generation spans"):
        tok.generation_spans(chat("q"))


def test_an_answer_that_was_cut_does_not_learn_the_templates_end():
    for template, end in ((QWEN, "<|im_end|>\n"), (MARKED, "</s>")):
        tok = tokenizer(template)
        ids, spans = chat_tokens(tok, chat("q", "cut", "r", "whole"), cut=[0])
        texts = [tok.decode(ids[start:stop], skip_special_tokens=False) for start, stop in spans]
        assert texts[0] == "cut" and texts[1].endswith("whole" + end)


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }}\n{% endfor %}", "nothing"])
def test_a_template_without_any_marks_is_refused(template):
    with pytest.raises(UserError, match="neither generation spans nor headers"):
        chat_tokens(tokenizer(template), chat("q", "a"))


def test_the_marks_of_a_turn():
    marks = turn_marks(tokenizer(GEMMA), {})
    assert (marks.header, marks.given, marks.end) == ("<|turn>model\n", THOUGHT, "<turn|>\n")


def test_turns_are_joined_where_the_tokens_continue_and_learnt_once():
    one = {"prompt_ids": [1, 2], "answer_ids": [3, 9]}
    two = {"prompt_ids": [1, 2, 3, 9, 4], "answer_ids": [5, 9]}
    other = {"prompt_ids": [1, 2, 7, 7, 4], "answer_ids": [5, 9]}
    (joined,) = join_turns([[one, two]])
    whole = {"prompt_ids": [1, 2], "answer_ids": [3, 9, 4, 5, 9]}
    assert joined == {**whole, "loss_mask": [0, 0, 1, 1, 0, 1, 1]}
    assert join_turns([[one, other], [one]]) == [one, other, one]


def test_every_answer_of_a_row_is_learnt_and_counted():
    row = masked_row([1] * 23, [(1, 2), (5, 9), (12, 23)])
    assert (row["prompt_ids"], len(row["answer_ids"])) == ([1], 22)
    batch = Batches([row, {"prompt_ids": [1], "answer_ids": [2] * 9}], 2, 16, seed=0)(0)
    masks = {int(i): mask.nonzero()[0].tolist() for i, mask in zip(batch.row_B, batch.loss_mask_BxS, strict=True)}
    assert masks == {0: [1, 5, 6, 7, 8, 12, 13, 14, 15], 1: list(range(1, 10))}
    rows = [{"prompt_ids": [7] * 9, "answer_ids": [5, 6, 6], "loss_mask": [0] * 9 + [1, 0, 0]}]
    assert draft_vocabulary(rows, 1, always=(), vocab_size=9).tolist() == [5]
