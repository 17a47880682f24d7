"""The loss on a 2x2 mesh, run by a test in a process of its own: rows split over `data`, tables over `model`.

Once as the compiler splits it, once inside shard_map, with sources among a device's own targets.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)

from pallas_kernels.distribution_loss import distribution_loss  # noqa: E402
from tests.kernels.test_distribution_loss import assert_same, random_case, value_and_gradients  # noqa: E402

ROWS, SOURCES = 32, 16


def per_device(rows, targets, vocabulary, weights, **options):
    """`distribution_loss` of the rows that each device of the `data` axis has."""

    def local(rows, targets, vocabulary, weights):
        rows = rows.replace(source_M=rows.source_M - jax.lax.axis_index("data") * len(targets.log_total_T))
        value, losses = distribution_loss(rows, targets, vocabulary, weights, **options)
        return jax.lax.psum(value, "data"), losses

    split = jax.shard_map(
        local, in_specs=(P("data"), P("data"), P(), P("data")), out_specs=(P(), P("data")), axis_names={"data"},
        check_vma=False,
    )  # fmt: skip
    return split(rows, targets, vocabulary, weights)


def main() -> None:
    rows, targets, vocabulary, weights = random_case(0, ROWS, SOURCES, vocab=40, dtype=jnp.float32, base=False)
    own = np.random.default_rng(0).integers(0, SOURCES // 2, ROWS) + np.arange(ROWS) // (ROWS // 2) * (SOURCES // 2)
    case = rows.replace(source_M=jnp.asarray(own, jnp.int32)), targets, vocabulary, weights
    want = value_and_gradients(distribution_loss, *case, chunk=4)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        specs = (P("data"), P("data"), P("model"), P("data"))
        placed = [jax.device_put(part, NamedSharding(mesh, spec)) for part, spec in zip(case, specs, strict=True)]
        for loss in (distribution_loss, per_device):
            assert_same(jax.device_get(value_and_gradients(loss, *placed, chunk=4)), jax.device_get(want), 1e-5)


if __name__ == "__main__":
    main()
