"""What PyTorch's speculators library makes of our exports: it loads them whole, and its draft logits are ours.

`make test-interop` installs the library (it wants older versions of others) and runs these tests; elsewhere they skip.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.interop.drafter_io import Drafter, abstract_drafter, borrow, load_drafter
from dspark_jax.interop.export import export_drafter
from dspark_jax.interop.target_io import Target, load_target
from dspark_jax.models.config import DrafterConfig, Eagle3Config
from dspark_jax.training.anchors import make_blocks
from dspark_jax.training.step import draft_blocks

speculators = pytest.importorskip("speculators", reason="needs PyTorch's speculators: make test-interop")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ANCHORS = np.array([3, 9, 21, 33])
NO_HEAD = {"markov_rank": 0, "confidence": False, "confidence_with_markov": False}


@pytest.fixture(scope="module")
def target(golden_target) -> Target:
    return load_target(golden_target, dtype="float32")


@pytest.fixture(scope="module")
def base(golden, target) -> DrafterConfig:
    return load_drafter(golden / "dspark_vanilla", target).config


def random_drafter(config: DrafterConfig | Eagle3Config, target: Target) -> Drafter:
    """Random parameters, of a size that lets every part matter."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: jnp.asarray(0.2 * rng.standard_normal(a.shape) + (a.ndim == 1), jnp.float32), abstract_drafter(config)
    )
    ids = np.sort(rng.permutation(config.decoder.vocab_size)[: config.draft_vocab_size]) if config.reduced else None
    return Drafter(config, params, borrow(target, ids))


def load_strictly(path: Path):
    """The exported model with its target's tables. A tensor that is missing, strange or of another shape fails."""
    config = speculators.SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # flex attention compiles for minutes
    cls = speculators.SpeculatorModel.registered_model_class_from_config(config)
    # transformers' own loader: the library's wrappers drop its report.
    load = transformers.PreTrainedModel.from_pretrained.__func__
    model, report = load(cls, path, config=config, output_loading_info=True)
    assert not any(report.values()), report
    model.load_verifier_weights()
    return model.eval()


def windowed(config: DrafterConfig, **changes) -> DrafterConfig:
    kind = dataclasses.replace(config.decoder.attention[0], window=4, window_from_anchor=True, **changes)
    return dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, attention=(kind,)))


def variants(base: DrafterConfig) -> dict[str, DrafterConfig]:
    made = lambda **changes: dataclasses.replace(base, **changes)  # noqa: E731
    return {
        "vanilla": base,
        "gated": made(head_type="gated", confidence_with_markov=False),
        "rnn": made(head_type="rnn"),
        "rnn, the anchor conditions": made(head_type="rnn", logits_start=1),
        "no heads": made(**NO_HEAD),
        "reduced": made(draft_vocab_size=100),
        "DFlash": made(**NO_HEAD, logits_start=1),
        "DFlash, reduced": made(**NO_HEAD, logits_start=1, draft_vocab_size=100),
        "windows": windowed(base),
        "causal windows": windowed(base, causal=True),
    }


VARIANTS = ("vanilla", "gated", "rnn", "rnn, the anchor conditions", "no heads", "reduced", "DFlash",
            "DFlash, reduced", "windows", "causal windows")  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_block_drafters_compute_the_same_there(tmp_path, monkeypatch, target, base, name):
    drafter = random_drafter(variants(base)[name], target)
    c, rng = drafter.config, np.random.default_rng(1)
    tokens, mask = rng.integers(0, 256, (1, 40)), np.ones((1, 40), np.float32)
    taps = rng.standard_normal((1, 40, c.tap_width)).astype(np.float32)
    kept = np.ones((1, len(ANCHORS)), bool)
    blocks = make_blocks(jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(ANCHORS)[None], kept, c.num_drafts)
    ours, confidence = draft_blocks(drafter.module, drafter.params, drafter.borrowed, jnp.asarray(taps), blocks)

    export_drafter(tmp_path / "export", drafter, target, "speculators", dtype="float32")
    theirs, their_confidence = library_logits(monkeypatch, load_strictly(tmp_path / "export"), tokens, taps, mask)

    def predicting(array):
        return array.reshape(len(ANCHORS), c.block_size, *array.shape[2:])[:, c.logits_start :]

    np.testing.assert_allclose(ours[0], predicting(theirs), atol=2e-4 * np.abs(ours).max())
    if c.confidence:
        np.testing.assert_allclose(confidence[0], predicting(their_confidence), atol=2e-4 * np.abs(confidence).max())


def library_logits(monkeypatch, model, tokens, taps, mask):
    """Draft and confidence logits of the library's training forward at `ANCHORS`; it draws its anchors otherwise."""
    seen = {}

    def record(logits, targets, *rest, **options):
        seen["logits"], seen["confidence"] = logits, rest[0]
        return torch.zeros(()), {}

    module = __import__(type(model).__module__, fromlist=["forward"])
    monkeypatch.setattr(module, "compute_metrics", record)
    anchors = torch.as_tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
    monkeypatch.setattr("speculators.models.dflash.core.select_anchors", lambda *args: anchors)
    with torch.no_grad():
        model(
            hidden_states=torch.as_tensor(taps), input_ids=torch.as_tensor(tokens), loss_mask=torch.as_tensor(mask),
            verifier_last_hidden_states=torch.zeros(1, tokens.shape[1], model.hidden_size),
            document_ids=torch.zeros(1, tokens.shape[1], dtype=torch.long), max_anchors=len(ANCHORS),
        )  # fmt: skip
    return [seen[name].numpy() if seen[name] is not None else None for name in ("logits", "confidence")]


def test_eagle3_computes_the_references_logits_there(tmp_path, golden, target):
    """Every step of the training-time test, against what DeepSpec computed."""
    drafter = load_drafter(golden / "eagle3", target)
    export_drafter(tmp_path / "export", drafter, target, "speculators", dtype="float32")
    model, arrays, steps = load_strictly(tmp_path / "export"), load_file(golden / "eagle3_train.safetensors"), []
    length = int(arrays["loss_mask"][0].nonzero()[0][-1]) + 1
    model.lm_head.register_forward_hook(lambda module, inputs, output: steps.append(output.numpy()))
    with torch.no_grad():
        model(
            hidden_states=torch.as_tensor(arrays["taps"][:1]),
            # Row i is fed token i + 1.
            input_ids=torch.as_tensor(np.roll(arrays["input_ids"][:1], -1, axis=1).astype(np.int64)),
            document_ids=torch.zeros(1, 64, dtype=torch.long), ttt_steps=5,
        )  # fmt: skip
    for step, logits in enumerate(steps):
        expected = arrays[f"draft_logits.{step}"][:1]
        rows = slice(0, length - 1 - step)  # later ones are fed padding
        np.testing.assert_allclose(logits[:, rows], expected[:, rows], atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": False, "tap_layers": (1, 2, 3)}, {"draft_vocab_size": 100}, {"fc_norm": True, "feed_normed": True},
        {"norm_before_fc": True, "norm_before_residual": True},
    ],
    ids=["Llama's layer, 3 taps", "reduced", "norms of taps", "norm before fc"],
)  # fmt: skip
def test_eagle3_variants_load_there(tmp_path, golden, target, changes):
    config = load_drafter(golden / "eagle3", target).config
    if "qk_norm" in changes:
        changes = {**changes, "decoder": dataclasses.replace(config.decoder, qk_norm=False)}
    config = dataclasses.replace(config, **{k: v for k, v in changes.items() if k != "qk_norm"})
    export_drafter(tmp_path / "export", random_drafter(config, target), target, "speculators")
    load_strictly(tmp_path / "export")


def test_dflash2_loads_there(tmp_path, target, base):
    selector = {"head_type": "selector", "selector_top_k": 4, "conv_taps": 2, "conv_group": 16}
    config = dataclasses.replace(base, **{**NO_HEAD, "markov_rank": 16, **selector}, logits_start=1)
    export_drafter(tmp_path / "export", random_drafter(config, target), target, "speculators")
    load_strictly(tmp_path / "export")


def test_the_librarys_own_way_of_loading(tmp_path, target, base):
    export_drafter(tmp_path / "export", random_drafter(base, target), target, "speculators")
    model = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "export"))
    method = model.config.speculators_config.proposal_methods[0]
    assert (method.speculative_tokens, model.config.aux_hidden_state_layer_ids) == (5, [0, 2, 3, 5])
    assert model.config.sample_from_anchor and model.config.sliding_window_non_causal
