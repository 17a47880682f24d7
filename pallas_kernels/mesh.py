"""A kernel on several devices: the compiler cannot split it, so every device runs it on what it has (`shard_map`)."""

import jax


def dividing(size: int, axes: tuple[str, ...] = ("model", "data")) -> tuple[str, ...]:
    """The axes of the set mesh that together divide `size`, taken in order up to one that does not; (): none does.

    Inside `shard_map` there are none: what is there is a device's own.
    """
    mesh, taken = jax.sharding.get_abstract_mesh(), ()
    for axis in axes:
        if axis not in mesh.auto_axes or size % mesh.shape[axis]:
            break
        taken, size = (*taken, axis), size // mesh.shape[axis]
    return taken
