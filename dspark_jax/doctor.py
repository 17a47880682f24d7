"""What is installed, what JAX sees, and whether a config's target and drafter can be used and fit together.

    python -m dspark_jax doctor [--config=configs/smollm2_135m.py] [--json=FILE]

Every check is a line: ok, warning or problem. The exit code is 1 when there is a problem.
"""

import collections
import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from dspark_jax.door import define_json, parse_config
from dspark_jax.errors import UserError

if TYPE_CHECKING:  # JAX is imported by the checks that need it: the first ones must work without it
    from dspark_jax.interop.drafter_io import Drafter
    from dspark_jax.interop.target_io import Target

OLDEST_PYTHON = (3, 11)
REQUIRED = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tokenizers", "gguf", "safetensors", "huggingface_hub",
    "jinja2", "ml_collections", "absl-py", "rich", "numpy",
)  # fmt: skip
OPTIONAL = {"transformers": "the comparison in bench", "torch": "the comparison in bench"}


@dataclasses.dataclass(frozen=True)
class Check:
    """One line. `status`: "ok", "warning" (it works, but look) or "problem"."""

    area: str
    name: str
    status: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<8} {self.area:<9} {self.name:<17} {self.text}"


def main(argv: list[str]) -> None:
    """Prints the checks as they are made; exits with 1 when one of them is a problem."""
    config, given = parse_config(argv, define_json, required=False)
    checks = []
    for check in run_checks(config):
        print(check, flush=True)
        checks.append(check)
    problems, warnings = (sum(check.status == status for check in checks) for status in ("problem", "warning"))
    print(f"\nchecks: {len(checks)}, problems: {problems}, warnings: {warnings}")
    if given.json:
        from dspark_jax.scheduling.json_files import write_json

        rows = [dataclasses.asdict(check) for check in checks]
        write_json(given.json, {"problems": problems, "warnings": warnings, "checks": rows})
    if problems:
        sys.exit(1)


def run_checks(config: ConfigDict | None) -> Iterator[Check]:
    """All checks in order; those of models only with a config."""
    yield from installed()
    yield from devices()
    if config is None:
        return
    target = yield from check_target(config)
    yield from check_drafter(config, target)


def installed() -> Iterator[Check]:
    """Python and the packages, by version."""
    old = sys.version_info < OLDEST_PYTHON
    wanted = f" (at least {'.'.join(map(str, OLDEST_PYTHON))} is needed)" if old else ""
    yield Check("installed", "python", "problem" if old else "ok", platform.python_version() + wanted)
    for name in (*REQUIRED, *OPTIONAL):
        try:
            yield Check("installed", name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if name in OPTIONAL:
                yield Check("installed", name, "ok", f"not installed; only {OPTIONAL[name]} needs it")
            else:
                yield Check("installed", name, "problem", f"missing: pip install {name}")


def devices() -> Iterator[Check]:
    """What JAX sees: a line per kind of device."""
    try:
        import jax

        from dspark_jax.evaluation.report import environment

        found = collections.Counter((d.platform, d.device_kind) for d in jax.devices())
        from pallas_kernels.backends import choose

        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        written = {"fused_verify": ("tpu", "gpu"), "distribution_loss": ("tpu", "gpu")}
        kernels = {name: choose("auto", written=platforms) for name, platforms in written.items()}
        cpu = environment()["device"]
    except Exception as error:  # a backend that does not start, a package that is missing
        yield Check("devices", "jax", "problem", _reason(error))
        return
    for (name, kind), count in found.items():
        size = f", {memory / 2**30:.1f} GiB each" if memory else ""
        what = f"{cpu}, {os.cpu_count()} cores" if name == "cpu" else kind
        yield Check("devices", name, "ok", f"{count} × {what}{size}")
    for name, (taken, why) in kernels.items():
        yield Check("devices", name, "ok", f"by {taken}: {why}")


# ----------------------------------------------------------------------------------------------------------- models


def _attempt(area: str, load: Callable[[], Any]) -> Generator[Check, None, Any]:
    """What `load` returns; None after a problem line when it fails."""
    try:
        return load()
    except Exception as error:  # a damaged file can make any library fail: the reason is the finding
        yield Check(area, "load", "problem", _reason(error))
        return None


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def check_target(config: ConfigDict) -> "Generator[Check, None, Target | None]":
    """Loads the config's target and describes it. Returns it, or None."""
    path = config.target.path
    if not path:
        yield Check("target", "file", "ok", "the config names none")
        return None

    def load() -> "Target":
        from dspark_jax.interop.target_io import load_target
        from dspark_jax.parallel import parse_mesh

        return load_target(path, dtype=config.target.dtype or None, mesh=parse_mesh(config.mesh))

    target = yield from _attempt("target", load)
    if target is not None:
        yield Check("target", "file", "ok", f"{path}, {_file_size(path)}")
        yield from _target_sizes(target)
        yield from _tokenizer(target)
        yield _end_tokens(target)
    return target


def _file_size(source: str) -> str:
    """Size of the weights on disk."""
    from dspark_jax.interop.checkpoint_files import locate

    path = locate(source)
    files = path.glob("*.safetensors") if path.is_dir() else [Path(path)]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB"


def _count(params: Any) -> str:
    import jax

    leaves = jax.tree.leaves(params)
    total, size = sum(a.size for a in leaves), sum(a.nbytes for a in leaves)
    return f"{total / 1e6:.2f} M parameters, {size / 1e6:.1f} MB in {leaves[0].dtype}"


def _target_sizes(target: "Target") -> Iterator[Check]:
    c = target.config
    kinds = [f"{kind.num_kv_heads} KV heads of {kind.head_dim}" for kind in c.attention]
    heads = f"{c.num_heads} heads and {' or '.join(dict.fromkeys(kinds))}"
    sizes = f"{c.family}, {c.num_layers} layers, width {c.hidden_size}, {heads}, MLP {c.intermediate_size}"
    yield Check("target", "sizes", "ok", f"{sizes}, vocabulary {c.vocab_size}, context {c.max_length}")
    yield Check("target", "weights", "ok", _count(target.params))
    yield Check("target", "fingerprint", "ok", target.fingerprint)


def _tokenizer(target: "Target") -> Iterator[Check]:
    tokenizer, vocab = target.tokenizer, target.config.vocab_size
    if tokenizer is None:
        yield Check("target", "tokenizer", "warning", "none beside the weights: prompts must be token ids")
        return
    fits = tokenizer.vocab_size <= vocab
    text = f"{tokenizer.vocab_size} tokens" + ("" if fits else f", but the embedding has {vocab} rows")
    yield Check("target", "tokenizer", "ok" if fits else "problem", text)
    if tokenizer.chat_template is None:
        yield Check("target", "chat template", "warning", "none: prompts go in as plain text")
        return
    try:
        length = len(_chat_ids(target))
    except UserError as error:
        yield Check("target", "chat template", "problem", str(error))
        return
    yield Check("target", "chat template", "ok", f"{tokenizer.template_hash} ({length} tokens for a short chat)")


def _chat_ids(target: "Target") -> list[int]:
    """A short chat as the model sees it: it shows which tokens the template itself uses."""
    turns = [("user", "Hello"), ("assistant", "Hello!"), ("user", "Bye")]
    return target.tokenizer.chat_ids([{"role": role, "content": text} for role, text in turns])


def _end_tokens(target: "Target") -> Check:
    ids, tokenizer = target.config.eos_token_ids, target.tokenizer
    if not ids:
        return Check("target", "end tokens", "warning", "none: every answer runs to max_tokens")
    named = [f"{i} {tokenizer.token_text(i)!r}" if tokenizer else str(i) for i in ids]
    return Check("target", "end tokens", "ok", ", ".join(named))


def check_drafter(config: ConfigDict, target: "Target | None") -> Iterator[Check]:
    """Loads the config's drafter for the target, which checks that the two fit, and describes it."""
    path = config.serve.drafter
    if not path:
        yield Check("drafter", "file", "ok", "the config names none: plain decoding")
        return
    if target is None:
        yield Check("drafter", "file", "warning", f"{path} is not checked: that takes its target")
        return

    def load() -> "Drafter":
        from dspark_jax.interop.drafter_io import load_drafter

        return load_drafter(path, target)

    drafter = yield from _attempt("drafter", load)
    if drafter is not None and drafter.name == "lookup":
        c = drafter.config
        sizes = f"drafts {c.num_drafts} tokens after n-grams of up to {c.longest}, no weights"
        yield Check("drafter", "lookup", "ok", sizes)
    elif drafter is not None:
        yield Check("drafter", "file", "ok", f"{drafter.name}, {_file_size(drafter.name)}")
        yield from _drafter_sizes(drafter)
        yield _mask_token(drafter, target)
        yield _fingerprint(drafter, target)


def _drafter_sizes(drafter: "Drafter") -> Iterator[Check]:
    """What loading has compared with the target."""
    c = drafter.config
    head = f"{c.head_type} head of rank {c.markov_rank}" if c.markov_rank else "no in-block head"
    sizes = f"{c.decoder.num_layers} layers, width {c.decoder.hidden_size}, block {c.block_size}, {head}"
    yield Check("drafter", "sizes", "ok", f"{sizes}, {'a' if c.confidence else 'no'} confidence head")
    yield Check("drafter", "weights", "ok", _count(drafter.params))
    taps = ", ".join(map(str, c.tap_layers))
    yield Check("drafter", "taps", "ok", f"layers {taps} of the target's {c.num_target_layers} (from 0; -1: embedding)")
    kind = "reduced" if c.reduced else "all"
    yield Check("drafter", "vocabulary", "ok", f"{c.draft_vocab_size} of {c.decoder.vocab_size} tokens ({kind})")


def _mask_token(drafter: "Drafter", target: "Target") -> Check:
    """The mask should be a special token that nothing else uses; loading has refused end and padding tokens."""
    token, tokenizer = drafter.config.mask_token_id, target.tokenizer
    if tokenizer is None:
        return Check("drafter", "mask token", "ok", f"{token}, no end token (without a tokenizer its text is unknown)")
    text = tokenizer.token_text(token)
    name = f"{token} {text!r}" if text is not None else f"{token} (no text)"
    try:
        in_chat = _chat_ids(target) if tokenizer.chat_template else []
    except UserError:
        in_chat = []  # the template is a problem of its own, reported with the target
    if token == tokenizer.bos_token_id or token in in_chat:
        return Check("drafter", "mask token", "warning", f"{name} also marks something in prompts: train with another")
    if text is not None and token not in tokenizer.special_ids:
        return Check("drafter", "mask token", "warning", f"{name} is an ordinary token: it may stand in text")
    return Check("drafter", "mask token", "ok", f"{name}, an unused special token")


def _fingerprint(drafter: "Drafter", target: "Target") -> Check:
    own = drafter.target_fingerprint
    if not own:
        return Check("drafter", "fingerprint", "ok", "its file does not say for which weights it was trained")
    if own != target.fingerprint:
        text = f"trained for target {own}, this one is {target.fingerprint}: exact, but fewer drafts are accepted"
        return Check("drafter", "fingerprint", "warning", text)
    return Check("drafter", "fingerprint", "ok", f"trained for this target ({own})")
