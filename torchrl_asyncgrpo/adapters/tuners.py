"""Everything that knows peft: a model with adapters, made, checked, switched off, and merged without being written.

Shapes: M × K is the weight of the layer that an adapter stands on, as its checkpoint lays it out.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_asyncgrpo.adapters.quantized import is_quantized
from torchrl_asyncgrpo.adapters.snapshot import Snapshot

_INSTALL = "pip install 'torchrl-asyncgrpo[peft]'"
# Of peft's ``init_lora_weights``: the base is written, so that base and adapter are together what the base was
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_LEAVE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
_KNOWN_VARIANTS = {"DoraLinearVariant", "DoraEmbeddingVariant"}


def lora_config(*, r: int, alpha: int, dropout: float, target_modules: str | Sequence[str], **options: Any) -> Any:
    """Make peft's ``LoraConfig`` of a causal language model.

    Args:
        r: rank, >= 1.
        alpha: the delta is ``alpha / r`` · B · A.
        dropout: probability in [0, 1).
        target_modules: names of modules, or ``"all-linear"``: all but the output head.
        options: further fields of ``LoraConfig``.

    Raises:
        ImportError: if peft is not installed.
    """
    peft = _import_peft("lora_r")
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    return peft.LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM", **options
    )


def add_adapter(model: PreTrainedModel, peft_config: Any, *, revision: str | None = None) -> Any:
    """Wrap a model with a new adapter; everything else in it is frozen.

    Args:
        model: without adapters; its modules are replaced by those of the adapter.
        peft_config: peft's configuration of the adapter, such as ``LoraConfig``; it is not changed.
        revision: of the model on the hub, which a saved adapter names, for its base to be found again.

    Returns:
        The ``PeftModel``.

    Raises:
        ImportError: if peft is not installed.
        ValueError: if the model has an adapter already, or the configuration is one that tree batches cannot train.
        Exception: what peft raises of a configuration that it cannot put on this model. In either case the model is
            as it was.
    """
    peft = _import_peft("peft_config")
    if has_adapters(model):
        raise ValueError(
            f"peft_config={type(peft_config).__name__}(...) was given for a {type(model).__name__} that has an adapter "
            f"already ({', '.join(_adapter_names(model))}): a second one would be trained on top of it. Leave "
            "peft_config out, or merge the first one (merge_and_unload) and pass what that returns."
        )
    if not isinstance(peft_config, peft.PeftConfig):
        raise ValueError(f"peft_config is a {type(peft_config).__name__}; give a configuration of peft, as LoraConfig.")
    if peft_config.is_prompt_learning or peft_config.is_adaption_prompt:
        raise ValueError(_more_than_layers(peft_config))
    config = copy.deepcopy(peft_config)
    config.task_type = config.task_type or "CAUSAL_LM"
    before = Snapshot(model, weights=not _leaves_the_base(config))
    try:
        policy = peft.get_peft_model(model, config, revision=revision)
        check_adapters(policy)
        check_trained(policy)
    except BaseException:
        before.restore()
        raise
    return policy


def unwrapped(model: nn.Module) -> Any:
    """The model inside a ``PeftModel``, the layers of its adapter in place; any other module itself.

    Raises:
        ValueError: if the wrapper does more than to put such layers in place, as prompt learning does.
    """
    if not _peft_is_used():
        return model
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model, PeftModel):
        return model
    tuner = model.base_model
    if not isinstance(tuner, BaseTuner) or type(tuner).forward is not BaseTuner.forward:
        raise ValueError(_more_than_layers(model.active_peft_config))
    return model.get_base_model()


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules of peft that stand in the place of a model's own, with their names."""
    if not _peft_is_used():
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield name, module


def has_adapters(model: nn.Module) -> bool:
    """Whether peft put anything into a model, active or not."""
    return any(True for _ in adapter_modules(model))


def check_adapters(model: nn.Module) -> None:
    """Check that the adapters of a model can be trained on tree batches; a model without any passes.

    Raises:
        ValueError: if one is on the output head, on an embedding that the head shares, merged into its base, or a
            variant of LoRA other than DoRA.
    """
    base = unwrapped(model)
    if not has_adapters(base):
        return
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in adapter_modules(base):
        if isinstance(module, BaseTunerLayer) and module.merged:
            raise ValueError(
                f"the adapter on {name} is merged into its base, so that it would get no gradient; call "
                "unmerge_adapter() first."
            )
        kinds = {type(v).__name__ for v in module.lora_variant.values()} if isinstance(module, LoraLayer) else set()
        if others := kinds - _KNOWN_VARIANTS:
            raise ValueError(
                f"the adapter on {name} is of the kind {', '.join(sorted(others)).replace('Variant', '')}, and only "
                "LoRA, rsLoRA and DoRA are known to be the same on tree batches as on rows: other kinds look at the "
                "place of a token in its sequence or at the batch as a whole, draw random numbers, or rewrite the base."
            )
    if isinstance(base, PreTrainedModel):
        _check_embeddings(base)


def check_trained(model: nn.Module) -> None:
    """Check that an optimizer has something to train; a frozen model without adapters passes.

    Raises:
        ValueError: if a model has adapters and nothing in it asks for a gradient.
    """
    if has_adapters(model) and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"the {type(unwrapped(model)).__name__} has an adapter ({', '.join(_adapter_names(model))}) and nothing in "
            "it asks for a gradient, so that it would not be trained; load the adapter with PeftModel.from_pretrained("
            "base, directory, is_trainable=True), and enable it where it is disabled."
        )


def trained_outside_adapters(model: nn.Module) -> list[str]:
    """Names of the parameters that are trained and that do not go away with the adapters: biases, for instance."""
    inside: set[int] = set()
    for _, module in adapter_modules(model):
        base = {id(parameter) for parameter in _original(module).parameters()}
        inside |= {id(parameter) for parameter in module.parameters()} - base
    return [name for name, p in unwrapped(model).named_parameters() if p.requires_grad and id(p) not in inside]


def changes_its_base(model: nn.Module) -> str | None:
    """The kind of initialisation of an adapter that takes a part of the base's weights out of it; None for others."""
    configs = vars(unwrapped(model)).get("peft_config", {})  # peft leaves it in the model whose layers it replaces
    kinds = [str(vars(config).get("init_lora_weights")) for config in configs.values()]
    return next((kind for kind in kinds if kind.lower().startswith(_CHANGE_THE_BASE)), None)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Run a model as it is without its adapters; which parameters are trained is as before afterwards."""
    modules = [module for _, module in adapter_modules(model) if not module.disable_adapters]
    trainable = [(parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()]
    try:
        for module in modules:
            module.enable_adapters(False)
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)


def plain_layer(module: nn.Module) -> tuple[nn.Module, list[Any]]:
    """The module that a model without adapters has in the place of ``module``, and the layers that add to its weights.

    Args:
        module: any module, a layer of an adapter or not.

    Returns:
        The module and its adapter layers, innermost first; ``module`` itself and none where it is no adapter's.

    Raises:
        ValueError: if it is of an adapter that cannot be merged.
    """
    if not _peft_is_used():
        return module, []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = [name for name in module.active_adapters if name in module.modules_to_save]
        on = bool(active) and not module.disable_adapters
        return plain_layer(module.modules_to_save[active[0]] if on else module.original_module)
    layers: list[Any] = []
    while isinstance(module, BaseTunerLayer):
        _check_mergeable(module)
        layers.insert(0, module)
        module = module.base_layer
    if isinstance(module, AuxiliaryTrainingWrapper):
        raise ValueError(_not_mergeable(module))
    return module, layers


def merged(layers: Sequence[Any], name: str, base: Tensor) -> Tensor:
    """A parameter with what the adapters add to it: ``base + scaling · B A``, or that of DoRA.

    DoRA scales the rows of the sum to trained norms m, m · (W + ΔW) / ‖W + ΔW‖: arXiv:2402.09353, equation 5.

    Args:
        layers: adapter layers of :func:`plain_layer`.
        name: of the parameter in the plain layer.
        base: the parameter, [M, K] if it is the weight; dequantised if it is kept in few bits. It is not written.

    Returns:
        A new tensor where an adapter adds to it, in float32 or wider. What peft adds to stacked experts it has rounded
        to their dtype.
    """
    if not layers:
        return base
    from peft.tuners.lora.layer import ParamWrapper

    for layer in layers:
        if layer.disable_adapters:
            continue
        target = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        for adapter in layer.active_adapters:
            if adapter in layer.merged_adapters or adapter not in layer.scaling:
                continue
            if name == target:
                base = _wide(base) + _delta(layer, adapter)
                if adapter in layer.lora_variant:
                    base = _with_norms(base, layer.lora_magnitude_vector[adapter].weight, layer.fan_in_fan_out)
            elif name == "bias" and layer.lora_bias[adapter]:
                base = _wide(base) + _wide(layer.lora_B[adapter].bias) * layer.scaling[adapter]
    return base


def _delta(layer: Any, adapter: str) -> Tensor:
    """What an adapter adds, as the base is laid out; peft's own is rounded to the adapter's dtype."""
    from peft.tuners.lora.layer import Embedding, ParamWrapper

    if isinstance(layer, ParamWrapper):
        return layer.get_delta_weight(adapter)
    turned = isinstance(layer, Embedding)
    if turned:
        A, B = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        A, B = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    delta_MK = _wide(B) @ _wide(A) * layer.scaling[adapter]
    return delta_MK.T if turned or layer.fan_in_fan_out else delta_MK


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _with_norms(sum_MK: Tensor, magnitude: Tensor, fan_in_fan_out: bool) -> Tensor:
    norm = torch.linalg.vector_norm(sum_MK, dim=0 if fan_in_fan_out else 1)
    factor = magnitude / norm
    return sum_MK * (factor if fan_in_fan_out else factor[:, None])


def _check_mergeable(layer: Any) -> None:
    from peft.tuners.lora.layer import Embedding, Linear, ParamWrapper

    if type(layer) not in (Linear, Embedding, ParamWrapper) and not (
        type(layer).__module__ == "peft.tuners.lora.bnb" and is_quantized(layer.get_base_layer())
    ):
        raise ValueError(_not_mergeable(layer))
    variants = {type(variant).__name__ for variant in layer.lora_variant.values()}
    several = len(layer.active_adapters) > 1
    if variants - {"DoraLinearVariant"} or (variants and (several or any(layer.lora_bias.values()))):
        raise ValueError(_not_mergeable(layer, f" with {', '.join(sorted(variants))}"))


def _not_mergeable(module: nn.Module, how: str = "") -> str:
    return (
        f"the adapter has a {type(module).__module__}.{type(module).__name__}{how}, and a merged push knows LoRA, "
        "rsLoRA and DoRA (one adapter, no lora_bias) on linear layers, also in 4 and 8 bits of bitsandbytes, LoRA on "
        "embeddings and stacked experts, and modules_to_save. Use one of these, or an engine that needs no push: "
        "TransformersEngine(model, copy_weights=False)."
    )


def _check_embeddings(model: PreTrainedModel) -> None:
    adapters = {id(module) for _, module in adapter_modules(model)}
    if id(model.get_output_embeddings()) in adapters:
        raise ValueError(
            f"the adapter is on the output head of {type(model).__name__}, whose logits are formed in chunks from its "
            "plain weight; take the head out of target_modules, modules_to_save and trainable_token_indices."
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # the weights and not the configuration, whose parts may contradict each other where a model sees images too
    if id(embedding) in adapters and _original(embedding).weight is getattr(head, "weight", None):
        raise ValueError(
            f"the adapter is on the input embedding of {type(model).__name__}, which is its output head as well "
            "(tie_word_embeddings): the two would differ, and no engine serves that. Take the embedding out of "
            "target_modules and modules_to_save."
        )


def _leaves_the_base(config: Any) -> bool:
    """Whether peft is known to write nothing to the weights of a model when it makes an adapter."""
    fields = vars(config)
    return (
        config.peft_type == "LORA"
        and fields["init_lora_weights"] in _LEAVE_THE_BASE
        and fields.get("kasa_config") is None
    )


def _original(module: Any) -> nn.Module:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module


def _adapter_names(model: nn.Module) -> list[str]:
    return sorted({name for _, module in adapter_modules(model) for name in module._get_available_adapters()})


def _more_than_layers(config: Any) -> str:
    return (
        f"peft_config is a {type(config).__name__}, which does more than to put layers in the place of others: "
        "prompts, routers and the like have no place in a tree batch. Use an adapter on layers, such as LoraConfig."
    )


def _peft_is_used() -> bool:
    """Whether this process imported peft; without it no model can hold anything of peft's."""
    return sys.modules.get("peft") is not None


def _import_peft(field: str) -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError(f"{field} was given and peft is not installed: {_INSTALL}.") from error
    return peft
