"""Cost tables of machines that are not at hand, from compiled programs and public chip rates: Qwen3-8B with DSpark.

    python -m docs.experiments.computed_tables [--chips=v5e-8,v6e-8,h100] [--out=docs/tables]

libtpu compiles one layer of the target's step, the vocabulary head, one layer of the drafter and a step of its in-block
head, tensor parallel over the chips. A part takes the longer of operations / rate and bytes / bandwidth, plus the bytes
of its collectives over the links; layers and steps are multiplied by their number. Operations are XLA's count; bytes
are arguments and results once and temporaries twice, since XLA also counts what moves inside a TPU's fast memory.
A layer's counts are compiled at the fewest and at the most rows of every load, and lie on a line between them.

Nothing is charged for launches, latencies and random numbers: a table is what the rates allow, real machines are
slower. H100: counts of the program for one TPU chip, with the GPU's rates.
"""

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# libtpu only compiles here: it need not ask who it is, nor have the machine to itself.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.decoding.caches import empty_pools, view_pools
from dspark_jax.decoding.sampling import argmax
from dspark_jax.interop.drafter_io import init_drafter
from dspark_jax.models.attention import attend_rows
from dspark_jax.models.config import DecoderConfig, DrafterConfig, draft_decoder
from dspark_jax.models.drafter import Borrowed, DSpark
from dspark_jax.models.heads import MarkovHead
from dspark_jax.models.layers import DecoderLayer, Layer, rope_tables
from dspark_jax.models.target import Decoder
from dspark_jax.planning.chips import CHIPS, Chip
from dspark_jax.planning.collectives import sent_bytes
from dspark_jax.planning.models import KNOWN
from dspark_jax.scheduling.cost_model import CostTable, Stamp, Time, profile, save_table
from pallas_kernels.ragged_attention import ragged_rows
from pallas_kernels.targets import topology

PAGE = 128  # rows
SLOTS, CONTEXTS = (1, 4, 16, 64, 256), (1024,)
DTYPE = jnp.bfloat16


class Chips(NamedTuple):
    """Some chips, and the TPU that the programs are compiled for."""

    chip: Chip
    topology: str
    count: int


MACHINES = {
    "v5e-8": Chips(CHIPS["v5e"], "v5e:2x4", 8),
    "v6e-8": Chips(CHIPS["v6e"], "v6e:2x4", 8),
    "h100": Chips(CHIPS["h100"], "v5e:2x4", 1),
}


class Models(NamedTuple):
    """The sizes of a target and its drafter."""

    name: str
    target: DecoderConfig
    drafter: DrafterConfig


def qwen3_8b() -> Models:
    """Qwen3-8B with the paper's drafter: five layers, five taps, blocks of seven."""
    target = KNOWN["Qwen/Qwen3-8B"]
    drafter = DrafterConfig(draft_decoder(target, 5), 7, 151669, (1, 9, 17, 25, 33), 36, target.vocab_size)
    return Models("Qwen3-8B", target, drafter)


def computed_table(models: Models, chips: Chips, slots: tuple[int, ...], contexts: tuple[int, ...]) -> CostTable:
    """The table of a chip's mesh. Its stamp says "computed", so that no engine serves by it."""
    parts = Parts(models, chips)
    stamp = Stamp(
        chips.chip.device, chips.count, f"model={chips.count}", models.name, "computed", "computed", "bfloat16",
        jax.__version__, "computed",
    )  # fmt: skip

    def seconds(rows: int, slots: int, context: int) -> float:
        if not rows:
            return step(slots, slots, context)
        layers = models.drafter.decoder.num_layers
        return step(rows, slots, context) + layers * parts.draft_layer(slots, context) + parts.draft_heads(slots)

    def step(rows: int, slots: int, context: int) -> float:
        return models.target.num_layers * parts.target_layer(rows, slots, context) + parts.target_ends(rows)

    return profile(stamp, slots, contexts, models.drafter.num_drafts, seconds, passes=1)


class Counts(NamedTuple):
    """What a program does on one chip."""

    operations: float
    bytes: float  # of its memory
    sent: float  # bytes to other chips


class Parts:
    """Seconds of a round's parts on a mesh of absent chips; every program is compiled once."""

    def __init__(self, models: Models, chips: Chips):
        self.models, self.chip, self.count = models, chips.chip, chips.count
        devices = topology(chips.topology)[: chips.count]
        self.mesh = Mesh(np.array(devices), ("model",))
        tokens = jnp.zeros(1, jnp.int32)
        init = functools.partial(Decoder(models.target).init, attend=lambda layer, q, k, v: q)
        self.params = self._placed(jax.eval_shape(init, jax.random.key(0), tokens, tokens)["params"])
        self.draft_params = self._placed(jax.eval_shape(lambda: init_drafter(models.drafter, jax.random.key(0))))
        self._layer = functools.cache(self._layer)
        self.target_ends = functools.cache(self._target_ends)

    def target_layer(self, rows: int, slots: int, context: int) -> float:
        """Seconds of a layer over `rows` rows behind `context` cached tokens of each slot."""
        block = self.models.drafter.num_drafts + 1
        few, most = (self._layer(self.models.target, n, slots, block, context) for n in (slots, slots * block))
        share = (rows - slots) / (slots * (block - 1))
        return self._seconds(Counts(*(a + share * (b - a) for a, b in zip(few, most, strict=True))))

    def draft_layer(self, slots: int, context: int) -> float:
        """Seconds of a layer of the drafter over a block of every slot."""
        size = self.models.drafter.block_size
        return self._seconds(self._layer(self.models.drafter.decoder, slots * size, slots, size, context))

    def _layer(self, config: DecoderConfig, rows: int, slots: int, block: int, context: int) -> Counts:
        params = self.params if config is self.models.target else self.draft_params["backbone"]
        one = jax.tree.map(lambda a: self._argument(a.shape[1:], DTYPE, _without_first(a)), params["layers"][0])

        def layer(params, x_NxH, pools, table_RxC, length_R, count_R):
            at = ragged_rows(count_R, length_R, rows, block)
            attend = attend_rows(config, at, view_pools(pools, table_RxC, length_R), "xla")
            rope = rope_tables(config, at.position_N, DTYPE)[0]
            module = DecoderLayer(config, config.attention[0])
            return module.apply({"params": params}, x_NxH, rope, lambda *qkv: attend(Layer(0, 0, 0), *qkv))

        hidden = self._floats(rows, config.hidden_size)
        return self._counts(layer, one, hidden, *self._cache(config, slots, context), *[self._ints(slots)] * 2)

    def _target_ends(self, rows: int) -> float:
        """Seconds of the vocabulary head with its argmax, and of the drafter's context, which every round extends."""
        target, drafter = Decoder(self.models.target), DSpark(self.models.drafter)

        def ends(params, draft_params, hidden_NxH, taps_NxMH, position_N):
            logits = target.apply({"params": params}, hidden_NxH, method=Decoder.logits)
            variables, nothing = {"params": draft_params}, (position_N, None)
            return argmax(logits), drafter.apply(variables, taps_NxMH, position_N, *nothing, method=DSpark.context)

        hidden, taps = (self._floats(rows, n) for n in (target.config.hidden_size, drafter.config.tap_width))
        return self._seconds(self._counts(ends, self.params, self.draft_params, hidden, taps, self._ints(rows)))

    def draft_heads(self, slots: int) -> float:
        """Seconds of a block's base logits, and of the in-block head token by token, greedily."""
        c, drafter = self.models.drafter, DSpark(self.models.drafter)

        def base(head_VxH, hidden_RxKxH):
            borrowed = Borrowed(None, head_VxH, None)
            return drafter.apply({}, hidden_RxKxH, borrowed, method=DSpark.base_logits)

        def step(params, logits_RxV, factor_RxM):
            head = MarkovHead(c)
            return argmax(head.apply({"params": params}, logits_RxV, factor_RxM, method=MarkovHead.correct))

        hidden = self._floats(slots, c.num_drafts, c.decoder.hidden_size)
        once = self._counts(base, self._argument((c.draft_vocab_size, c.decoder.hidden_size), DTYPE, SPLIT), hidden)
        logits = self._argument((slots, c.draft_vocab_size), DTYPE, PartitionSpec(None, "model"))
        each = self._counts(step, self.draft_params["markov_head"], logits, self._floats(slots, c.markov_rank))
        return self._seconds(once) + c.num_drafts * self._seconds(each)

    # ------------------------------------------------------------------------------------------------ arguments

    def _cache(self, config: DecoderConfig, slots: int, context: int) -> tuple[Any, jax.ShapeDtypeStruct]:
        """Pages of every slot, their heads shared out among the chips, and the table."""
        pages = -(-context // PAGE)
        pools = jax.eval_shape(lambda: empty_pools(config, slots * pages, PAGE, DTYPE))
        split = PartitionSpec(None, None, "model")
        return jax.tree.map(lambda a: self._argument((1, *a.shape[1:]), DTYPE, split), pools), self._ints(slots, pages)

    def _placed(self, params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, a: self._argument(a.shape, DTYPE, _split(path)), params)

    def _floats(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._argument(shape, DTYPE, PartitionSpec())

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._argument(shape, jnp.int32, PartitionSpec())

    def _argument(self, shape: tuple[int, ...], dtype: Any, split: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, split))

    # ------------------------------------------------------------------------------------------------ costs

    def _counts(self, part: Callable[..., Any], *arguments: Any) -> Counts:
        compiled = jax.jit(part).lower(*arguments).compile()
        memory = compiled.memory_analysis()
        touched = memory.argument_size_in_bytes + memory.output_size_in_bytes + 2 * memory.temp_size_in_bytes
        return Counts(compiled.cost_analysis()["flops"], touched, sent_bytes(compiled.as_text(), self.count))

    def _seconds(self, counts: Counts) -> float:
        """What the chip's rates allow."""
        work = max(counts.operations / self.chip.operations, counts.bytes / self.chip.bandwidth)
        return work + counts.sent / self.chip.links


SPLIT = PartitionSpec("model")  # by rows


def _without_first(argument: jax.ShapeDtypeStruct) -> PartitionSpec:
    """The split of one layer of a stack."""
    return PartitionSpec(*argument.sharding.spec[1:])


def _split(path: tuple[Any, ...]) -> PartitionSpec:
    """How a weight is shared out: heads, MLP features and the vocabulary over the chips, the rest on all of them."""
    name = jax.tree_util.keystr(path)
    stacked = (None,) if "layers" in name else ()
    if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")):
        return PartitionSpec(*stacked, None, "model")
    if any(part in name for part in ("o_proj", "down_proj", "'fc'")):
        return PartitionSpec(*stacked, "model")
    return SPLIT if any(part in name for part in ("embedding", "markov_w2")) else PartitionSpec()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default=",".join(MACHINES))
    parser.add_argument("--out", default="docs/tables")
    given = parser.parse_args()
    for name in given.chips.split(","):
        table = computed_table(qwen3_8b(), MACHINES[name], SLOTS, CONTEXTS)
        path = Path(given.out) / f"qwen3_8b_{name.replace('-', '')}.json"
        save_table(path, table)
        print(f"{path}: {_summary(table)}")


def _summary(table: CostTable) -> str:
    def ms(time: Time) -> str:
        return f"{1e3 * time.seconds:.2f} ms"

    (slots, context), draft = next(iter(table.draft.items()))
    plain = ms(table.target[slots, slots, context])
    return f"a plain step of {slots} slot at {context} tokens {plain}, drafting {ms(draft)}"


if __name__ == "__main__":
    main()
