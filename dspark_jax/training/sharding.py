"""Training on a mesh of all processes' devices: who has which packs, parameters and gradients.

Packs (sequences, of Eagle3) are divided over all devices, whatever the mesh: each computes the drafter on its own, and
sums are what they exchange. Parameters, optimizer state and average are stored in parts (FSDP, ZeRO; arXiv 1910.02054),
gathered weight by weight in the dtype of the compute where a model reads them, and gradients arrive in the same parts.
The target alone is divided by `model`, and gathered alike.
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
from dspark_jax.parallel import in_parts, is_part, place_tree, shared_out

EVERY = ("data", "model")
SMALL = 1 << 10  # numbers; an array of fewer is not worth a message


def stored_in_parts(shape: tuple[int, ...], devices: int, stacked: bool = False) -> P:
    """The longest dimension that `devices` divides, of equals the first; small arrays are whole everywhere.

    `stacked`: the first dimension are layers. A layer is gathered when its turn comes, so all devices have some of it.
    """
    sizes = [size if size % devices == 0 else 0 for size in shape]
    sizes[:1] = [0] if stacked else sizes[:1]
    if math.prod(shape) < SMALL or not any(sizes):
        return P()
    at = sizes.index(max(sizes))
    return P(*(None,) * at, EVERY)


def stored_specs(tree: Any, devices: int) -> Any:
    """By which specs parameters, or an optimizer's state of them, are stored."""
    return place_tree(tree, lambda path, a: stored_in_parts(a.shape, devices, "layers" in path))


def stored(tree: Any) -> Any:
    """Inside a jitted function: arrays in the parts in which they are stored."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, stored_specs(tree, mesh.size))


def made_in_parts(make: Callable[[Params], Any], params: Params, mesh: Mesh | None) -> Any:
    """`make(params)` in the parts in which it is stored; `params` are whole, the same in all processes."""
    if mesh is None:
        return make(params)
    params = jax.tree.map(lambda a, spec: shared_out(a, mesh, spec), params, stored_specs(params, mesh.size))
    specs = stored_specs(jax.eval_shape(make, params), mesh.size)
    return jax.jit(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))(params)


def summed(
    function: Callable[..., Any],
    params: Params,
    whole: tuple,
    own: tuple,
    specs: Callable[[Any], Any] = lambda of_params: P(),
) -> Any:
    """`function(params, *whole, *own)` added up over the devices; each has a part of the first dimension of `own`.

    Parameters come as `Part`s, and so do gradients by them, already added up: they stay in parts. `specs`: of what is
    made, by those of the parameters.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(params, *whole, *own)
    of_params = stored_specs(params, mesh.size)
    add = lambda a: a.value if is_part(a) else jax.lax.psum(a, EVERY)  # noqa: E731

    def local(params: Params, whole: tuple, own: tuple) -> Any:
        return jax.tree.map(add, function(in_parts(params, of_params), *whole, *own), is_leaf=is_part)

    specs_in, specs_out = (of_params, P(), P(EVERY)), specs(of_params)
    return jax.shard_map(local, in_specs=specs_in, out_specs=specs_out, check_vma=False)(params, whole, own)


def most(count: jax.Array) -> jax.Array:
    """Inside `summed`: the largest of all devices' counts. Loops that gather weights run as often on all of them."""
    return count if jax.sharding.get_abstract_mesh().empty else jax.lax.pmax(count, EVERY)


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
