"""Where tree attention meets transformers: registration, installation, and the function that layers call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torchrl_asyncgrpo.data.layer_window import layer_window
from torchrl_asyncgrpo.data.rope_length import check_rope_length
from torchrl_asyncgrpo.modules.tree_attention import workers
from torchrl_asyncgrpo.modules.tree_attention.features import BACKENDS, check_features, refuse
from torchrl_asyncgrpo.modules.tree_attention.flex import tree_flex_attention
from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout, is_tree_mask
from torchrl_asyncgrpo.modules.tree_attention.reference import reference_attention, softmax_attention
from torchrl_asyncgrpo.modules.tree_attention.segments import segments_attention


def install(model: PreTrainedModel, backend: str = "auto") -> str:
    """Switch a model's attention to tree attention; its own code keeps running.

    Afterwards ``model(input_ids=input_ids_T[None], **layout.model_inputs())`` runs over a tree, and every call without
    a layout, ``generate`` included, computes what ``attn_implementation="sdpa"`` computes ("eager" for models with
    sinks or softcapping). ``model.set_attn_implementation("sdpa")`` undoes it.

    Args:
        model: a causal transformers ``PreTrainedModel``, bare or wrapped by peft.
        backend: "reference", "segments", "flex", or "auto": flex on CUDA, segments elsewhere, reference where that
            one cannot honour the model.

    Returns:
        The name of the backend that was installed.

    Raises:
        ValueError: if the backend is unknown, or the model has a feature that it cannot honour; the model is unchanged.
    """
    if backend == "auto":
        backend = _choose(model)
    if backend not in BACKENDS:
        raise ValueError(f"Unknown tree attention backend {backend!r}; possible are 'auto', {str(BACKENDS)[1:-1]}.")
    check_features(model, backend)
    model.set_attn_implementation(f"tree_{backend}")
    if model.config._attn_implementation != f"tree_{backend}":
        refuse("attention that cannot be switched after construction", model.config.model_type, backend)
    if backend == "segments" and next(model.parameters()).device.type == "cpu":
        workers.pool(torch.get_num_threads())
    return backend


@contextlib.contextmanager
def attention_kept_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Give a model, and models inside it, the attention back that they have now, if the block raises."""
    own = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [(config, config._attn_implementation) for outer in own for config in _configurations(outer)]
    try:
        yield
    except BaseException:
        for config, attention in before:  # an inner one after the outer, which sets both
            config._attn_implementation = attention
        raise


def _configurations(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name)) is not None:
            yield from _configurations(inner)


def _choose(model: PreTrainedModel) -> str:
    backend = "flex" if next(model.parameters()).device.type == "cuda" else "segments"
    try:
        check_features(model, backend)
    except ValueError:
        return "reference"
    return backend


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    backend: str,
    attend: Callable[..., Tensor],
    tree: TreeLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' layers call, for any backend.

    Args:
        module: the calling attention layer.
        query, key, value: [1, H, T, D], [1, H / G, T, D] twice.
        attention_mask: the empty mask of :meth:`TreeLayout.model_inputs` on a tree, sdpa's mask otherwise.
        backend, attend: name and function of the backend.
        tree: the layout, or None for an ordinary forward.
        scaling, dropout, sliding_window, softcap, s_aux: as transformers passes them; s_aux are sinks, [H].

    Returns:
        ([1, T, H, D], None).

    Raises:
        ValueError: if the layout and the inputs disagree, or the layer asks for what the backend cannot honour.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree is None and not is_tree_mask(attention_mask):
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        visible_QK = _sdpa_visibility(attention_mask, query, key)
        output = softmax_attention(
            query, key, value, visible_QK, scaling=scaling, softcap=softcap, sinks_H=s_aux, dropout=dropout
        )
        return output.transpose(1, 2).contiguous(), None
    _check_call(module, query, key, attention_mask, tree)
    _check_layer(module, backend, sliding_window, softcap, dropout, kwargs)
    query, key, value = _autocast(query, key, value)
    output = attend(
        query,
        key,
        value,
        tree,
        scaling=scaling,
        sliding_window=sliding_window,
        **({} if softcap is None else {"softcap": softcap}),
        **({} if dropout == 0.0 else {"dropout": dropout}),
        sinks_H=s_aux,
    )
    return output.transpose(1, 2).contiguous(), None


def _check_call(module: nn.Module, query: Tensor, key: Tensor, attention_mask: Any, tree: TreeLayout | None) -> None:
    config: Any = module.config
    if tree is None:
        raise ValueError(
            f"{type(module).__name__} was given the mask of a tree without the tree: model type "
            f"{config.model_type!r} does not pass keyword arguments on to its attention function; no tree "
            "attention backend can serve it."
        )
    if not is_tree_mask(attention_mask):
        raise ValueError(
            "tree= was given without the mask that belongs to it; call model(..., **layout.model_inputs())."
        )
    T = tree.num_nodes
    if query.shape[0] != 1 or query.shape[2] != T or key.shape[2] != T:
        raise ValueError(
            f"The layout has {T} nodes, but the layer attends with queries {tuple(query.shape)} over keys "
            f"{tuple(key.shape)}; give input_ids [1, {T}] and no past key values."
        )
    if tree.device != query.device:
        raise ValueError(
            f"The layout is on {tree.device} and the model on {query.device}; build it on the model's device."
        )
    check_rope_length(config, tree.max_depth + 1)


def _check_layer(
    module: nn.Module, backend: str, sliding_window: int | None, softcap: float | None, dropout: float, kwargs: dict
) -> None:
    """What only a running layer tells: a mask-only model would otherwise lose its window without a word."""
    config: Any = module.config
    if softcap is not None and backend == "segments":
        refuse("logit softcapping", config.model_type, backend)
    if dropout > 0 and backend != "reference":
        refuse(
            f"attention dropout in training: {dropout} (or set it to 0, or call model.eval())",
            config.model_type,
            backend,
        )
    if kwargs.get("position_bias") is not None:
        refuse("relative position biases", config.model_type, backend)
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        refuse("bidirectional attention", config.model_type, backend)
    if sliding_window is None and layer_window(module) is not None:
        refuse("a sliding window that the layer does not pass to its attention function", config.model_type, backend)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast treats sdpa: rotary embeddings leave the keys wider than the values."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _sdpa_visibility(attention_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """The boolean mask that sdpa's convention means: True to attend, None for causal, or for one query for all."""
    if attention_mask is not None:
        return attention_mask if attention_mask.dtype == torch.bool else attention_mask > torch.finfo(query.dtype).min
    Q, K = query.shape[2], key.shape[2]
    visible_QK = torch.ones(Q, K, dtype=torch.bool, device=query.device)
    return visible_QK.tril() if Q > 1 else visible_QK


def _register(backend: str, attend: Callable[..., Tensor]) -> None:
    AttentionInterface.register(f"tree_{backend}", partial(tree_attention_forward, backend=backend, attend=attend))
    AttentionMaskInterface.register(f"tree_{backend}", sdpa_mask)


_register("reference", reference_attention)
_register("segments", segments_attention)
_register("flex", tree_flex_attention)
