"""What is counted of a program: its products by its trace, its collectives by its text."""

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.planning.chips import CHIPS, GIB
from dspark_jax.planning.collectives import sent_bytes, traffic
from dspark_jax.planning.counting import operations, products, seconds

A = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((3, 8, 8), jnp.bfloat16)


def count(function, *shapes, loops=()) -> float:
    return operations(products(jax.jit(function).trace(*shapes).jaxpr, loops))


def test_a_product_is_counted_as_xla_counts_it():
    function = lambda a, w: jnp.einsum("nh,lhk->lnk", a, w[:, :, :5])  # noqa: E731
    xla = jax.jit(function).lower(A, W).compile().cost_analysis()["flops"]
    assert count(function, A, W) == 2 * 4 * 8 * 3 * 5 == pytest.approx(xla, rel=0.3)  # XLA also counts conversions


def test_loops_count_as_often_as_they_run():
    layer = lambda a, w: (a @ w.astype(a.dtype), None)  # noqa: E731
    scanned = lambda a, w: jax.lax.scan(layer, a, w)[0]  # noqa: E731
    assert count(scanned, A, W) == 3 * 2 * 4 * 8 * 8

    def walked(a, w, n):
        return jax.lax.fori_loop(0, n, lambda _, a: jax.lax.fori_loop(0, n, lambda i, a: scanned(a, w), a), a)

    whole = jax.ShapeDtypeStruct((), jnp.int32)
    for loops, times in (((), 1), ((5,), 5), ((5, 2.5), 12.5)):
        assert count(walked, A, W, whole, loops=loops) == times * 3 * 2 * 4 * 8 * 8


def test_of_branches_the_largest_counts():
    def either(a, w):
        return jax.lax.cond(a[0, 0] > 0, lambda: a @ w[0] @ w[1], lambda: a @ w[2])

    assert count(either, A, W) == 2 * 2 * 4 * 8 * 8


def test_gradients_and_their_checkpoints_are_seen():
    def loss(w, a):
        return jnp.sum(jax.checkpoint(lambda w: jnp.tanh(a @ w))(w))

    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    # Forward, forward again, and the gradient of w.
    assert count(jax.grad(loss), w, A) in (2 * 2 * 4 * 8 * 8, 3 * 2 * 4 * 8 * 8)


def test_time_is_the_longer_of_operations_and_bytes():
    chip = CHIPS["v5e"]._replace(operations=1e3, bandwidth=1e3)
    (one,) = products(jax.jit(jnp.matmul).trace(A, jax.ShapeDtypeStruct((8, 2), jnp.float32)).jaxpr)
    assert (one.operations, one.bytes) == (2 * 4 * 8 * 2, 4 * (4 * 8 + 8 * 2 + 4 * 2))
    assert seconds([one], chip, 2) == pytest.approx(one.bytes / 1e3 / 2)
    assert seconds([one], chip._replace(bandwidth=1e9), 1) == pytest.approx(one.operations / 1e3)


HLO = """
HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%layer (p: (s32[], bf16[4,96])) -> (s32[], bf16[4,96]) {
  %all-reduce.1 = bf16[4,96]{1,0:T(8,128)(2,1)} all-reduce(%fusion), replica_groups={{0,1},{2,3}}, to_apply=%add
  %ag = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%p), replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}
}

%cond (p: (s32[], bf16[4,96])) -> pred[] {
  %n = s32[]{:T(128)} constant(36), metadata={op_name="x"}
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT, metadata={op_name="y"}
}

%until (p: (s32[], bf16[4,96])) -> pred[] {
  %n = s32[]{:T(128)} get-tuple-element(%p), index=1
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%few (a: f32[2]) -> f32[2] {
  %cp = f32[2]{0} collective-permute(%a), source_target_pairs={{0,1}}
}

%many (a: f32[2]) -> f32[2] {
  %rs = f32[2]{0} reduce-scatter(%a), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main.5 (x: f32[8]) -> f32[8] {
  %w = (s32[], bf16[4,96]) while(%t), condition=%cond, body=%layer, metadata={op_name="z"}
  %v = (s32[], bf16[4,96]) while(%t), condition=%until, body=%layer
  %c = f32[2] conditional(%i, %a, %b), branch_computations={%few, %many}
}
"""


def test_collectives_count_as_often_as_their_loops_run():
    reduced, gathered = 2 * (4 * 96 * 2) / 2, 16 * 8 * 2 * 7 / 8
    found = traffic(HLO, 8)
    assert found["all-reduce"] == pytest.approx((37, 37 * reduced))
    assert found["all-gather"] == pytest.approx((37, 37 * gathered))
    assert found["reduce-scatter"] == pytest.approx((1, 2 * 4 * 3)) and "collective-permute" not in found
    assert traffic(HLO, 8, loops=(4,))["all-reduce"].count == 40
    assert sent_bytes(HLO, 8) == pytest.approx(reduced + gathered + 2 * 4 * 3 + 8)


FUSED = """
%start (a: bf16[2,8]) -> (bf16[2,8], bf16[16,8]) {
  %ag.1 = bf16[16,8]{1,0} all-gather(%a), replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="3"}
  ROOT %c = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}

%beside (a: bf16[2,8]) -> bf16[16,8] {
  ROOT %ag.2 = bf16[16,8]{1,0} all-gather(%a), replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="3"}
}

%done (a: bf16[2,8]) -> bf16[16,8] {
  %ag.3 = bf16[16,8]{1,0} all-gather(%a), replica_groups={{0,1,2,3,4,5,6,7}}, frontend_attributes={chain_id="3"}
  ROOT %c = bf16[16,8]{1,0} custom-call(%a, %ag.3), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[2,8]) -> bf16[16,8] {
  %s = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) fusion(%x), kind=kCustom, calls=%start
  %b = bf16[16,8]{1,0} fusion(%x), kind=kOutput, calls=%beside
  ROOT %d = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%done
}
"""


def test_a_collective_that_is_fused_with_what_runs_beside_it_counts_once():
    assert traffic(FUSED, 8) == {"all-gather": pytest.approx((1, 16 * 8 * 2 * 7 / 8))}


def test_chips_are_in_the_order_of_their_makers():
    assert CHIPS["v5e"].memory == 16 * GIB
    for name in ("memory", "bandwidth", "operations", "links"):
        assert getattr(CHIPS["v5e"], name) < getattr(CHIPS["v6e"], name) < 2 * getattr(CHIPS["v7x"], name)
