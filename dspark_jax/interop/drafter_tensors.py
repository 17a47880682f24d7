"""How a drafter's parameters are named and laid out in a checkpoint (spec 1.4, 5.1).

Foreign files are brought to these names before they are read; see `drafter_formats.py`.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.errors import UserError
from dspark_jax.interop.families import (
    at,
    layer_names,
    layers_from_tensors,
    layers_to_tensors,
    put,
    refuse_unexpected,
    take_tensor,
)
from dspark_jax.models.config import DrafterConfig, Eagle3Config
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.eagle3 import Eagle3
from dspark_jax.models.layers import Params

# Checkpoint name -> (place in the parameters, stored transposed).
Entries = dict[str, tuple[tuple[str, ...], bool]]

TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
# One row for each word that the drafter speaks.
_HEAD_ROWS = ("lm_head.weight", "markov_head.markov_w2.weight", "embed_proj.2.weight",
              "candidate_selector.successor_codebook", "d2t")  # fmt: skip
_ROTATED = tuple(f"self_attn.{name}" for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias",
                                                  "q_norm.weight", "k_norm.weight"))  # fmt: skip

_BACKBONE: Entries = {
    "fc.weight": (("backbone", "fc", "kernel"), True),
    "hidden_norm.weight": (("backbone", "hidden_norm", "scale"), False),
    "norm.weight": (("backbone", "norm", "scale"), False),
}
_MARKOV: Entries = {f"markov_head.{name}.weight": (("markov_head", name), False) for name in ("markov_w1", "markov_w2")}
_HEADS: dict[str, Entries] = {
    "vanilla": _MARKOV,
    "gated": _MARKOV
    | {
        "markov_head.gate_proj.weight": (("markov_head", "gate_proj", "kernel"), True),
        "markov_head.gate_proj.bias": (("markov_head", "gate_proj", "bias"), False),
    },
    "rnn": _MARKOV
    | {
        "markov_head.joint_proj.weight": (("markov_head", "joint_proj", "kernel"), True),
        "markov_head.joint_proj.bias": (("markov_head", "joint_proj", "bias"), False),
    },
    "domino": {
        "prefix_gru.weight_ih_l0": (("markov_head", "input_gates", "kernel"), True),
        "prefix_gru.weight_hh_l0": (("markov_head", "state_gates", "kernel"), True),
        "embed_proj.0.weight": (("markov_head", "down_proj", "kernel"), True),
        "embed_proj.2.weight": (("markov_head", "up_proj"), False),
    },
    "selector": {
        "candidate_selector.predecessor_codebook": (("markov_head", "predecessor"), False),
        "candidate_selector.successor_codebook": (("markov_head", "successor"), False),
        "candidate_selector.hidden_projection.weight": (("markov_head", "hidden_projection", "kernel"), True),
    },
}
_CONFIDENCE: Entries = {
    "confidence_head.proj.weight": (("confidence_head", "proj", "kernel"), True),
    "confidence_head.proj.bias": (("confidence_head", "proj", "bias"), False),
}
_CONVOLUTIONS: Entries = {
    f"{name}.{tensor}": ((name, *place), transposed)
    for name in ("attention_conv", "mlp_conv")
    for tensor, place, transposed in (
        ("base_kernel", ("base_kernel",), False),
        ("kernel_projection.weight", ("kernel_projection", "kernel"), True),
    )
}
_EAGLE3: Entries = {"fc.weight": (("fc", "kernel"), True), "norm.weight": (("norm", "scale"), False)}
_EAGLE3_LAYER: Entries = {"hidden_norm.weight": (("hidden_norm", "scale"), False)}


def drafter_module(config: DrafterConfig | Eagle3Config) -> DSpark | Eagle3:
    """The network of a config."""
    return Eagle3(config) if isinstance(config, Eagle3Config) else DSpark(config)


def init_drafter(config: DrafterConfig | Eagle3Config, key: jax.Array) -> Params:
    """Fresh float32 parameters: N(0, 0.02) weights, zero biases, unit norms (spec 1.4)."""
    hidden = config.decoder.hidden_size
    borrowed = Borrowed(
        jnp.zeros((config.decoder.vocab_size, hidden)),
        jnp.zeros((config.draft_vocab_size, hidden)),
        jnp.zeros(config.draft_vocab_size, jnp.int32),
    )
    taps, anchor = jnp.zeros((1, config.tap_width)), jnp.zeros(1, jnp.int32)
    return drafter_module(config).init(key, taps, anchor, borrowed)["params"]


@functools.cache
def abstract_drafter(config: DrafterConfig | Eagle3Config) -> Params:
    """Shapes of the drafter's parameters, nothing allocated; to be read only."""
    return jax.eval_shape(lambda: init_drafter(config, jax.random.key(0)))


class CanonicalTensors(Mapping[str, np.ndarray]):
    """A foreign file's tensors under our names and in our layout, read when asked for.

    `renames`: pairs of a name's beginning and what stands there instead. `interleaved_dim` D: heads that rotate pairs
    of neighbours become heads that rotate halves, an exact permutation of rows (checkpoint formats 7). `head_rows`:
    how many rows of a padded head to keep.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        renames: tuple[tuple[str, str], ...] = (),
        interleaved_dim: int = 0,
        head_rows: int | None = None,
    ):
        self._tensors, self._dim, self._rows = tensors, interleaved_dim, head_rows
        self._names: dict[str, str] = {}
        for name in (n for n in tensors if not n.startswith("verifier_")):  # the target's, for training
            own = next((new + name.removeprefix(old) for old, new in renames if name.startswith(old)), name)
            if own in self._names:
                raise UserError(f"the checkpoint holds {own!r} twice: as {self._names[own]!r} and as {name!r}")
            self._names[own] = name

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[self._names[name]]
        if self._rows is not None and name in _HEAD_ROWS:
            array = array[: self._rows]
        return split_halves(array, self._dim) if self._dim and name.endswith(_ROTATED) else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def split_halves(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows 0, 2, 4, ..., 1, 3, 5, ... of every head: what interleaved rotary pairs are to split halves."""
    if array.shape[0] % head_dim:
        return array  # of a wrong size, which its reader will say
    return array.reshape(-1, head_dim // 2, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def params_from_tensors(config: DrafterConfig | Eagle3Config, tensors: Mapping[str, Any], dtype: jnp.dtype) -> Params:
    """A drafter's parameters. UserError names a tensor that is missing, of another shape, or one too many."""
    refuse_unexpected(tensors, tensor_names(config), "")
    like, entries, layers = abstract_drafter(config), _entries(config), _layers_place(config)
    params: dict[str, Any] = {}
    for name, (place, transposed) in entries.items():
        shape = at(like, place).shape
        array = take_tensor(tensors, name, shape[::-1] if transposed else shape, dtype)
        put(params, place, jnp.asarray(array.T if transposed else array))
    stacks = layers_from_tensors(tensors, "", at(like, layers), config.decoder, dtype, _layer_extra(config))
    put(params, layers, stacks)
    return params


def drafter_tensors(config: DrafterConfig | Eagle3Config, params: Params) -> dict[str, np.ndarray]:
    """A drafter's parameters under their checkpoint names, in the checkpoint's layout."""
    tensors = {}
    for name, (place, transposed) in _entries(config).items():
        array = np.asarray(at(params, place))
        tensors[name] = np.ascontiguousarray(array.T if transposed else array)
    return tensors | layers_to_tensors(at(params, _layers_place(config)), config.decoder, _layer_extra(config))


def tensor_names(config: DrafterConfig | Eagle3Config) -> set[str]:
    """Every tensor that a file of this drafter may hold."""
    numbers = range(config.decoder.num_layers)
    names = {f"layers.{i}.{name}" for i in numbers for name in _layer_extra(config)}
    if isinstance(config, DrafterConfig):
        names.add("mask_embedding")
    return layer_names(config.decoder) | names | {*_entries(config), *TABLES}


def _entries(config: DrafterConfig | Eagle3Config) -> Entries:
    """The tensors outside the layers."""
    if isinstance(config, Eagle3Config):
        norms = [f"fc_norm.{i}" for i in range(len(config.tap_layers))] if config.fc_norm else []
        norms += ["input_norm"] if config.norm_before_fc else []
        return _EAGLE3 | {f"{n}.weight": ((n.replace(".", "_"), "scale"), False) for n in norms}
    head = _HEADS[config.head_type] if config.markov_rank else {}
    return _BACKBONE | head | (_CONFIDENCE if config.confidence else {})


def _layer_extra(config: DrafterConfig | Eagle3Config) -> Entries:
    """The tensors of a layer besides a decoder's."""
    if isinstance(config, Eagle3Config):
        return _EAGLE3_LAYER
    return _CONVOLUTIONS if config.conv_taps else {}


def _layers_place(config: DrafterConfig | Eagle3Config) -> tuple[str, ...]:
    return ("layers",) if isinstance(config, Eagle3Config) else ("backbone", "layers")
