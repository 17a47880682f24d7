"""Verification and the in-block loop on a 2x4 mesh, run by a test in a process of its own: words split over devices."""

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)

from pallas_kernels.fused_verify import fused_verify  # noqa: E402
from pallas_kernels.markov_sampler import draw_draft  # noqa: E402
from tests.kernels.rounds import Sizes, random_round  # noqa: E402
from tests.kernels.test_markov_sampler_tpu import random_asked  # noqa: E402

# 328 words divide by eight, 332 by four, 331 by none.
SIZES = [
    Sizes(6, 3, width=16, vocab=328, padding=50), Sizes(6, 3, width=16, vocab=332, softcap=8.0, transposed=True),
    Sizes(6, 3, width=16, vocab=331, spoken=3),
]  # fmt: skip
LIMITS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (7, 0.8, 0.0), (0, 1.0, 0.0), (0, 1.0, 0.0), (0, 1.0, 0.1)]
fused = jax.jit(fused_verify, static_argnames=("sampler", "backend"))
draw = jax.jit(draw_draft, static_argnames="backend")


def assert_close(got, want, name: str) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5, err_msg=name)


def check_verification(sizes: Sizes, sampler: str, mesh) -> None:
    arguments = random_round(sizes, 3, [4, 4, 2, 1, 4, 3], [1.0, 0.7, 1.0, 0.0, 1.0, 1.3], sampler, limits=LIMITS)
    want = fused(*arguments, sampler=sampler, backend="xla")
    with jax.set_mesh(mesh):
        hidden, head, *others = arguments
        words = ("model", "data")[: sum(sizes.vocab % n == 0 for n in (4, 8))] or None
        spec = P(None, words) if head.transposed else P(words)
        head = head.replace(weight=jax.device_put(head.weight, NamedSharding(mesh, spec)))
        got = fused(hidden, head, *others, sampler=sampler, backend="xla")
    whole = [dataclasses.replace(out, unsure_R=(), complete=()) for out in (got, want)]  # more candidates, fewer doubts
    assert got.complete and want.complete
    assert_close(*whole, f"{sizes} {sampler}")


def check_drafts(sizes: tuple, mesh) -> None:
    asked = random_asked(np.random.default_rng(1), sizes)
    want = draw(*asked, backend="xla")
    with jax.set_mesh(mesh):
        assert_close(draw(*asked, backend="xla"), want, str(sizes))


def main() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for sizes in SIZES:
        for sampler in ("rejection", "coupled"):
            check_verification(sizes, sampler, mesh)
    for vocab in (328, 332, 331):
        check_drafts((5, 3, vocab, 8, 2, 40, "float32"), mesh)


if __name__ == "__main__":
    main()
