"""The policy over tree batches: one forward of every distinct token, log-probs where the loss needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_asyncgrpo.adapters import check_adapters, has_quantized_layers, keep_bits, leave_out_of_state, unwrapped
from torchrl_asyncgrpo.data import schema
from torchrl_asyncgrpo.data.rope_length import check_rope_length
from torchrl_asyncgrpo.kernels.heap import release_free_pages
from torchrl_asyncgrpo.kernels.linear import OneDNNLinear, use_onednn
from torchrl_asyncgrpo.modules.checkpoint import check_not_offloaded
from torchrl_asyncgrpo.modules.log_prob import HeadTransform, log_kept_mass, token_log_prob
from torchrl_asyncgrpo.modules.tree_attention import TreeLayout, install

# Elements of one chunk of logits: 32 MB in float32 on a CPU, 1 GB elsewhere
CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}


class TreeActor(TensorDictModuleBase):
    """A causal language model as a policy over tree batches.

    Every node is forwarded once through the model's own code, whose attention follows the trie. Logits are formed
    only for parents of trained nodes, once per parent and ``chunk_size`` at a time; the backward recomputes them.

    Where a batch says which tokens the sampler kept (``kept``), the log of the probability of each entry's kept set
    under the current policy goes to ``entry.log_kept``; ``node.log_prob`` and ``node.entropy`` stay those of the whole
    vocabulary. These keys come and go with the sampler, so ``in_keys`` and ``out_keys`` do not list them.

    Args:
        model: a ``transformers`` causal language model, or peft's wrapper around one. Its attention is switched to a
            tree backend; without a tree batch it goes on working as before, ``generate`` included. Adapters on its
            output head, and prompt learning, are refused.
        temperature: sampling temperature of the log-probs and entropies, > 0; the engine's must be the same.
        attention: ``"auto"``, ``"reference"``, ``"segments"`` or ``"flex"``; ``"auto"`` picks by device.
        chunk_size: predicting positions per chunk of logits, >= 1; by default what fits 32 MB (CPU) or 1 GB.
        router_logits: write ``node.router_logits``, [T, layers, experts], of a mixture of experts, for the
            load-balancing loss.

    Raises:
        TypeError: if ``model`` is not a transformers model.
        ValueError: if temperature or chunk size is out of range, if the backend cannot honour a feature of the
            model, or the model does not hand the tree on to it, if layers of the model are offloaded, if its head is
            more than a linear map with scale and softcap, or if router logits are asked of a model that has none.

    Example:
        >>> actor = TreeActor(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"))
        >>> (batch,) = TreePacker()(rollouts)
        >>> actor(batch)["node", "log_prob"]  # [T] float32, nats
    """

    # Whether the model runs in the process that calls, so that autocast around a call reaches it
    runs_here = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        attention: str = "auto",
        chunk_size: int | None = None,
        router_logits: bool = False,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(
                f"temperature={temperature}; log-probs need a temperature above 0, the same that the engine "
                "samples with."
            )
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size}; it counts positions per chunk of logits and must be >= 1.")
        self.temperature = temperature
        self.chunk_size = chunk_size
        self.router_logits = router_logits
        self.in_keys = [
            schema.NODE_INPUT_IDS,
            schema.NODE_POSITION_IDS,
            schema.NODE_PARENT,
            schema.NODE_SUBTREE_END,
            schema.ENTRY_NODE,
        ]
        self.out_keys = [schema.NODE_LOG_PROB, schema.NODE_ENTROPY]
        self.out_keys += [schema.NODE_ROUTER_LOGITS] if router_logits else []
        self.model = self.prepare(model, attention)

    def prepare(self, model: PreTrainedModel, attention: str) -> PreTrainedModel:
        """Make ``model`` ready for tree batches: attention backend, head, checks. Override for another kind of policy.

        Args:
            model: the model given to the constructor.
            attention: the backend given to the constructor.

        Returns:
            The module that ``forward`` calls: the model inside, where peft wraps one.
        """
        model = unwrapped(model)
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model is a {type(model).__name__}; TreeActor runs a transformers causal language model "
                "(AutoModelForCausalLM), bare or in a PeftModel. Override TreeActor.prepare for another kind of policy."
            )
        check_not_offloaded(model)
        check_adapters(model)
        keep_bits(model)
        if has_quantized_layers(model):
            leave_out_of_state(self)
        self.attention = self.install_attention(model, attention)
        self.transform = head_transform(model, self.temperature)
        if self.router_logits and model.device.type != "meta":
            _check_routers(model)
        use_onednn(model)
        return model

    def check_packer(self, packer: object) -> None:
        """Raise ``ValueError`` if the micro-batches of ``packer`` are none that this policy runs.

        Args:
            packer: looked at where it is of this package.
        """

    def install_attention(self, model: PreTrainedModel, attention: str) -> str:
        """Give the model attention over the trie; returns the backend's name."""
        backend = install(model, attention)
        if model.device.type != "meta":
            _check_tree(model, backend)
        return backend

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``node.log_prob`` and ``node.entropy``, [T] nats, of every node that an entry points at (else 0).

        Where the batch has kept sets, write ``entry.log_kept``, [L] nats <= 0 (0 where all tokens were kept), too.

        Args:
            tensordict: a ``TreeBatch`` on the model's device.

        Returns:
            The same batch.

        Raises:
            ValueError: if a kept token is not in the model's vocabulary, or a rollout is longer than a RoPE type that
                depends on the length ("longrope", "dynamic") allows.
        """
        input_ids_T = tensordict[schema.NODE_INPUT_IDS]
        if input_ids_T.device.type == "cpu":
            release_free_pages()
        node_M, parent_M = trained_nodes(tensordict[schema.ENTRY_NODE], tensordict[schema.NODE_PARENT])
        parent_P, position_M = parent_M.unique_consecutive(return_inverse=True)
        hidden_PD = self.hidden_states(tensordict)[parent_P]
        if tensordict.get(schema.KEPT_ENTRY, None) is None:
            log_prob_M, entropy_P = self._log_prob(hidden_PD, position_M, input_ids_T[node_M])
        else:
            position_K, token_K = self._kept_positions(tensordict, parent_P)
            # kept tokens are further tokens to score behind the same positions
            position_X, order_X = torch.cat([position_M, position_K]).sort(stable=True)
            token_X = torch.cat([input_ids_T[node_M], token_K])[order_X]
            log_prob_X, entropy_P = self._log_prob(hidden_PD, position_X, token_X)
            log_prob_M, log_prob_K = log_prob_X[order_X.argsort()].split([len(position_M), len(position_K)])
            entry_K, num_entries = tensordict[schema.KEPT_ENTRY], len(tensordict[schema.ENTRY_NODE])
            tensordict[schema.ENTRY_LOG_KEPT] = log_kept_mass(log_prob_K, entry_K, num_entries)
        for key, value_M in ((schema.NODE_LOG_PROB, log_prob_M), (schema.NODE_ENTROPY, entropy_P[position_M])):
            tensordict[key] = value_M.new_zeros(len(input_ids_T)).index_put((node_M,), value_M)
        return tensordict

    def _log_prob(self, hidden_PD: Tensor, position_X: Tensor, token_X: Tensor) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        elements = CHUNK_ELEMENTS.get(hidden_PD.device.type, CHUNK_ELEMENTS["cuda"])
        return token_log_prob(
            hidden_PD,
            head.weight,
            head.bias,
            position_X,
            token_X,
            transform=self.transform,
            chunk_size=self.chunk_size or max(1, elements // head.weight.shape[0]),
        )

    def _kept_positions(self, tensordict: TensorDictBase, parent_P: Tensor) -> tuple[Tensor, Tensor]:
        """Index in ``parent_P`` of the position that each kept token [K] competed at, and the token."""
        token_K, vocabulary = tensordict[schema.KEPT_TOKEN], self.model.get_output_embeddings().weight.shape[0]
        if len(token_K) and (largest := int(token_K.max())) >= vocabulary:
            raise ValueError(
                f"the sampler kept the token id {largest} and the model has {vocabulary} logits; sampler and trainer "
                "must have one vocabulary: load both from the same model directory."
            )
        node_K = tensordict[schema.ENTRY_NODE][tensordict[schema.KEPT_ENTRY]]
        return torch.searchsorted(parent_P, tensordict[schema.NODE_PARENT][node_K]), token_K

    def hidden_states(self, tensordict: TensorDictBase) -> Tensor:
        """Final hidden states of all nodes, [T, D], as the head reads them; writes ``node.router_logits`` if asked."""
        # before the forward: transformers keeps the frequencies of a long sequence
        check_rope_length(self.model.config, tensordict[schema.NODE_POSITION_IDS].max() + 1)
        options = {"output_router_logits": True} if self.router_logits else {}
        output = self.model.base_model(
            input_ids=tensordict[schema.NODE_INPUT_IDS][None], **self.model_inputs(tensordict), **options
        )
        if self.router_logits:
            tensordict[schema.NODE_ROUTER_LOGITS] = torch.stack(output.router_logits, 1)
        return output.last_hidden_state[0]

    def model_inputs(self, tensordict: TensorDictBase) -> dict[str, Any]:
        """Keyword arguments beside ``input_ids`` that run the model over the batch."""
        layout = TreeLayout(
            tensordict[schema.NODE_POSITION_IDS], tensordict[schema.NODE_SUBTREE_END], tensordict[schema.NODE_PARENT]
        )
        return layout.model_inputs()


def trained_nodes(entry_node_L: Tensor, parent_T: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct nodes that entries point at, sorted by parent, and their parents: [M] and [M]."""
    node_M = entry_node_L.unique()
    parent_M, order_M = parent_T[node_M].sort(stable=True)
    return node_M[order_M], parent_M


@torch.no_grad()
def _check_tree(model: PreTrainedModel, backend: str) -> None:
    """Raise ``ValueError`` unless the model hands tree and mask to its attention function as they are."""
    depth_T, end_T = (torch.tensor(values, device=model.device) for values in ([0, 1, 1], [3, 2, 3]))
    model.set_attn_implementation("tree_reference")  # as good for this, and nothing is compiled
    try:
        with evaluating(model):
            model.base_model(input_ids=torch.zeros_like(depth_T)[None], **TreeLayout(depth_T, end_T).model_inputs())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__} fails over a tree ({error}). No tree attention backend can run a model that "
            "computes with its attention mask instead of handing it on to transformers' attention function; use "
            "FlatPacker and PaddingFreeActor, which leaves it its own attention."
        ) from error
    finally:
        model.set_attn_implementation(f"tree_{backend}")


def head_transform(model: PreTrainedModel, temperature: float) -> HeadTransform:
    """Read from the model's config what its head does beside a linear map, and check it against the model itself.

    Args:
        model: a causal language model.
        temperature: sampling temperature, > 0.

    Returns:
        The transform from raw to sampling logits.

    Raises:
        ValueError: if the head is not a linear layer, or the model's own logits differ from head and transform.
    """
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, OneDNNLinear):
        raise ValueError(
            f"the output head of {type(model).__name__} is a {type(head).__name__}; only a plain nn.Linear head can be "
            "evaluated in chunks. Remove adapters from the head or use a model with a linear language-model head."
        )
    config = model.config.get_text_config()
    transform = HeadTransform(
        temperature=temperature,
        scale=(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
    if head.weight.device.type != "meta":
        _check_head(model, head, transform)
    return transform


@torch.no_grad()
def _check_head(model: PreTrainedModel, head: nn.Linear, transform: HeadTransform) -> None:
    probe = torch.arange(2, device=head.weight.device)[None]
    with evaluating(model):
        expected_CV = model(input_ids=probe, use_cache=False).logits[0].double() / transform.temperature
        hidden_CD = model.base_model(input_ids=probe, use_cache=False).last_hidden_state[0]
    logits_CV = transform.logits_(head(hidden_CD).double())
    spread = float(expected_CV.abs().max())
    if not torch.allclose(logits_CV, expected_CV, rtol=0.02, atol=0.02 * spread):
        raise ValueError(
            f"{type(model).__name__} computes its logits from more than hidden states, a linear head, logit scale and "
            "softcap: its own logits differ. Override TreeActor.prepare and forward for this model."
        )


@torch.no_grad()
def _check_routers(model: PreTrainedModel) -> None:
    """Raise ``ValueError`` unless the model reports one row of router logits per token and layer of experts."""
    probe = torch.arange(2, device=model.device)[None]
    with evaluating(model):
        output = model.base_model(input_ids=probe, use_cache=False, output_router_logits=True)
    shapes = [tuple(logits.shape) for logits in output.get("router_logits") or ()]
    if not shapes:
        raise ValueError(
            f"router_logits=True and {type(model).__name__} has no router whose logits transformers reports; the "
            "load-balancing loss is for mixtures of experts (Qwen3-MoE, Mixtral): leave router_logits and "
            "load_balance_coeff out for this model."
        )
    if len(set(shapes)) > 1 or shapes[0] != (2, shapes[0][-1]):
        raise ValueError(
            f"router_logits=True and {type(model).__name__} reports router logits of shapes {shapes} for two tokens; "
            "node.router_logits takes [tokens, experts] of every layer, one number of experts. Override "
            "TreeActor.hidden_states for this model."
        )


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Run the model without dropout; each of its modules keeps its own mode."""
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
