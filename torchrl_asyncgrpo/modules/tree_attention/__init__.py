"""Attention over prefix trees, registered with transformers so that a model's own code runs unmodified.

``install(model)`` once, then ``model(input_ids=input_ids_T[None], **TreeLayout(...).model_inputs())``.
"""

from torchrl_asyncgrpo.modules.tree_attention.interface import attention_kept_on_error, install
from torchrl_asyncgrpo.modules.tree_attention.layout import TreeLayout

__all__ = ["TreeLayout", "attention_kept_on_error", "install"]
