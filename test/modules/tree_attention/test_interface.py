"""Installation: what is refused by name, what stays as it was without a layout, and threads."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from tree_oracle import MODELS, VOCABULARY, NaiveTrie, random_rollouts, tiny_model

from torchrl_asyncgrpo.modules.tree_attention import TreeLayout, attention_kept_on_error, install

BACKENDS = ["reference", "segments", "flex"]
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
REFUSED = {
    "mamba": ({"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}, "recurrent layers"),
    "qwen3_next": (
        {**TINY, "layer_types": ["linear_attention", "full_attention"]},
        "recurrent layers: linear_attention",
    ),
    "recurrent_gemma": (
        {**TINY, "lru_width": 32, "block_types": ["recurrent", "attention"]},
        "recurrent layers: recurrent",
    ),
    "lfm2": ({**TINY, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "llama4_text": ({**TINY, "num_local_experts": 2, "intermediate_size_mlp": 32}, "chunked attention"),
    "bloom": ({"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 1, "n_head": 4}, "AttentionInterface"),
    "bert": ({**TINY, "max_position_embeddings": 64}, "bidirectional attention"),
}


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_no_backend_can_honour_is_refused_by_name(model_type: str, backend: str) -> None:
    config, feature = REFUSED[model_type]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=rf"(?s)({feature}).*'{model_type}'.*no tree attention backend can"):
        install(model, backend)
    assert model.config._attn_implementation == before


def test_encoder_decoders_are_refused() -> None:
    config = AutoConfig.for_model("t5", vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match=r"encoder-decoder|AttentionInterface"):
        install(AutoModel.from_config(config).eval())


def test_softcap_is_refused_by_segments_and_named_with_those_that_can() -> None:
    with pytest.raises(
        ValueError, match=r"'segments' cannot honour logit softcapping of model type 'gemma2'.*'reference' or 'flex'"
    ):
        install(tiny_model("gemma2"), "segments")


def test_an_unknown_backend_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(ValueError, match=r"'flash9'.*'auto', 'reference', 'segments', 'flex'"):
        install(tiny_model("llama"), "flash9")


@pytest.mark.parametrize(
    ("model_type", "backend"), [("llama", "segments"), ("gpt_oss", "segments"), ("gemma2", "reference")]
)
def test_auto_takes_segments_where_it_can(model_type: str, backend: str) -> None:
    model = tiny_model(model_type)
    assert install(model) == backend
    assert install(model) == backend
    assert model.config._attn_implementation == f"tree_{backend}"


def test_dropout_in_training_is_refused_at_installation_and_in_a_layer() -> None:
    model = tiny_model("gpt2", attn_pdrop=0.1)
    inputs = TreeLayout(torch.tensor([0]), torch.tensor([1])).model_inputs()
    install(model, "segments")
    model.train()
    refusal = r"attention dropout in training: 0.1 .*'gpt2': use backend 'reference'"
    with pytest.raises(ValueError, match=refusal):
        model(input_ids=torch.tensor([[3]]), **inputs)
    with pytest.raises(ValueError, match=refusal):
        install(model, "segments")
    assert install(model, "auto") == "reference"
    assert model(input_ids=torch.tensor([[3]]), **inputs).logits.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "segments"])
@pytest.mark.parametrize("model_type", MODELS)
def test_without_a_layout_everything_stays_as_it_was(model_type: str, backend: str) -> None:
    if (model_type, backend) == ("gemma2", "segments"):
        return
    model = tiny_model(model_type, torch.float32)
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    arguments = dict(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)

    def outputs():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, 4:]
        return logits, model(input_ids=ids).logits, model.generate(ids, attention_mask=mask, **arguments)

    with torch.no_grad():
        before = outputs()
        install(model, backend)
        after = outputs()
    # sdpa is called for sdpa; eager models go through our softmax, equal up to rounding.
    tolerance = 1e-5 if model_type in ("gemma2", "gpt_oss") else 0.0
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_a_tree_and_its_mask_come_together_and_fit_the_input() -> None:
    model = tiny_model("llama")
    install(model, "segments")
    inputs = TreeLayout(torch.tensor([0, 1, 1]), torch.tensor([3, 2, 3])).model_inputs()
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match="without the tree"):
        model(input_ids=ids, **{**inputs, "tree": None})
    with pytest.raises(ValueError, match="without the mask"):
        model(input_ids=ids, **{**inputs, "attention_mask": None})
    with pytest.raises(ValueError, match="3 nodes"):
        model(input_ids=ids[:, :2], **{**inputs, "position_ids": torch.tensor([[0, 1]])})
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError):
        model(input_ids=ids, **inputs)


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    config = AutoConfig.for_model(
        "qwen2_moe",
        **TINY,
        num_experts=2,
        num_experts_per_tok=1,
        use_sliding_window=True,
        sliding_window=2,
        layer_types=["sliding_attention"] * 2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    install(model, "reference")
    inputs = TreeLayout(torch.arange(4), torch.full((4,), 4)).model_inputs()
    with pytest.raises(ValueError, match="a sliding window that the layer does not pass"):
        model(input_ids=torch.tensor([[3, 4, 5, 6]]), **inputs)


def test_a_path_beyond_the_length_of_its_rope_is_refused() -> None:
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    model = tiny_model("llama", max_position_embeddings=4, rope_parameters=rope)
    install(model, "segments")
    for depth in (4, 5):
        inputs = TreeLayout(torch.arange(depth), torch.full((depth,), depth)).model_inputs()
        ids = torch.arange(3, 3 + depth)[None]
        if depth == 4:
            assert model(input_ids=ids, **inputs).logits.isfinite().all()
            continue
        with pytest.raises(ValueError, match="5 tokens is longer than the 4 .*'dynamic'"):
            model(input_ids=ids, **inputs)


def test_two_threads_run_trees_and_plain_forwards_of_one_model_at_once() -> None:
    model = tiny_model("mistral")
    install(model, "segments")
    tries = [NaiveTrie(random_rollouts(seed)) for seed in range(3)]
    ids = [torch.tensor(trie.tokens)[None] for trie in tries]
    jobs = [lambda i=i: model(input_ids=ids[i], **tries[i].layout().model_inputs()).logits for i in range(3)]
    jobs.append(lambda: model(input_ids=ids[0], use_cache=False).logits)
    with torch.no_grad():
        expected = [job() for job in jobs]
    barrier, results = threading.Barrier(len(jobs)), {}

    @torch.no_grad()
    def work(i: int) -> None:
        for n in range(10):
            barrier.wait()
            results[i, n] = jobs[i]()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 10 * len(jobs)
    for (i, _), logits in results.items():
        torch.testing.assert_close(logits, expected[i], rtol=0, atol=1e-12)


def test_gradient_checkpointing_carries_the_layout() -> None:
    model = tiny_model("llama")
    install(model, "segments")
    trie = NaiveTrie(random_rollouts(2))

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(
            input_ids=torch.tensor(trie.tokens)[None], **trie.layout().model_inputs()
        ).logits.square().sum().backward()
        return model.model.embed_tokens.weight.grad.clone()

    expected = gradient()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    torch.testing.assert_close(gradient(), expected)


def test_autocast_runs_attention_in_its_dtype() -> None:
    model = tiny_model("qwen3", torch.float32)
    trie = NaiveTrie(random_rollouts(2))
    ids, layout = torch.tensor(trie.tokens)[None], trie.layout()
    install(model, "segments")
    with torch.no_grad():
        exact = model(input_ids=ids, **layout.model_inputs()).logits
        with torch.autocast("cpu", torch.bfloat16):
            rounded = model(input_ids=ids, **layout.model_inputs()).logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_attention_is_given_back_to_every_model_inside_if_something_fails():
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32)
    text = {**TINY, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})

    def attention():
        config = model.config
        return [c._attn_implementation for c in (config, config.text_config, config.vision_config)]

    def switch(fail):
        with attention_kept_on_error(model):
            install(model)
            assert set(attention()) == {"tree_segments"}
            if fail:
                raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        switch(fail=True)
    assert attention() == ["sdpa", "sdpa", "eager"]
    assert model.model.language_model.layers[0].self_attn.config._attn_implementation == "sdpa"
    switch(fail=False)
    assert set(attention()) == {"tree_segments"}
