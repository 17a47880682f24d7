"""Optimizers by name: `train.optimizer`. All of them step parameters in the dtype they have, which is float32."""

import functools

import jax
import optax

from dspark_jax.errors import UserError
from dspark_jax.models.layers import Params

MUON_RMS = 0.2  # about the size of AdamW's updates, so that both can have one learning rate (arXiv 2502.16982)


@functools.cache  # an optimizer is a static argument of the step: equal settings are one object, compiled once
def make_optimizer(
    name: str, schedule: optax.Schedule, weight_decay: float, max_grad_norm: float
) -> optax.GradientTransformation:
    """ "adamw" (spec 8.2), "muon" or "adafactor", behind a global-norm clip. UserError on another name.

    The weight decay is decoupled, and scaled by the learning rate, in all three.
    """
    make = {"adamw": optax.adamw, "muon": _muon, "adafactor": _adafactor}.get(name)
    if make is None:
        raise UserError(f"unknown train.optimizer {name!r}: it is adamw, muon or adafactor")
    return optax.chain(optax.clip_by_global_norm(max_grad_norm), make(schedule, weight_decay=weight_decay))


def _muon(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Muon for the matrices between hidden states, AdamW for everything else."""
    if not hasattr(optax.contrib, "muon"):
        raise UserError("this version of optax has no Muon: pip install -U optax, or choose train.optimizer=adamw")
    muon = optax.contrib.muon(
        schedule,
        weight_decay=weight_decay,
        consistent_rms=MUON_RMS,
        # Left to itself optax gives stacked kernels to Adam. With named axes each layer of [L, in, out] is a matrix.
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), tree
        ),
    )
    rest = optax.adamw(schedule, weight_decay=weight_decay)
    return optax.partition({"muon": muon, "adamw": rest}, muon_labels)


def muon_labels(params: Params) -> Params:
    """Which optimizer takes a leaf: "muon" or "adamw".

    Muon takes kernels, stacked or not. Not norm scales (two-dimensional where they are stacked), not the in-block
    head's tables, which are an embedding and a vocabulary head, and no kernel of one output, whose only singular vector
    would be stretched to the same length however small its gradient is.
    """

    def label(path: tuple, leaf: jax.Array) -> str:
        return "muon" if path[-1].key == "kernel" and leaf.shape[-1] > 1 else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def _adafactor(schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Adafactor with an absolute learning rate, as AdamW's: second moments factored, updates clipped by their RMS.

    Of a stacked kernel [L, in, out] the two long axes are factored; each layer keeps its own statistics.
    """
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
