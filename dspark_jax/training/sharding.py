"""Training on a mesh of all processes' devices: who has which packs, parameters and gradients.

Packs (sequences, of Eagle3) are divided over all devices, whatever the mesh: each computes the drafter on its own, and
sums are what they exchange. Parameters, optimizer state and average are stored in parts (FSDP, ZeRO; arXiv 1910.02054),
gathered where a step reads them, and gradients arrive in the same parts. The target alone is divided by `model`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.interop.target_io import Target
from dspark_jax.models.layers import Params
from dspark_jax.parallel import shared_out

EVERY = ("data", "model")
SMALL = 1 << 10  # numbers; an array of fewer is not worth a message


def stored_in_parts(shape: tuple[int, ...], devices: int) -> P:
    """The longest dimension that `devices` divides, of equals the first; small arrays are whole everywhere."""
    sizes = [size if size % devices == 0 else 0 for size in shape]
    if math.prod(shape) < SMALL or not any(sizes):
        return P()
    at = sizes.index(max(sizes))
    return P(*(None,) * at, EVERY)


def stored(tree: Any) -> Any:
    """Inside a jitted function: arrays in the parts in which they are stored."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, stored_in_parts(a.shape, mesh.size)), tree)


def made_in_parts(make: Callable[[Params], Any], params: Params, mesh: Mesh | None) -> Any:
    """`make(params)` in the parts in which it is stored; `params` are whole, the same in all processes."""
    if mesh is None:
        return make(params)
    part = lambda a: stored_in_parts(a.shape, mesh.size)  # noqa: E731
    params = jax.tree.map(lambda a: shared_out(a, mesh, part(a)), params)
    shardings = jax.tree.map(lambda a: NamedSharding(mesh, part(a)), jax.eval_shape(make, params))
    return jax.jit(make, out_shardings=shardings)(params)


def summed(function: Callable[..., Any], whole: tuple, own: tuple) -> Any:
    """`function(*whole, *own)` added up over the devices, which have a part each of the first dimension of `own`.

    Large results are left in the parts in which they are stored: each device gets the sum of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*whole, *own)

    def add(array: jax.Array) -> jax.Array:
        spec = stored_in_parts(array.shape, mesh.size)
        if not spec:
            return jax.lax.psum(array, EVERY)
        return jax.lax.psum_scatter(array, EVERY, scatter_dimension=len(spec) - 1, tiled=True)

    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(a) // mesh.size, *a.shape[1:]), a.dtype), own)
    shapes = jax.eval_shape(function, *whole, *one)
    specs = jax.tree.map(lambda a: stored_in_parts(a.shape, mesh.size), shapes)
    local = lambda whole, own: jax.tree.map(add, function(*whole, *own))  # noqa: E731
    return jax.shard_map(local, in_specs=(P(), P(EVERY)), out_specs=specs, check_vma=False)(whole, own)


def own_places(count: int, mesh: Mesh | None) -> list[int]:
    """Which of `count` packs this process's devices have."""
    if mesh is None:
        return list(range(count))
    parts = NamedSharding(mesh, P(EVERY)).addressable_devices_indices_map((count,))
    return sorted({place for (part,) in parts.values() for place in range(count)[part]})


def put_together(tree: Any, count: int, mesh: Mesh | None) -> Any:
    """Arrays over all `count` packs, of which every process gives its own; as they are without a mesh."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, P(EVERY))
    return jax.tree.map(
        lambda a: jax.make_array_from_process_local_data(sharding, np.asarray(a), (count, *a.shape[1:])), tree
    )


def whole_everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays of this process, the same in all, on every device; one that occurs twice still does."""
    if mesh is None:
        return tree
    made = {id(a): shared_out(a, mesh, P()) for a in {id(a): a for a in jax.tree.leaves(tree)}.values()}
    return jax.tree.map(lambda a: made[id(a)], tree)


def on_this_process(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays of the mesh, whole on one device of each process."""
    if mesh is None:
        return tree
    whole = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)
    return jax.tree.map(lambda a: a.addressable_data(0), whole)


def with_own_tables(target: Target) -> Target:
    """A target whose embedding, head and last norm this process has whole: a drafter borrows them, and names it."""
    names = {"embedding", "lm_head", "norm"} & set(target.params)
    tables = on_this_process({name: target.params[name] for name in names}, target.mesh)
    return dataclasses.replace(target, params=target.params | tables)


class Agreement:
    """Whether any process says yes, told to all of them at the same call; all must ask equally often.

    What a call says is heard at the next one, so that no device waits for the answer.
    """

    def __init__(self, mesh: Mesh | None):
        self._mesh = mesh if jax.process_count() > 1 else None
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, P())) if self._mesh else None
        self._said: jax.Array | None = None
        self._agreed = False

    def __call__(self, yes: bool) -> bool:
        if self._mesh is None:
            return yes
        before, count = self._said, self._mesh.size
        own = np.full(len(own_places(count, self._mesh)), yes)
        self._said = self._any(put_together(own, count, self._mesh))
        self._agreed = self._agreed or (before is not None and bool(before))
        return self._agreed
