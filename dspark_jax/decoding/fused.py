"""Verification by the kernel that reads the head once, where nothing asks for the logits themselves."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspark_jax.decoding.draft import Proposal
from dspark_jax.decoding.sampling import SlotSampling
from dspark_jax.decoding.verify import Verdict
from dspark_jax.models.layers import Params
from dspark_jax.models.target import Decoder
from pallas_kernels.fused_verify import Drafts, Head, fused_verify, serves
from pallas_kernels.ragged_attention import Rows


def target_head(target: Decoder, params: Params, num_tokens: int) -> Head:
    """The head of `Decoder.logits`, as the kernel wants it."""
    config = target.config
    weight = params["embedding"] if config.tied else params["lm_head"]["kernel"]
    return Head(weight, num_tokens, config.softcap, transposed=not config.tied)


def reads_head(kernels: str, head: Head, hidden_NxH: jax.Array) -> bool:
    """Whether there is a kernel that takes this head and these hidden states."""
    if kernels == "gpu":
        from pallas_kernels.fused_verify import gpu

        return not gpu.unsupported(hidden_NxH, head)
    return kernels == "tpu"


def verify_hidden(
    hidden_NxH: jax.Array,
    head: Head,
    rows: Rows,
    proposal: Proposal | None,
    token_ids_Vd: jax.Array | None,
    sampling: SlotSampling,
    sampler: str,
    backend: str,
    from_logits: Callable[[], Verdict],
) -> Verdict:
    """`verify` from hidden states; `from_logits` while a request keeps more tokens than the kernel's candidates."""
    drafts = None
    if proposal is not None:
        drafts = Drafts(proposal.token_RxK, proposal.log_q_RxK, proposal.law, token_ids_Vd)

    def by_kernel() -> tuple[Verdict, jax.Array]:
        out = fused_verify(hidden_NxH, head, rows, drafts, sampling.warp, sampling.seed, sampler, backend)
        return Verdict(out.accepted_R, out.next_R), out.complete

    if not (sampling.warp.sampled and sampling.warp.limited):
        return by_kernel()[0]

    def nothing() -> tuple[Verdict, jax.Array]:
        like = jax.eval_shape(by_kernel)
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

    verdict, complete = jax.lax.cond(serves(sampling.warp), by_kernel, nothing)
    return jax.lax.cond(complete, lambda: verdict, from_logits)
