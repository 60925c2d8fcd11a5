"""How a policy enters: a name, a directory or a model becomes one that is trained on tree batches."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from torchrl_asyncgrpo.adapters import (
    add_adapter,
    check_trained,
    has_adapters,
    has_quantized_layers,
    keep_bits,
    lora_config,
    unwrapped,
)
from torchrl_asyncgrpo.modules.checkpoint import (
    TREE,
    as_dtype,
    check_attention,
    check_not_offloaded,
    load_model,
    no_head,
    several_processes,
)
from torchrl_asyncgrpo.modules.tree_attention import attention_kept_on_error, install
from torchrl_asyncgrpo.modules.tree_attention.features import attention_dropout

# What begins with the first says nothing without the second
_SWITCHES = (("bnb_4bit_", "load_in_4bit", True), ("lora_", "lora_r", 16), ("use_", "lora_r", 16))


@dataclass
class ModelConfig:
    """Settings of a policy, as a script or a configuration file holds them; see :func:`model_kwargs`.

    A field that another one switches on, as ``lora_r`` does the rest of an adapter, is refused without it.

    Args:
        revision: branch, tag or commit of a model on the hub; None is its default branch.
        dtype: of the weights: ``"auto"`` for the checkpoint's, a name such as ``"bfloat16"``, or a torch dtype.
            ``"float16"`` suits a base under an adapter, which is kept in float32; AdamW does not train in it.
        attention: ``"auto"``, ``"reference"``, ``"segments"`` or ``"flex"``; see ``TreeActor``.
        trust_remote_code: run the model's own code from the hub.
        device_map: of transformers; None loads to the CPU, or a quantised model to the current device. One that
            offloads layers (``"auto"`` where the devices are too small) is refused by ``load_policy``. Several
            processes always use None.
        load_in_4bit: keep linear layers in 4 bits of bitsandbytes, for training adapters on them.
        load_in_8bit: the same in 8 bits. Activations are quantised, too, so that an engine, which serves what the
            weights stand for, differs by more than rounding.
        bnb_4bit_quant_type: data type of the 4 bits.
        bnb_4bit_use_double_quant: quantise the scales of the 4 bits, too.
        lora_r: rank of a LoRA adapter, >= 1; None trains all weights.
        lora_alpha: the adapter adds ``lora_alpha / lora_r`` · B · A; above 0.
        lora_dropout: probability in [0, 1); in train mode only.
        lora_target_modules: names of modules, or ``"all-linear"`` for all but the output head.
        lora_modules_to_save: modules that are trained whole beside the adapter; a string is one name.
        use_rslora: scale by ``lora_alpha / sqrt(lora_r)``, arXiv:2312.03732.
        use_dora: train norms of weight rows apart, arXiv:2402.09353.
    """

    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False
    device_map: str | dict[str, Any] | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_use_double_quant: bool = False
    lora_r: int | None = None
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: str | Sequence[str] = "all-linear"
    lora_modules_to_save: str | Sequence[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False

    def __post_init__(self) -> None:
        as_dtype(self.dtype)
        check_attention(self.attention)
        if self.attention is None:
            raise ValueError("attention=None; leave it 'auto' here, and give None, the model's own, to load_policy.")
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit=True and load_in_8bit=True; a weight has one of them.")
        if self.bnb_4bit_quant_type not in ("nf4", "fp4"):
            raise ValueError(f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r}; choose 'nf4' or 'fp4'.")
        if self.lora_r is not None and not (type(self.lora_r) is int and self.lora_r >= 1):
            raise ValueError(f"lora_r={self.lora_r!r}; a rank is an integer >= 1, and None trains all weights.")
        if not 0 < self.lora_alpha < math.inf:
            raise ValueError(
                f"lora_alpha={self.lora_alpha}; it must be above 0: at 0 the adapter is never trained, and below it "
                "takes away what it learns."
            )
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout={self.lora_dropout}; a probability of dropout is in [0, 1).")
        if not self.lora_target_modules:
            raise ValueError(
                f"lora_target_modules={self.lora_target_modules!r} names no module; name some, such as ['q_proj', "
                "'v_proj'], or 'all-linear'."
            )
        for field in fields(self):
            value = vars(self)[field.name]
            for prefix, switch, on in _SWITCHES:
                off = field.name.startswith(prefix) and field.name != switch and not vars(self)[switch]
                if off and value != field.default:
                    raise ValueError(
                        f"{field.name}={value!r} without {switch}, so that it would be ignored; set {switch}, to {on} "
                        f"for instance, or leave {field.name} out."
                    )


def model_kwargs(config: ModelConfig) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that a configuration stands for, to look at and change before they are used.

    Args:
        config: the settings.

    Returns:
        A new dict for ``load_policy(model, model_init_kwargs=...)``, ``reference_policy`` and ``load_tokenizer``. The
        device map is None under several processes, and else the current device for a quantised model without one.

    Raises:
        ImportError: if quantisation is asked for and bitsandbytes is not installed.
    """
    dtype = as_dtype(config.dtype)
    kwargs: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if config.revision is not None:
        kwargs["revision"] = config.revision
    if config.attention != "auto":
        kwargs["attn_implementation"] = TREE + config.attention
    device_map = copy.deepcopy(config.device_map)
    if config.load_in_4bit or config.load_in_8bit:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ImportError(
                f"load_in_{4 if config.load_in_4bit else 8}bit=True and bitsandbytes is not installed: "
                "pip install 'torchrl-asyncgrpo[bitsandbytes]'."
            )
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=config.load_in_4bit,
            load_in_8bit=config.load_in_8bit,
            bnb_4bit_quant_type=config.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=config.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=None if dtype == "auto" else dtype,
        )
        device_map = kbit_device_map() if device_map is None else device_map
    kwargs["device_map"] = None if several_processes() else device_map
    return kwargs


def peft_config(config: ModelConfig) -> Any:
    """The ``LoraConfig`` of a configuration for ``load_policy(model, peft_config=...)``; None without ``lora_r``.

    Raises:
        ImportError: if peft is not installed.
    """
    if config.lora_r is None:
        return None
    whole = config.lora_modules_to_save
    return lora_config(
        r=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.lora_target_modules,
        modules_to_save=[whole] if isinstance(whole, str) else None if whole is None else list(whole),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )


def load_policy(
    model: str | os.PathLike[str] | nn.Module,
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    peft_config: Any = None,
    attention: str | None = "auto",
    gradient_checkpointing: bool = False,
) -> Any:
    """Load a policy, switch its attention to a tree backend, and wrap it with an adapter.

    Args:
        model: the name of a model on the hub, a directory, or a model, which is used as it is.
        model_init_kwargs: arguments of ``from_pretrained``, as :func:`model_kwargs` makes them; not changed. An
            ``attn_implementation`` ``"tree_..."`` names the backend.
        peft_config: peft's configuration of an adapter, such as ``LoraConfig``; None trains all weights.
        attention: ``"auto"``, ``"reference"``, ``"segments"`` or ``"flex"``, which ``TreeActor`` chooses anew by its
            own argument; None leaves the model the attention that it has or that ``attn_implementation`` names, for an
            actor over padding-free rows.
        gradient_checkpointing: recompute layers in the backward. The policy is put into train mode, in which alone
            transformers does that.

    Returns:
        A ``PreTrainedModel``, the given object where one was given; with ``peft_config`` peft's wrapper around it.

    Raises:
        TypeError: if ``model`` is a module other than a transformers model, bare or wrapped by peft.
        ValueError: naming the field: an unknown dtype, revision, attention or argument; a quantised instance asked for;
            a model without a language-model head, or whose layers (recurrent ones, for instance) no tree attention
            serves; weights that a checkpoint lacks; a device map that offloads layers; an adapter for a model that
            has one, one that cannot be trained, or a frozen one. An instance whose adapter is refused is as it was.
        OSError: if there is no such model or revision.
    """
    check_attention(attention)
    kwargs = dict(model_init_kwargs or {})
    if isinstance(model, nn.Module):
        policy: Any = _given(model, kwargs)
    else:
        attention = _backend(attention, kwargs)
        policy = load_model(model, kwargs, attention=attention)
    base = unwrapped(policy)
    check_not_offloaded(base)
    keep_bits(base)
    with attention_kept_on_error(base):
        if attention is not None:
            install(base, attention)
        if peft_config is None:
            check_trained(policy)
        else:
            policy = add_adapter(policy, peft_config, revision=None if policy is model else kwargs.get("revision"))
    if peft_config is None and has_quantized_layers(base) and not has_adapters(base):
        warnings.warn(
            "quantization_config without peft_config: the quantised layers are not trained, only what is left in full "
            "precision. Pass peft_config, such as LoraConfig.",
            stacklevel=2,
        )
    if gradient_checkpointing:
        # for adapters transformers has the embeddings ask for gradients, too, without which some checkpoints have none
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy.train()
        if attention is not None:
            install(base, attention)  # attention dropout acts from now on
    _warn_of_dropout(base, peft_config)
    return policy


def kbit_device_map() -> dict[str, int | str]:
    """All of a quantised model on the current CUDA device, or the CPU: its layers are quantised where they will run."""
    return {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"}


def run_name(model: str | os.PathLike[str] | nn.Module) -> str:
    """A name for the run of a policy: where its weights come from, without the path.

    Args:
        model: what ``load_policy`` was given.

    Returns:
        The last part of the name or directory; of an instance, that of its configuration (``name_or_path``), or the
        model type where it was built from a configuration.
    """
    if isinstance(model, nn.Module):
        config = unwrapped(model).config
        source = config.name_or_path or config.model_type
    else:
        source = os.fspath(model)
    return Path(source).name or Path(source).resolve().name


def _given(model: nn.Module, kwargs: Mapping[str, Any]) -> nn.Module:
    """The instance itself."""
    base = unwrapped(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}; give a transformers causal language model, bare or in a PeftModel, a "
            "directory, or a name on the hub."
        )
    wanted = [name for name in ("quantization_config", "load_in_4bit", "load_in_8bit") if kwargs.get(name)]
    if wanted:
        raise ValueError(
            f"{wanted[0]} was given with an instance of {type(base).__name__}, whose weights are there already; give "
            "the name or directory it is loaded from instead, or an instance that was loaded with it."
        )
    if kwargs:
        warnings.warn(
            f"model_init_kwargs ({', '.join(kwargs)}) are ignored: the model is an instance of {type(base).__name__}, "
            "loaded already.",
            stacklevel=3,
        )
    if base.get_output_embeddings() is None:
        raise ValueError(no_head(f"the model, a {type(base).__name__},"))
    return model


def _backend(attention: str | None, kwargs: Mapping[str, Any]) -> str | None:
    """The backend that the arguments name, where ``attention`` leaves it to them."""
    implementation = kwargs.get("attn_implementation")
    if implementation is None or attention is None:
        return attention
    if not str(implementation).startswith(TREE):
        warnings.warn(
            f"attn_implementation={implementation!r} is ignored: a policy runs over prefix trees, through a backend "
            f"such as '{TREE}segments' or '{TREE}flex'.",
            stacklevel=3,
        )
        return attention
    named = implementation.removeprefix(TREE)
    if attention not in ("auto", named):
        raise ValueError(f"attention={attention!r} and attn_implementation={implementation!r}; give one of them.")
    return named


def _warn_of_dropout(base: PreTrainedModel, peft_config: Any) -> None:
    rates = {module.p for module in base.modules() if isinstance(module, nn.Dropout)}
    rates = {rate for rate in rates | {attention_dropout(base.config.get_text_config())} if rate > 0}
    if rates and (base.training or peft_config is not None):
        warnings.warn(
            f"the policy has dropout (p={', '.join(map(str, sorted(rates)))}), which acts in train mode: log-probs in "
            "training then differ from those of sampling, and the ratio of unchanged weights is not 1. Set it to 0.",
            stacklevel=3,
        )
