"""Text to token ids and back, and chat templates, with `tokenizers` and `jinja2` alone.

A tokenizer comes from a Hugging Face directory or from the fields of a GGUF file. `StreamDecoder` turns ids
into text as they arrive.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from dspark_jax.errors import UserError
from dspark_jax.interop.chat_template import take_marks, template_environment

# Tokens whose ids matter to decoding; transformers makes them special even where tokenizer.json does not.
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# The split pattern published in the tokenizer.json of Llama 3 and Qwen: they differ in how digits are grouped.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT = (
    _CONTRACTIONS
    + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By tokenizer.ggml.pre; smollm has no pattern of its own.
_SPLITS = {"llama-bpe": _SPLIT.format(digits="{1,3}"), "qwen2": _SPLIT.format(digits=""), "smollm": None}

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


class Tokenizer:
    """A trained tokenizer with its special tokens and chat template.

    Args:
        backend: The `tokenizers` object; its truncation and padding are switched off.
        special_texts: Texts of named special tokens, {"eos_token": "</s>", ...}; templates see them as variables.
        chat_template: Jinja source of the chat template, or None.
        source: The file or directory that error messages name.

    Raises:
        UserError: A bos, eos, pad or unk token is not in the vocabulary.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_texts: Mapping[str, str], chat_template: str | None, source: str
    ) -> None:
        # tokenizer.json may carry the limits of someone's training run, which would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_texts = dict(special_texts)
        self.chat_template = chat_template
        self.source = source
        self._mark_named_tokens()
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        # The largest id counts: a vocabulary with holes has fewer tokens than ids.
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer | None:
        """Reads tokenizer.json and its companions from a Hugging Face model directory.

        The chat template comes from chat_template.jinja, tokenizer_config.json or chat_template.json, the first
        that has one. Generation settings are not read here.

        Returns:
            The tokenizer, or None where the directory holds no tokenizer.json.

        Raises:
            UserError: A file is damaged; the message names it.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception for every kind of damage
            raise UserError(f"{file}: not a readable tokenizer file ({error}); fetch it again") from error
        config = _read_json(path / "tokenizer_config.json")
        texts = {**_token_texts(_read_json(path / "special_tokens_map.json")), **_token_texts(config)}
        return cls(backend, texts, _directory_template(path, config), str(path))

    @classmethod
    def from_gguf_fields(
        cls,
        *,
        tokens: Sequence[str],
        merges: Sequence[str],
        token_types: Sequence[int],
        model: str,
        pre: str,
        token_ids: Mapping[str, int | None],
        add_bos: bool,
        chat_template: str | None,
        source: str,
    ) -> Tokenizer:
        """Builds a byte-level BPE tokenizer from the `tokenizer.ggml.*` fields of a GGUF file.

        Args:
            tokens: Text of each id; ordinary tokens are spelled in GPT-2's byte alphabet.
            merges: "left right" pairs, the best first.
            token_types: GGUF type of each token; control and user-defined ones are matched in text before BPE,
                and unused ones (padding of the embedding table) are left out.
            model: tokenizer.ggml.model; only "gpt2" is known.
            pre: tokenizer.ggml.pre, the name of the pre-tokenizer.
            token_ids: Ids by name: "bos_token", "eos_token", "pad_token", "unk_token".
            add_bos: Whether `encode(..., add_special_tokens=True)` starts with the bos token.
            chat_template: Jinja source, or None.
            source: The file that error messages name.

        Raises:
            UserError: An unknown model or pre-tokenizer, or damaged vocabulary, merges or ids.
        """
        if model != "gpt2":
            raise UserError(f"{source}: tokenizer model {model!r} is not supported (known: gpt2); use another file")
        named = {name: i for name, i in token_ids.items() if i is not None}
        if len(token_types) != len(tokens) or any(i >= len(tokens) for i in named.values()):
            raise UserError(f"{source}: token types or special ids do not fit {len(tokens)} tokens; convert it again")
        backend = _byte_level_backend(tokens, merges, token_types, pre, source)
        texts = {name: tokens[i] for name, i in named.items()}
        if add_bos and "bos_token" in texts:
            backend.post_processor = processors.TemplateProcessing(
                single=[texts["bos_token"], "$A"], special_tokens=[(texts["bos_token"], named["bos_token"])]
            )
        return cls(backend, texts, chat_template, source)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids, bytes not in the vocabulary are lost."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, with no clean-up of spaces; ids outside the vocabulary are dropped."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled `text`, or None."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int) -> str | None:
        """Spelling of a token in the vocabulary (byte alphabet included), or None."""
        return self._backend.id_to_token(int(token_id))

    @property
    def is_byte_level(self) -> bool:
        """Whether a text is exactly the bytes of its tokens, one after the other."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    @cached_property
    def template_hash(self) -> str | None:
        """First 16 hex digits of the chat template's SHA-256, or None without one."""
        if self.chat_template is None:
            return None
        return hashlib.sha256(self.chat_template.encode()).hexdigest()[:16]

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """Chat messages as the text that the model was trained on.

        Args:
            messages: [{"role": ..., "content": ...}, ...].
            add_generation_prompt: Ends the text with the header of the assistant's turn.
            **kwargs: Further template variables, as `enable_thinking=False`.

        Raises:
            UserError: There is no chat template, or it fails or refuses these messages.
        """
        if self.chat_template is None:
            raise UserError(f"{self.source}: no chat template, so chat messages cannot be used; give text or token ids")
        return self._rendered(messages, add_generation_prompt, kwargs)

    def generation_spans(self, messages: list[dict[str, str]], **kwargs: Any) -> list[tuple[int, int]]:
        """Where `render(messages, False, **kwargs)` has the bodies of `{% generation %}`: (start, end) characters.

        Empty where the template marks nothing. Raises `UserError` as `render` does, and where a template works on
        marked text so that its place is lost.
        """
        if self.chat_template is None or "endgeneration" not in self.chat_template:
            return []
        text, spans = take_marks(self._rendered(messages, False, kwargs, marked=True))
        if text != self.render(messages, add_generation_prompt=False, **kwargs):
            raise UserError(f"{self.source}: the generation spans of the chat template cannot be followed; mend it")
        return spans

    def _rendered(
        self, messages: list[dict[str, str]], opens_answer: bool, given: Mapping[str, Any], marked: bool = False
    ) -> str:
        # Templates test `tools is not none`, which an undefined name would pass.
        variables = {"tools": None, "documents": None, **self._special_texts, **given}
        try:
            template = self._marked_template if marked else self._template
            return template.render(messages=messages, add_generation_prompt=opens_answer, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise UserError(f"{self.source}: the chat template failed ({error}); check the messages") from error

    def chat_ids(self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of rendered chat messages; raises `UserError` as `render` does."""
        # The template writes the bos token itself where the model wants one.
        return self.encode(self.render(messages, add_generation_prompt, **kwargs))

    @cached_property
    def _template(self) -> jinja2.Template:
        return template_environment().from_string(self.chat_template)

    @cached_property
    def _marked_template(self) -> jinja2.Template:
        return template_environment(marked=True).from_string(self.chat_template)

    def _mark_named_tokens(self) -> None:
        """Makes bos, eos, pad and unk special, so that they are matched in text and skipped in decoding."""
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        for name in _NAMED_TOKENS:
            text = self._special_texts.get(name)
            if text is None or text in special:
                continue
            # Adding an unknown text would give it an id that the model has no embedding for.
            if self._backend.token_to_id(text) is None:
                raise UserError(f"{self.source}: {name} {text!r} is not in the vocabulary; correct its name")
            self._backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])

    def _named_id(self, name: str) -> int | None:
        text = self._special_texts.get(name)
        return None if text is None else self._backend.token_to_id(text)


class StreamDecoder:
    """Turns ids into text as they arrive; all deltas together equal `tokenizer.decode(all ids)`.

    A delta never holds part of a character. Work per push is that of the new ids plus the few still undecided.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the last id whose text is out: decoders treat a text's first token apart
        self._undecided: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Takes new ids and returns the text that they settle, perhaps ""."""
        tokenizer = self._tokenizer
        ids = [int(i) for i in ids]
        known = [i for i in ids if i not in tokenizer.special_ids and tokenizer.token_text(i) is not None]
        if tokenizer.is_byte_level:
            # Python and Rust replace malformed UTF-8 by the same rule, so this equals decoding all at once.
            return self._utf8.decode(b"".join(_piece_bytes(tokenizer.token_text(i)) for i in known))
        self._undecided += known
        return self._settle(final=False)

    @property
    def pending(self) -> bool:
        """True while the last id ended inside a character."""
        return bool(self._undecided) or bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """Ends the stream: returns what is left, with U+FFFD for an unfinished character."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._settle(final=True)

    def _settle(self, final: bool) -> str:
        """Text of the undecided ids, for decoders that are not byte level (SentencePiece and others)."""
        if not self._undecided:
            return ""
        decode = self._tokenizer.decode
        text = decode(self._context + self._undecided)
        # A run of byte tokens is judged as a whole: one bad byte turns all of its characters into U+FFFD.
        open_run = re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", self._tokenizer.token_text(self._undecided[-1]))
        if not final and (open_run or text.endswith("\ufffd")):
            return ""
        delta = text[len(decode(self._context)) :]
        self._context, self._undecided = self._undecided[-1:], []
        return delta


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    """Bytes that a byte-level decoder gives for a token's spelling."""
    try:
        return bytes(_BYTE_OF[char] for char in piece)
    except KeyError:  # an added token is spelled as plain text
        return piece.encode()


def _byte_level_backend(
    tokens: Sequence[str], merges: Sequence[str], token_types: Sequence[int], pre: str, source: str
) -> tokenizers.Tokenizer:
    """The `tokenizers` object of a GGUF vocabulary; raises `UserError` for an unknown `pre` or bad merges."""
    pre_tokenizer = _pre_tokenizer(pre, source)
    vocab = {text: i for i, text in enumerate(tokens) if token_types[i] != _UNUSED}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        # Llama 3 takes a word that is a token as it is, even where no merges lead to it.
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # tokenizers raises bare Exception for a merge of unknown tokens
        raise UserError(f"{source}: tokenizer.ggml.merges do not fit the tokens ({error}); convert it again") from error
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(text, special=kind == _CONTROL, normalized=False)
        for text, kind in zip(tokens, token_types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend


def _pre_tokenizer(pre: str, source: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that a GGUF file names; raises `UserError` for an unknown one."""
    if pre not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise UserError(f"{source}: pre-tokenizer {pre!r} is not supported (known: {known}); use another file")
    pattern = _SPLITS[pre]
    if pattern is None:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from `file`, {} where there is no such file; raises `UserError` for a damaged one."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # bad UTF-8 and bad JSON alike
        raise UserError(f"{file}: not readable as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds no JSON object; fetch it again")
    return content


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the entries named "..._token", which are strings or {"content": text}."""
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _directory_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template of a directory, or None; raises `UserError` for a damaged file."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise UserError(f"{file}: not UTF-8 text ({error}); fetch it again") from error
    template = config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UserError(f"{path}: chat_template is neither text nor a list of named templates; correct it")
    return template
