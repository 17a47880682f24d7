"""Several devices: the mesh, and who holds which part of weights and caches.

In serving a process has a mesh of its own devices, in training all processes have one (`training/sharding.py`).

Everything is exact whatever the sizes: what does not divide is replicated. `model` splits the key-value heads, and the
cache with them. What has more parts than that (the query heads of one key-value head, the MLP, the vocabulary) is split
over `data` too, so every device reads its share of the weights, and neither rows nor logits ever travel: collectives
sum hidden rows and statistics of rows. In-block heads are replicated: they are small, and run token by token.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.errors import UserError

Axes = tuple[str, ...] | None
Place = Callable[[Sequence[Any], np.ndarray | jax.Array], jax.Array]  # (path in the parameters, array) -> on devices

# The outer axis first: the query heads of one key-value head stay where that head is.
ALL: Axes = ("model", "data")
MODEL: Axes = ("model",)


def make_mesh(data: int, model: int, together: bool = False) -> Mesh:
    """A mesh of this process's first data · model devices; `together`: of all devices of all processes, if there are
    several. Raises UserError where there are fewer, or some of those would be left out.
    """
    together = together and jax.process_count() > 1
    devices, need = jax.devices() if together else jax.local_devices(), data * model
    have = len(devices)
    if min(data, model) < 1 or need > have or (together and need < have):
        who, rule = ("these processes have", "exactly") if together else ("this process has", "at most")
        raise UserError(
            f"a mesh of {data}x{model} needs {need} devices, {who} {have}: "
            f"choose DATAxMODEL with a product of {rule} that"
        )
    axis_types = (AxisType.Auto,) * 2
    return jax.make_mesh((data, model), ("data", "model"), axis_types=axis_types, devices=devices[:need])


def parse_mesh(text: str, together: bool = False) -> Mesh | None:
    """The mesh of a config line, "DATAxMODEL" as "1x8"; None for "". `together`: as in `make_mesh`, where "" of several
    processes is all devices along `data`. Raises UserError on anything else.
    """
    if together and jax.process_count() > 1:
        text = text or f"{jax.device_count()}x1"
    sizes = mesh_sizes(text)
    return make_mesh(*sizes, together) if sizes else None


def mesh_sizes(text: str) -> tuple[int, int] | None:
    """The two sizes of such a line."""
    if not text:
        return None
    sizes = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if not sizes:
        raise UserError(f"mesh {text!r}: write it DATAxMODEL, as 1x8 for eight devices that share a model's heads")
    return int(sizes[1]), int(sizes[2])


def start_processes(text: str) -> tuple[int, int]:
    """Joins the processes of one run, before anything else touches a device: this one's index, and their number.

    `text`: "auto" where JAX finds the others itself (TPU pods, Slurm, MPI), "HOST:PORT,COUNT,INDEX" anywhere (HOST runs
    process 0), "" for a process on its own. Returns when all have come; JAX ends those that wait for one more than five
    minutes. Raises UserError where they do not fit together.
    """
    if not text:
        return 0, 1
    parts = re.fullmatch(r"([^,\s]+:\d+),(\d{1,5}),(\d{1,5})", text)
    if text != "auto" and not (parts and int(parts[3]) < int(parts[2])):
        raise UserError(f"processes {text!r}: write auto, or HOST:PORT,COUNT,INDEX with INDEX from 0 to COUNT - 1")
    try:
        jax.distributed.initialize(*((parts[1], int(parts[2]), int(parts[3])) if parts else ()))
        count = jax.process_count()  # as process 0 has it
    except (RuntimeError, ValueError) as error:
        raise UserError(f"the processes of {text!r} did not come together: {str(error).splitlines()[0]}") from None
    if parts and int(parts[2]) != count:
        raise UserError(f"processes {text!r}: process 0 was started with {count} of them, give all the same COUNT")
    return jax.process_index(), count


def describe_mesh(mesh: Mesh | None) -> str:
    """Axes and sizes, as "data=1,model=8"; "" for one device without a mesh."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items()) if mesh else ""


def mesh_of(array: jax.Array) -> Mesh | None:
    """The mesh that an array lies on, None where it lies on one device."""
    sharding = getattr(array, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """The context in which jitted functions are called, so that `constrain` knows the mesh."""
    return jax.set_mesh(mesh) if mesh else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------------- who has what


def divided(size: int, mesh: Mesh | AbstractMesh, axes: Axes = ALL) -> Axes:
    """As many of `axes`, from the first on, as divide `size`; None: none, it is replicated.

    Inside `shard_map` an axis that it has divided already is none.
    """
    axes = tuple(axis for axis in axes or () if axis in _automatic(mesh))
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes or None


def split(mesh: Mesh | AbstractMesh, shape: Sequence[int], axes: Sequence[Axes]) -> P:
    """The partition of an array of `shape` that asks for `axes` in each dimension, as far as they divide it."""
    return P(*(divided(size, mesh, wanted) for size, wanted in zip(shape, axes, strict=True)))


def constrain(x: jax.Array, *axes: Axes) -> jax.Array:
    """`x`, split over `axes` (one entry for each dimension) as far as they divide it; as it is without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, split(mesh, x.shape, axes)) if _automatic(mesh) else x


def _automatic(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes over which the compiler divides."""
    return tuple(axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)


def replicated(x: jax.Array) -> jax.Array:
    """`x` whole on every device; as it is without a mesh."""
    return constrain(x, *(None,) * x.ndim)


@jax.named_scope("top_k")
def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` over the words `[..., V]`, which may be split: every device sends its own k best, not its row."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = None if mesh.empty else divided(x.shape[-1], mesh)
    if axes is None:
        return jax.lax.top_k(x, k)
    lead = (None,) * (x.ndim - 1)

    def local(part: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(part, min(k, part.shape[-1]))
        return values, ids + (part.shape[-1] * jax.lax.axis_index(axes)).astype(ids.dtype)

    found = jax.shard_map(local, in_specs=P(*lead, axes), out_specs=P(*lead, axes))(x)
    values, ids = map(replicated, found)
    best, at = jax.lax.top_k(values, k)  # of equals the first: the lower id, as on one device
    return best, jnp.take_along_axis(ids, at, axis=-1)


def head_axes(num_heads: int, num_kv_heads: int, mesh: Mesh | AbstractMesh) -> tuple[Axes, Axes]:
    """Over which axes query and key-value heads are split: a device has whole heads, and the keys of its queries."""
    if num_kv_heads % mesh.shape["model"]:
        return None, None
    return (ALL if (num_heads // num_kv_heads) % mesh.shape["data"] == 0 else MODEL), MODEL


def weight_spec(path: Sequence[Any], shape: Sequence[int], heads: Sequence[tuple[int, int]], mesh: Mesh) -> P:
    """The partition of one parameter of a target or drafter, by its place. `heads`: (query, key-value) heads of each
    kind of attention, since heads are never cut.
    """
    module, is_bias = (path[-2], path[-1] == "bias") if path[-1] in ("kernel", "bias") else (path[-1], False)
    if module == "embedding":
        return split(mesh, shape, (ALL, None))
    if module in ("lm_head", "fc"):  # columns are words; the tapped states that `fc` reads are whole everywhere
        return split(mesh, shape, (None, ALL) if module == "lm_head" else (ALL, None))
    if "layers" not in path:
        return P()
    q_axes, kv_axes = head_axes(*heads[path[path.index("layers") + 1]], mesh)
    columns = {"q_proj": q_axes, "k_proj": kv_axes, "v_proj": kv_axes, "gate_proj": ALL, "up_proj": ALL}
    rows = {"o_proj": q_axes, "down_proj": ALL}
    if module in columns:
        return split(mesh, shape, (*(None,) * (len(shape) - 1), columns[module]))
    return split(mesh, shape, (None, rows[module], None)) if module in rows and not is_bias else P()


def placement(heads: Sequence[tuple[int, int]], mesh: Mesh | None, copies: bool = False) -> Place:
    """How a model's parameters get onto the mesh, one by one; without a mesh, onto the default device.

    `copies`: every row of `data` has the whole model, divided over `model` alone.
    """
    if mesh is None:
        return lambda path, array: jnp.asarray(array)
    if copies:
        return lambda path, array: shared_out(array, mesh, row_spec(path, array.shape, heads, mesh))
    return lambda path, array: jax.device_put(
        array, NamedSharding(mesh, weight_spec(tuple(path), array.shape, heads, mesh))
    )


def row_spec(
    path: Sequence[Any], shape: Sequence[int], heads: Sequence[tuple[int, int]], mesh: Mesh | AbstractMesh
) -> P:
    """As `weight_spec`, over `model` alone: every row of `data` has the whole parameter."""
    row = AbstractMesh((1, mesh.shape["model"]), mesh.axis_names, axis_types=mesh.axis_types)
    return P(*("model" if axes else None for axes in weight_spec(tuple(path), shape, heads, row)))


def shared_out(array: np.ndarray | jax.Array, mesh: Mesh, spec: P) -> jax.Array:
    """An array that every process has whole, on the mesh of all: each device gets its part."""
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda part: host[part])


def place_tree(params: Any, place: Place) -> Any:
    """All parameters of nested dicts and tuples, placed."""
    names = lambda path: tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, array: place(names(path), array), params)


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays that every device of the mesh holds whole."""
    return jax.device_put(tree, NamedSharding(mesh, P())) if mesh else tree


def place_words(table: jax.Array, mesh: Mesh | None, whole: bool = False) -> jax.Array:
    """A table with a row for each word, split over the words; `whole`: replicated."""
    spec = P() if whole or not mesh else split(mesh, table.shape, (ALL, *(None,) * (table.ndim - 1)))
    return jax.device_put(table, NamedSharding(mesh, spec)) if mesh else table


# ----------------------------------------------------------------------------------- whole while they are computed with


@flax.struct.dataclass
class Part(nn.meta.AxisMetadata):
    """A device's part of a parameter, inside `shard_map`: the Flax module that reads it gets it whole, in `dtype`.

    `axis` counts from the end (-1), so that it stays right for a layer of a stack; the mesh's `axes` divide it.
    Gradients are summed over the devices in the part's own dtype; each gets those of its part.
    """

    value: jax.Array
    axis: int = flax.struct.field(pytree_node=False)
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False)
    dtype: jnp.dtype = flax.struct.field(pytree_node=False)

    def astype(self, dtype: jnp.dtype) -> "Part":
        """Gathered in another dtype."""
        return self.replace(dtype=jnp.dtype(dtype))

    def unbox(self) -> jax.Array:
        return _gather(self.value.ndim + self.axis, self.axes, self.dtype, self.value.dtype, self.value)

    def replace_boxed(self, value: jax.Array) -> "Part":
        return self.replace(value=value)

    def add_axis(self, index: int, params: dict) -> "Part":
        return self

    remove_axis = add_axis


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather(axis: int, axes: tuple[str, ...], dtype: jnp.dtype, own: jnp.dtype, part: jax.Array) -> jax.Array:
    return jax.lax.all_gather(part.astype(dtype), axes, axis=axis, tiled=True)


def _scatter(
    axis: int, axes: tuple[str, ...], dtype: jnp.dtype, own: jnp.dtype, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    gradient = gradient.astype(own)
    if axis:
        return (jax.lax.psum_scatter(gradient, axes, scatter_dimension=axis, tiled=True),)
    # Of rows in a dimension of their own: TPU's compiler makes an all-reduce of the tiled form where they are no 2^n.
    parts = gradient.reshape(jax.lax.psum(1, axes), -1, *gradient.shape[1:])
    return (jax.lax.psum_scatter(parts, axes, scatter_dimension=0, tiled=False),)


_gather.defvjp(lambda *args: (_gather(*args), None), _scatter)


def is_part(x: Any) -> bool:
    return isinstance(x, Part)


def in_parts(params: Any, specs: Any) -> Any:
    """Inside `shard_map`: what a device has of parameters that come in by `specs`, as `Part`s where it is not all."""

    def one(a: jax.Array, spec: P) -> Any:
        at = next((n for n, axes in enumerate(spec) if axes), None)
        if at is None:
            return a
        axes = spec[at] if isinstance(spec[at], tuple) else (spec[at],)
        return Part(a, at - a.ndim, axes, a.dtype)

    return jax.tree.map(one, params, specs)


def layer_by_layer(step: Callable[..., Any], stacks: Any) -> Callable[..., Any]:
    """A scan's step that gathers a layer's parts again for the gradient: else all layers would be kept whole."""
    if not any(map(is_part, jax.tree.leaves(stacks, is_leaf=is_part))):
        return step
    # Products are kept, so little is computed twice; a scan's body needs no barrier against being merged with itself.
    return jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, prevent_cse=False)
