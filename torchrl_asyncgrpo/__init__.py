"""Asynchronous GRPO on prefix trees, as TorchRL components."""
