"""From a name or a directory to a causal language model: of the right class, checked before any weight is read."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from torchrl_asyncgrpo.data.pretrained import resolve_model
from torchrl_asyncgrpo.modules.tree_attention.features import BACKENDS, check_features

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TREE = "tree_"
# Arguments of from_pretrained that decide how weights are kept, and not what the configuration says
_NOT_OF_THE_CONFIG = ("quantization_config", "device_map")
_OF_THE_HUB = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")


def load_model(
    model: str | os.PathLike[str],
    model_init_kwargs: Mapping[str, Any] | None = None,
    *,
    attention: str | None = "auto",
) -> PreTrainedModel:
    """Load a causal language model that tree attention can serve, of the class that its configuration names.

    Args:
        model: the name of a model on the hub, or a directory.
        model_init_kwargs: arguments of ``from_pretrained``; not changed. An explicit dtype wins over the
            checkpoint's, and the device map is None under several processes.
        attention: the tree backend that is going to be installed, whatever ``attn_implementation`` says; None for the
            attention that it says, unchecked.

    Returns:
        The model, in eval mode.

    Raises:
        ValueError: naming the field: an unknown dtype or argument, a revision of a directory, an adapter, a model
            without a language-model head, or one that no tree attention serves, before any weight is read; or weights
            that the checkpoint lacks.
        OSError: if there is no such model or revision.
    """
    check_attention(attention)
    given = model_init_kwargs or {}
    kwargs = {name: copy.deepcopy(value) if isinstance(value, dict) else value for name, value in given.items()}
    if attention is not None:
        kwargs.pop("attn_implementation", None)
    kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))  # transformers asks the terminal about None
    path = resolve_model(model)
    _check_source(path, kwargs)
    dtype = _pop_dtype(kwargs)
    if several_processes() and kwargs.get("device_map") is not None:
        warnings.warn(
            f"device_map={kwargs['device_map']!r} is ignored under several processes, each of which holds the model on "
            "its own device.",
            stacklevel=3,
        )
        kwargs["device_map"] = None
    try:
        _check_adapter(path, kwargs)
        config = _load_config(path, kwargs)
        architecture = _architecture(path, config, kwargs)
        if attention is not None:
            _check_features(path, architecture, config, attention)
        loaded, report = architecture.from_pretrained(path, dtype=dtype, output_loading_info=True, **kwargs)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in kwargs:
            raise
        raise ValueError(
            f"model_init_kwargs has {unknown[1]!r}, which neither from_pretrained nor the configuration of {path!r} "
            "takes; check its spelling, or leave it out."
        ) from error
    except OSError as error:
        revision = kwargs.get("revision")
        named = f"model={os.fspath(model)!r}" + ("" if revision is None else f", revision={revision!r}")
        raise OSError(f"{named} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the checkpoint of model={path!r} lacks {len(missing)} tensors of the {type(loaded).__name__} "
            f"({', '.join(missing[:3])}), which would begin at random. Give a checkpoint that is whole, or "
            "tie_word_embeddings=True where the head is the embedding; to train new weights, pass an instance."
        )
    return loaded


def as_dtype(dtype: str | torch.dtype | None) -> Any:
    """``"auto"``, or the torch dtype of that name; None is ``"auto"``.

    Raises:
        ValueError: if there is no such dtype, or weights cannot be trained in it.
    """
    if dtype is None or dtype == "auto":
        return "auto"
    name = str(dtype).removeprefix("torch.")
    for known in DTYPES:
        if name == str(known).removeprefix("torch."):
            return known
    names = ", ".join(repr(str(known).removeprefix("torch.")) for known in DTYPES)
    raise ValueError(f"dtype={dtype!r}; weights are kept in one of {names}, or 'auto' for the checkpoint's own.")


def check_attention(attention: str | None) -> None:
    """Raise ``ValueError`` unless ``attention`` is a tree backend, ``"auto"`` or None."""
    if attention not in (None, "auto", *BACKENDS):
        raise ValueError(f"attention={attention!r}; choose 'auto', {str(BACKENDS)[1:-1]}.")


def several_processes() -> bool:
    """Whether this process is one of those of a distributed run."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return initialized or int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_not_offloaded(model: torch.nn.Module) -> None:
    """Raise ``ValueError`` where some parameters are on meta and others are not, as those that accelerate offloads."""
    on_meta = {name: parameter.is_meta for name, parameter in model.named_parameters()}
    if any(on_meta.values()) and not all(on_meta.values()):
        raise ValueError(
            f"{next(name for name, meta in on_meta.items() if meta)} is offloaded (device_map) to the disk or to the "
            f"memory of the host, with {sum(on_meta.values())} of {len(on_meta)} parameters of the "
            f"{type(model).__name__}: they would be neither trained nor pushed. Use device_map=None, or devices that "
            "hold all of it; a smaller dtype or load_in_4bit=True with an adapter makes it smaller."
        )


def no_head(what: str) -> str:
    """The message for a model that gives no log-probs."""
    return (
        f"{what} has no language-model head, without which there are no log-probs; give a model for causal language "
        "modelling (...ForCausalLM)."
    )


def _pop_dtype(kwargs: dict[str, Any]) -> Any:
    dtype, legacy = (as_dtype(kwargs.pop(name, None)) for name in ("dtype", "torch_dtype"))
    if "auto" not in (dtype, legacy) and dtype != legacy:
        raise ValueError(f"dtype={dtype} and torch_dtype={legacy}; give dtype alone.")
    return legacy if dtype == "auto" else dtype


def _check_source(path: str, kwargs: Mapping[str, Any]) -> None:
    if "output_loading_info" in kwargs:
        raise ValueError(
            "model_init_kwargs has 'output_loading_info', and the model alone is returned; leave it out: weights that "
            "a checkpoint lacks are an error."
        )
    if not Path(path).is_dir():
        return
    revision = kwargs.get("revision")
    if revision not in (None, "main"):
        raise ValueError(
            f"revision={revision!r} and model={path!r}, a directory, which has no revisions; leave it out."
        )


def _check_adapter(path: str, kwargs: Mapping[str, Any]) -> None:
    """Raise for an adapter among the files: transformers would put it, frozen, on the model beside it or elsewhere."""
    where = {name: kwargs[name] for name in _OF_THE_HUB if kwargs.get(name) is not None}
    inside = os.path.join(path, where.get("subfolder", ""))
    found = find_adapter_config_file(path, **where) or (os.path.isdir(path) and find_adapter_config_file(inside))
    if found:
        raise ValueError(
            f"model={path!r} holds an adapter (adapter_config.json); load its base, put the adapter on it with peft's "
            "PeftModel.from_pretrained(base, directory, is_trainable=True), and pass that as an instance. If there are "
            "weights beside it that are meant, move the adapter's files out."
        )


def _load_config(path: str, kwargs: Mapping[str, Any]) -> PreTrainedConfig:
    if isinstance(config := kwargs.get("config"), PreTrainedConfig):
        return config
    others = {name: value for name, value in kwargs.items() if name not in _NOT_OF_THE_CONFIG}
    return AutoConfig.from_pretrained(path, return_unused_kwargs=True, **others)[0]


def _architecture(path: str, config: PreTrainedConfig, kwargs: Mapping[str, Any]) -> Any:
    """The class that the configuration names, which must be one of a language model."""
    own_code = kwargs.get("trust_remote_code") and "AutoModelForCausalLM" in _auto_map(config)
    if own_code or not config.architectures:
        return AutoModelForCausalLM
    where = f"architectures={config.architectures} in the configuration of {path!r}"
    architecture = getattr(transformers, config.architectures[0], None)
    if architecture is None:
        raise ValueError(
            f"{where} is none of transformers {transformers.__version__}; pass trust_remote_code=True if the model "
            "brings its own code."
        )
    if not architecture.can_generate():
        raise ValueError(no_head(where))
    return architecture


def _check_features(path: str, architecture: Any, config: PreTrainedConfig, attention: str) -> None:
    """Find what tree attention cannot serve on a model without weights."""
    if _auto_map(config):
        return  # its code is not here yet; load_policy looks at the model
    build = architecture.from_config if architecture is AutoModelForCausalLM else architecture._from_config
    with torch.device("meta"):
        model = build(copy.deepcopy(config)).eval()
    try:
        check_features(model, "reference" if attention == "auto" else attention)
    except ValueError as error:
        raise ValueError(f"model={path!r} cannot be trained over prefix trees: {error}") from error


def _auto_map(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The classes of a model's own code."""
    return vars(config).get("auto_map") or {}
