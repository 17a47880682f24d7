"""The yardstick of `bench`: the same weights in PyTorch's `transformers`, on the CPU, with as many threads."""

import dataclasses
import importlib.util
import inspect
import time
from typing import Any

import jax
import numpy as np

from dspark_jax.interop.families import layers_to_tensors
from dspark_jax.interop.target_io import Target


def load_transformers(target: Target, threads: int) -> tuple[Any | None, str]:
    """A model of `transformers` with the target's weights and dtype; or None, and why there is none."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return None, f"{' and '.join(missing)} not installed: pip install torch transformers"
    if jax.default_backend() != "cpu":
        return None, "it is compared on CPU only: set JAX_PLATFORMS=cpu"
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf_settings(target)))
    model.load_state_dict({name: torch.from_numpy(np.array(a, np.float32)) for name, a in hf_tensors(target).items()})
    return model.to(getattr(torch, target.dtype.name)).eval(), ""


def hf_settings(target: Target) -> dict[str, Any]:
    """A target's sizes, as arguments of `AutoConfig.for_model`."""
    c, attention = target.config, target.config.attention[0]
    details = dataclasses.asdict(attention.rope)
    rope = {"rope_theta": details.pop("theta"), "rope_type": details.pop("kind")}
    if rope["rope_type"] != "default":
        rope |= {name: value for name, value in details.items() if value is not None}
    return {
        "model_type": c.family, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers, "num_attention_heads": c.num_heads,
        "num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_dim, "rms_norm_eps": c.rms_eps,
        "max_position_embeddings": c.max_length, "rope_parameters": rope, "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias, "tie_word_embeddings": c.tied,
    }  # fmt: skip


def hf_tensors(target: Target) -> dict[str, Any]:
    """A target's weights under Hugging Face's names."""
    params, layers = target.params, layers_to_tensors(target.params["layers"], target.config)
    head = params["embedding"] if target.config.tied else params["lm_head"]["kernel"].T
    return {
        "model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]["scale"],
        "lm_head.weight": head, **{f"model.{name}": a for name, a in layers.items()},
    }  # fmt: skip


class TransformersStep:
    """One greedy step with the library's own cache, always behind the same context. Calling it gives its seconds."""

    def __init__(self, model: Any, prompts: list[list[int]]):
        import torch
        import transformers

        self._model, self._mode, self.next_tokens = model, torch.inference_mode, []
        ids, self._cache = torch.tensor(prompts), transformers.DynamicCache(config=model.config)
        # Newer versions renamed the argument.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if renamed else "past_key_values"
        self._run(ids[:, :-1])
        self._last = ids[:, -1:]

    def __call__(self) -> float:
        start = time.perf_counter()
        self._run(self._last)
        seconds = time.perf_counter() - start
        self._cache.crop(-1)
        return seconds

    def _run(self, ids: Any) -> None:
        with self._mode():
            out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: self._cache})
            self.next_tokens = out.logits[:, -1].argmax(-1).tolist()
