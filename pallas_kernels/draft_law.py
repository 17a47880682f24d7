"""The law q of drafted tokens, as the residual asks for it: its logits in memory, or what makes them again.

Logits are warped: over temperature, -inf at what can never be drafted. `row`: of one draft of each request, over the
draft vocabulary; `at`: at some draft ids of it.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Written:
    """All logits in memory."""

    warped_RxKxVd: jax.Array

    def row(self, draft_R: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self.warped_RxKxVd, draft_R[:, None, None], axis=1)[:, 0]

    def at(self, draft_R: jax.Array, place_RxC: jax.Array) -> jax.Array:
        return self.warped_RxKxVd[jnp.arange(len(draft_R))[:, None], draft_R[:, None], place_RxC]


@flax.struct.dataclass
class Speech:
    """What drafts are made of but for the in-block head's factors: logits = base + factor · correction."""

    base_KxRxVd: jax.Array
    correction_Vdxr: jax.Array
    token_ids_Vd: jax.Array  # target ids of the draft vocabulary, increasing
    num_tokens: int = flax.struct.field(pytree_node=False)  # target ids from there on stand for no token


@flax.struct.dataclass
class Factored:
    """Logits that are written nowhere: they are computed again where they are asked for. In at least float32."""

    speech: Speech
    factor_RxKxr: jax.Array
    temperature_R: jax.Array  # 1 where tokens are drawn without noise

    def row(self, draft_R: jax.Array) -> jax.Array:
        base_RxVd, factor_Rxr = self._of_draft(draft_R)
        logits = base_RxVd + jnp.einsum("rf,vf->rv", factor_Rxr, self.speech.correction_Vdxr)
        return self._warped(logits, self.speech.token_ids_Vd)

    def at(self, draft_R: jax.Array, place_RxC: jax.Array) -> jax.Array:
        base_RxVd, factor_Rxr = self._of_draft(draft_R)
        bias = jnp.einsum("rf,rcf->rc", factor_Rxr, self.speech.correction_Vdxr[place_RxC])
        logits = jnp.take_along_axis(base_RxVd, place_RxC, axis=1) + bias
        return self._warped(logits, self.speech.token_ids_Vd[place_RxC])

    def _of_draft(self, draft_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        request = jnp.arange(len(draft_R))
        return self.speech.base_KxRxVd[draft_R, request], self.factor_RxKxr[request, draft_R]

    def _warped(self, logits: jax.Array, token_ids: jax.Array) -> jax.Array:
        wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / self.temperature_R[:, None]
        return jnp.where(token_ids < self.speech.num_tokens, wide, -jnp.inf)


Law = Written | Factored
