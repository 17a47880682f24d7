"""In-block heads against PyTorch and plain numpy, for both meanings of the anchor's slot (logits_start)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from dspark_jax.models.config import Attention, DecoderConfig, DrafterConfig, Rope
from dspark_jax.models.drafter import Borrowed, DSpark

VOCAB, SPOKEN, HIDDEN, RANK, GRU, BLOCKS, SIZE = 23, 17, 12, 5, 7, 3, 5


def head_config(head_type: str, logits_start: int, **changes) -> DrafterConfig:
    attention = Attention(num_kv_heads=1, head_dim=4, rope=Rope(10000.0), causal=False)
    decoder = DecoderConfig("qwen3", VOCAB, HIDDEN, 8, 2, (attention,), (0,), qk_norm=True, tied=False)
    sizes = dict(block_size=SIZE, mask_token_id=VOCAB - 1, tap_layers=(0,), num_target_layers=2)
    head = dict(markov_rank=RANK, head_type=head_type, gru_width=GRU, confidence=False, confidence_with_markov=False)
    return DrafterConfig(
        decoder=decoder, draft_vocab_size=SPOKEN, logits_start=logits_start, **(sizes | head | changes)
    )


class Case:
    """A head with random float64 weights, and random hidden states, base logits and previous tokens of its blocks."""

    def __init__(self, config: DrafterConfig, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.config, self.module = config, DSpark(config)
        self.embedding, self.head = rng.standard_normal((VOCAB, HIDDEN)), rng.standard_normal((SPOKEN, HIDDEN))
        self.borrowed = Borrowed(jnp.asarray(self.embedding), jnp.asarray(self.head), jnp.arange(SPOKEN))
        one = jnp.zeros(1, jnp.int32)
        shapes = jax.eval_shape(lambda: self.module.init(jax.random.key(0), jnp.zeros((1, HIDDEN)), one, self.borrowed))
        self.params = jax.tree.map(lambda a: rng.standard_normal(a.shape), shapes["params"])
        self.weights = self.params.get("markov_head")
        self.hidden = rng.standard_normal((BLOCKS, SIZE, HIDDEN))  # of every slot, the anchor's first
        self.base = rng.standard_normal((BLOCKS, config.num_drafts, SPOKEN))
        self.previous = rng.integers(0, VOCAB, (BLOCKS, config.num_drafts))  # the anchor first

    def call(self, *args, method):
        return self.module.apply({"params": self.params}, *args, method=method)

    def logits(self) -> np.ndarray:
        """Teacher-forced, as in training."""
        args = (jnp.asarray(self.hidden), jnp.asarray(self.previous), self.borrowed)
        factor, _ = self.call(*args, method=DSpark.teacher_forced)
        return np.asarray(self.call(jnp.asarray(self.base), factor, method=DSpark.corrected))

    @property
    def predicting(self) -> np.ndarray:
        return self.hidden[:, self.config.logits_start :]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("logits_start", [0, 1])
class TestAgainstIndependentReferences:
    @pytest.mark.parametrize("pure_prefix", [0, 1, 2])
    def test_domino_is_a_gru_over_the_prefix_and_a_small_mlp(self, logits_start, pure_prefix):
        """checkpoint_formats.md section 4, with torch's own GRU."""
        case = Case(head_config("domino", logits_start, pure_prefix=pure_prefix))
        tensor = lambda array: torch.tensor(np.asarray(array))  # noqa: E731
        kernel = lambda name: tensor(case.weights[name]["kernel"]).T  # noqa: E731
        gru = torch.nn.GRU(HIDDEN, GRU, bias=False, batch_first=True, dtype=torch.float64)
        gru.load_state_dict({"weight_ih_l0": kernel("input_gates"), "weight_hh_l0": kernel("state_gates")})
        with torch.no_grad():
            # The state of a draft has read the anchor and all drafts before it.
            state = gru(tensor(case.embedding[case.previous]))[0]
            features = torch.cat([tensor(case.predicting), state], dim=-1)
            factor = torch.nn.functional.silu(torch.nn.functional.linear(features, kernel("down_proj")))
            bias = torch.nn.functional.linear(factor, tensor(case.weights["up_proj"])).numpy()
        bias[:, :pure_prefix] = 0
        np.testing.assert_allclose(case.logits(), case.base + bias, rtol=1e-9, atol=1e-9)

    def test_rnn_runs_from_the_anchors_slot_whether_or_not_it_predicts(self, logits_start):
        """Spec 2, and checkpoint_formats.md 2.3 (b): with logits_start 1, slot 0 and slot 1 both read the anchor."""
        case = Case(head_config("rnn", logits_start))
        w1, w2, joint = case.weights["markov_w1"], case.weights["markov_w2"], case.weights["joint_proj"]
        anchor = case.previous[:, :1]
        before = np.concatenate([anchor, case.previous], axis=1) if logits_start else case.previous
        state, outputs = np.zeros((BLOCKS, RANK)), []
        for slot in range(SIZE):
            z = np.concatenate([state, w1[before[:, slot]], case.hidden[:, slot]], axis=-1)
            gate, candidate, output = np.split(z @ joint["kernel"] + joint["bias"], 3, axis=-1)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
            outputs.append(np.tanh(output) @ w2.T)
        expected = case.base + np.stack(outputs, axis=1)[:, logits_start:]
        np.testing.assert_allclose(case.logits(), expected, rtol=1e-9, atol=1e-9)

    def test_gated_reads_the_slot_that_predicts(self, logits_start):
        case = Case(head_config("gated", logits_start))
        w1, w2, gate = case.weights["markov_w1"], case.weights["markov_w2"], case.weights["gate_proj"]
        e = w1[case.previous]
        g = sigmoid(np.concatenate([case.predicting, e], axis=-1) @ gate["kernel"] + gate["bias"])
        np.testing.assert_allclose(case.logits(), case.base + (g * e) @ w2.T, rtol=1e-9, atol=1e-9)

    def test_selector_walks_over_the_candidates(self, logits_start):
        """checkpoint_formats.md section 6: greedy, each slot scored given the candidate chosen before it."""
        top = 4
        case = Case(head_config("selector", logits_start, selector_top_k=top))
        a, b = case.weights["predecessor"], case.weights["successor"]
        projection = case.weights["hidden_projection"]["kernel"]
        for block in range(BLOCKS):
            previous, state = case.previous[block, 0], ()
            for k in range(case.config.num_drafts):
                h, unary = case.predicting[block, k], case.base[block, k]
                candidates = np.argsort(-unary)[:top]
                scores = unary[candidates] + b[candidates] @ (a[previous] * (h @ projection))
                args = (k, jnp.asarray(h)[None], jnp.asarray(unary)[None], state, jnp.asarray([previous]))
                got, _, state = case.call(*args, case.borrowed, method=DSpark.step)
                # The distribution lives on the candidates alone.
                expected = np.full(SPOKEN, -np.inf)
                expected[candidates] = scores
                np.testing.assert_allclose(got[0], expected, rtol=1e-9, atol=1e-9)
                previous = candidates[np.argmax(scores)]
                assert int(jnp.argmax(got[0])) == previous

    def test_confidence_reads_the_slot_that_predicts_and_the_token_before(self, logits_start):
        for with_markov in (False, True):
            case = Case(head_config("vanilla", logits_start, confidence=True, confidence_with_markov=with_markov))
            proj = case.params["confidence_head"]["proj"]
            parts = [case.predicting] + ([case.weights["markov_w1"][case.previous]] if with_markov else [])
            expected = np.concatenate(parts, axis=-1) @ proj["kernel"] + proj["bias"]
            args = (jnp.asarray(case.hidden), jnp.asarray(case.previous), case.borrowed)
            got = case.call(*args, method=DSpark.teacher_forced)[1]
            np.testing.assert_allclose(got, expected[..., 0], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_no_head_leaves_the_backbones_logits_alone():
    case = Case(head_config("vanilla", 0, markov_rank=0))
    np.testing.assert_array_equal(case.logits(), case.base)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn", "domino", "selector"])
def test_a_token_changes_nothing_before_it(head_type):
    """Draft k depends on the tokens before it; what a head keeps of earlier ones is its state."""
    case = Case(head_config(head_type, 0, selector_top_k=SPOKEN))
    before = case.logits()
    case.previous[:, 2] = (case.previous[:, 2] + 1) % VOCAB
    changed = np.abs(case.logits() - before).max(axis=(0, 2)) > 1e-6
    remembers = head_type in ("rnn", "domino")
    assert changed.tolist() == [False, False, True, remembers, remembers]
