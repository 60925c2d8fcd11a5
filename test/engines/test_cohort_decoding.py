"""What the engine samples: log-probs of the plain model, seeds, end tokens, and rows that leave the batch."""

import math

import pytest
import torch
from engines.tiny_models import KINDS, VOCABULARY, naive_log_probs, prompts_of, sample, tiny_model

from torchrl_asyncgrpo.engines.base import SamplingParams
from torchrl_asyncgrpo.engines.transformers import TransformersEngine


@pytest.fixture
def engine_of():
    engines = []

    def build(*args, **kwargs):
        engines.append(TransformersEngine(*args, **kwargs))
        return engines[-1]

    yield build
    for engine in engines:
        engine.shutdown()


def largest_error(model, prompts, groups, temperature=1.0):
    return max(
        (
            naive_log_probs(model, prompt, completion, temperature)
            - torch.tensor(completion.log_probs, dtype=torch.float64)
        )
        .abs()
        .max()
        .item()
        for prompt, completions in zip(prompts, groups, strict=True)
        for completion in completions
    )


# Norms, rotary angles and the eager softmax of transformers are float32 inside float64 models, but for GPT-2.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_a_full_forward_of_each_completion(engine_of, kind, dtype):
    model = tiny_model(kind, dtype)
    prompts = prompts_of(3, 9, 9, 14, 1)
    params = [SamplingParams(max_tokens=12, n=n, temperature=0.8, seed=n) for n in (1, 2, 3, 4, 5)]
    groups = sample(engine_of(model), prompts, params)
    assert [len(completions) for completions in groups] == [1, 2, 3, 4, 5]
    exact = kind == "gpt2" and dtype == torch.float64
    assert largest_error(model, prompts, groups, 0.8) < (1e-9 if exact else TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_a_common_head_changes_no_log_prob(engine_of, kind):
    head = prompts_of(7)[0]
    prompts = [head + tail for tail in prompts_of(4, 2, 4, seed=1)] + [head]
    model = tiny_model(kind)
    groups = sample(engine_of(model), prompts, SamplingParams(max_tokens=6, n=3, seed=0))
    assert largest_error(model, prompts, groups) < 1e-5


def test_own_tokens_outgrow_the_first_storage(engine_of, monkeypatch):
    monkeypatch.setattr("torchrl_asyncgrpo.engines.group_cache.FIRST_CAPACITY", 2)
    model = tiny_model()
    prompts = prompts_of(4, 6)
    groups = sample(engine_of(model), prompts, SamplingParams(max_tokens=30, n=4, seed=0))
    assert max(len(completion.token_ids) for completions in groups for completion in completions) > 8
    assert largest_error(model, prompts, groups) < 1e-9


def test_prompts_in_several_passes_give_the_same(engine_of, monkeypatch):
    model, prompts = tiny_model(), prompts_of(6, 6, 6, 6, 9)
    params = SamplingParams(max_tokens=8, n=2, seed=1)
    expected = sample(engine_of(model), prompts, params)
    monkeypatch.setattr("torchrl_asyncgrpo.engines.cohort.PROMPT_TOKENS_AT_ONCE", 12)
    assert [[c.token_ids for c in g] for g in sample(engine_of(model), prompts, params)] == [
        [c.token_ids for c in g] for g in expected
    ]


def test_each_distinct_prompt_is_forwarded_once(engine_of):
    model = tiny_model()
    engine = engine_of(model)
    shapes = []
    engine._model.transformer.wte.register_forward_hook(
        lambda module, args, output: shapes.append(tuple(args[0].shape))
    )
    first, second = prompts_of(5, 5)
    sample(engine, [first, second, first], SamplingParams(max_tokens=2, n=4, seed=0, ignore_eos=True))
    assert shapes == [(2, 5), (12, 1)]


def test_bits_repeat_and_do_not_depend_on_earlier_work(engine_of):
    model, prompts = tiny_model("llama", torch.float32), prompts_of(3, 8, 5)
    params = [SamplingParams(max_tokens=10, n=4, seed=seed) for seed in (1, 2, 3)]
    first = sample(engine_of(model), prompts, params)
    engine = engine_of(model)
    sample(engine, prompts_of(4, seed=9), SamplingParams(max_tokens=5, n=2))
    assert sample(engine, prompts, params) == first
    assert sample(engine, prompts, params) == first


def test_tokens_do_not_depend_on_what_else_is_in_the_batch(engine_of):
    model = tiny_model("mistral")
    engine = engine_of(model)
    prompts = prompts_of(3, 8, 5, 8)
    params = [
        SamplingParams(max_tokens=m, n=n, temperature=t, seed=m)
        for m, n, t in ((9, 4, 1.0), (3, 2, 0.7), (12, 1, 1.3), (6, 5, 1.0))
    ]
    together = sample(engine, prompts, params)
    for prompt, one, completions in zip(prompts, params, together, strict=True):
        [alone] = sample(engine, [prompt], one)
        assert [c.token_ids for c in alone] == [c.token_ids for c in completions]
        fewer = SamplingParams(max_tokens=one.max_tokens, n=1, temperature=one.temperature, seed=one.seed)
        [[first]] = sample(engine, [prompt], fewer)
        assert first.token_ids == completions[0].token_ids


def test_completions_of_a_request_differ_and_seeds_decide(engine_of):
    engine, [prompt] = engine_of(tiny_model()), prompts_of(5)

    def tokens(seed):
        [completions] = sample(engine, [prompt], SamplingParams(max_tokens=8, n=4, seed=seed, ignore_eos=True))
        return [tuple(completion.token_ids) for completion in completions]

    assert len(set(tokens(3))) == 4
    assert tokens(3) == tokens(3)
    assert not set(tokens(3)) & set(tokens(4))
    assert tokens(-1) == tokens(-1)


def test_requests_without_a_seed_each_get_their_own(engine_of):
    model, [prompt, other] = tiny_model(), prompts_of(5, 5)
    params = SamplingParams(max_tokens=8, n=1, ignore_eos=True)

    def tokens(engine, *prompts):
        return [completion.token_ids for [completion] in sample(engine, prompts, params)]

    twice = tokens(engine_of(model, seed=7), prompt, prompt)
    assert twice[0] != twice[1]
    assert tokens(engine_of(model, seed=7), prompt, prompt) == twice
    assert tokens(engine_of(model, seed=8), prompt, prompt)[0] not in twice
    assert tokens(engine_of(model), prompt) != tokens(engine_of(model), prompt)
    # Two engines with one seed do not even share the random numbers of different requests.
    one, two = engine_of(model, seed=7), engine_of(model, seed=7)
    assert one._seed_of(tuple(prompt), None) != two._seed_of(tuple(other), None)


def test_sampled_frequencies_are_those_of_the_model(engine_of):
    model, [prompt] = tiny_model(), prompts_of(4)
    draws = 4000
    [completions] = sample(engine_of(model), [prompt], SamplingParams(max_tokens=2, n=draws, seed=0, ignore_eos=True))
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        second = model(torch.tensor([[*prompt, token] for token in range(VOCABULARY)])).logits[:, -1].softmax(-1)
    joint = (first[:, None] * second).flatten() * draws
    index = torch.tensor([a * VOCABULARY + b for a, b in (completion.token_ids for completion in completions)])
    observed = torch.bincount(index, minlength=VOCABULARY**2).double()
    often = joint > 8
    cells = torch.cat([joint[often], joint[~often].sum()[None]])
    counts = torch.cat([observed[often], observed[~often].sum()[None]])
    freedom = len(cells) - 1
    statistic = ((counts - cells) ** 2 / cells).sum().item()
    assert freedom > 50
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("end", [0, [4, 0], [9, 4]])
def test_any_end_token_ends_a_completion_and_belongs_to_it(engine_of, end):
    model = tiny_model()
    model.generation_config.eos_token_id = end
    ends = {end} if isinstance(end, int) else set(end)
    groups = sample(engine_of(model), prompts_of(4, 4), SamplingParams(max_tokens=25, n=30, seed=1))
    seen = set()
    for completion in (c for completions in groups for c in completions):
        *before, last = completion.token_ids
        assert not ends & set(before)
        assert completion.finish_reason == ("stop" if last in ends else "length")
        assert (last in ends) or len(completion.token_ids) == 25
        assert len(completion.token_ids) == len(completion.log_probs) == len(completion.policy_versions)
        seen.add(last)
    assert ends <= seen


def test_stop_tokens_of_a_request_add_to_those_of_the_model(engine_of):
    engine, prompts = engine_of(tiny_model()), prompts_of(4, 4)
    stops, plain = sample(
        engine,
        prompts,
        [SamplingParams(max_tokens=25, n=30, seed=1, stop_token_ids=(7,)), SamplingParams(max_tokens=25, n=30, seed=2)],
    )
    assert {0, 7} <= {c.token_ids[-1] for c in stops if c.finish_reason == "stop"}
    assert not any(7 in c.token_ids[:-1] for c in stops)
    assert any(7 in c.token_ids[:-1] for c in plain)


def test_ignore_eos_samples_on(engine_of):
    params = SamplingParams(max_tokens=25, n=20, seed=1, stop_token_ids=(7,), ignore_eos=True)
    [completions] = sample(engine_of(tiny_model()), prompts_of(4), params)
    assert {len(c.token_ids) for c in completions} == {25}
    assert {c.finish_reason for c in completions} == {"length"}
    assert {0, 7} & {token for c in completions for token in c.token_ids}


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_finished_rows_and_groups_leave_the_batch_and_disturb_nobody(engine_of, kind):
    model = tiny_model(kind)
    engine = engine_of(model)
    rows = []
    embedding = engine._model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[0]))
    prompts = prompts_of(4, 6, 6, 9)
    params = [SamplingParams(max_tokens=most, n=20, seed=1, stop_token_ids=tuple(range(6))) for most in (2, 20, 3, 2)]
    groups = sample(engine, prompts, params)
    lengths = [len(completion.token_ids) for completions in groups for completion in completions]
    running = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert rows[3:] == running
    assert 0 < running[-1] < 10
    assert largest_error(model, prompts, groups) < (1e-9 if kind == "gpt2" else 1e-5)


def test_the_context_shortens_a_completion(engine_of):
    engine = engine_of(tiny_model(), max_length=10)
    [near], [far] = sample(engine, prompts_of(9, 4), SamplingParams(max_tokens=50, seed=0, ignore_eos=True))
    assert (len(near.token_ids), near.finish_reason) == (1, "length")
    assert (len(far.token_ids), far.finish_reason) == (6, "length")
    assert engine_of(tiny_model()).max_length == 64


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "64 tokens leaves no room for another in max_length=64"),
        ([1, VOCABULARY], {}, f"token {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
        ([1, -1], {}, "token -1 is outside"),
        ([1], {"top_p": 0.95}, "top_p=0.95.*ratio"),
        ([1], {"top_k": 20}, "top_k=20"),
        ([1], {"min_p": 0.1}, "min_p=0.1"),
        ([1], {"repetition_penalty": 1.1}, "1.1: the trainer's distribution is the whole vocabulary"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(engine_of, prompt, changes, message):
    engine = engine_of(tiny_model())
    with pytest.raises(ValueError, match=message):
        sample(engine, [prompt], SamplingParams(max_tokens=1, **changes))
    assert len(sample(engine, [[1]], SamplingParams(max_tokens=1))) == 1


def test_the_model_is_left_alone(engine_of):
    model = tiny_model()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for copy_weights in (True, False):
        engine = engine_of(model, copy_weights=copy_weights)
        sample(engine, prompts_of(4), SamplingParams(max_tokens=3, n=2))
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_shared_engine_samples_without_dropout_from_the_weights_as_they_are(engine_of):
    model = tiny_model()
    model.train()
    assert model.transformer.drop.p > 0
    engine = engine_of(model, copy_weights=False)
    assert engine.shares_weights
    prompts, params = prompts_of(4), SamplingParams(max_tokens=6, n=3, seed=0)
    old = sample(engine, prompts, params)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(1.5)
    new = sample(engine, prompts, params)
    model.eval()
    assert largest_error(model, prompts, new) < 1e-9
    assert largest_error(model, prompts, old) > 1e-3


def test_a_copy_does_not_follow_the_model(engine_of):
    model = tiny_model()
    engine = engine_of(model)
    assert not engine.shares_weights
    prompts, params = prompts_of(4), SamplingParams(max_tokens=6, n=3, seed=0)
    old = sample(engine, prompts, params)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(1.5)
    assert sample(engine, prompts, params) == old


@pytest.mark.parametrize("max_length", [1, 65])
def test_a_limit_that_the_model_has_not_is_refused(max_length):
    with pytest.raises(ValueError, match=f"max_length={max_length}"):
        TransformersEngine(tiny_model(), max_length=max_length)


def test_rope_that_depends_on_the_length_is_decoded_within_its_original_one(engine_of):
    factors = dict(short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 4.0, 8.0])
    longrope = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16, **factors)
    model = tiny_model("llama", rope_parameters=longrope)
    engine = engine_of(model)
    assert engine.max_length == 16
    prompts = prompts_of(3, 9)
    groups = sample(engine, prompts, SamplingParams(max_tokens=30, n=2, seed=0, ignore_eos=True))
    assert len(groups[0][0].token_ids) == 13
    assert largest_error(model, prompts, groups) < 1e-5
    with pytest.raises(ValueError, match="17 tokens is longer than the 16 .*'longrope' of model type 'llama'"):
        TransformersEngine(model, max_length=17)


def test_models_that_cannot_be_decoded_exactly_are_refused_by_name():
    from transformers import (
        AutoModelForCausalLM,
        DogeConfig,
        MambaConfig,
        NemotronConfig,
        Qwen2MoeConfig,
        Qwen3NextConfig,
    )

    mamba = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=5))
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        TransformersEngine(mamba, max_length=8)
    hybrid = tiny_model("llama")
    hybrid.config.layer_types = Qwen3NextConfig().layer_types
    with pytest.raises(ValueError, match="linear_attention"):
        TransformersEngine(hybrid)
    small = dict(vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    small |= dict(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    window = dict(use_sliding_window=True, sliding_window=2, layer_types=["sliding_attention"])
    for config, message in (
        (DogeConfig(**small), "DogeAttention brings its own attention mask.*VLLMEngine"),
        (Qwen2MoeConfig(**small, **window, num_experts=2), "a sliding window of 2 tokens that it does not.*VLLMEngine"),
        (NemotronConfig(**small), "NemotronAttention does not pass keyword arguments on.*VLLMEngine"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformersEngine(AutoModelForCausalLM.from_config(config))
