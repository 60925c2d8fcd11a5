"""Windows of rollouts folded into prefix tries and split into micro-batches under a token budget."""

from torchrl_asyncgrpo.packing.packer import FlatPacker, TreePacker
from torchrl_asyncgrpo.packing.unpack import node_paths, packing_ratio, unpack

__all__ = ["FlatPacker", "TreePacker", "node_paths", "packing_ratio", "unpack"]
