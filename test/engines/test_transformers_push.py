"""Weights that change between two decoding steps, and pushes that fail."""

import asyncio
import threading

import pytest
import torch
from engines.tiny_models import naive_log_probs, prompts_of, sample, tiny_model

from torchrl_asyncgrpo.engines.base import SamplingParams
from torchrl_asyncgrpo.engines.transformers import TransformersEngine


@pytest.fixture
def engine():
    engine = TransformersEngine(tiny_model(), seed=0)
    yield engine
    engine.shutdown()


PARAMS = SamplingParams(max_tokens=8, n=3, seed=0, ignore_eos=True)


def push(engine, model, version):
    engine.pause()
    engine.load_weights(model.named_parameters())
    engine.resume(version)


def before_turn(engine, monkeypatch, turn, action):
    """Run ``action`` in the engine's thread before its ``turn``-th step (from 0), when no step runs."""
    next_turn, count = engine._next_turn, 0

    def counting():
        nonlocal count
        if count == turn:
            action()
        count += 1
        return next_turn()

    monkeypatch.setattr(engine, "_next_turn", counting)


def test_tokens_carry_the_version_that_sampled_them_and_its_log_probs(engine, monkeypatch):
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    before_turn(engine, monkeypatch, 3, lambda: push(engine, new, 1))
    [prompt] = prompts_of(5)
    [completions] = sample(engine, [prompt], PARAMS)
    assert engine.policy_version == 1
    for completion in completions:
        assert completion.policy_versions == [0] * 3 + [1] * 5
        assert completion.log_probs[:3] == pytest.approx(
            naive_log_probs(old, prompt, completion)[:3].tolist(), abs=1e-9
        )
        # The new weights go on from the keys and values of the old ones, and write their own.
        assert completion.log_probs[3:] == pytest.approx(mixed(old, new, prompt, completion, 3).tolist(), abs=1e-9)


@torch.no_grad()
def mixed(old, new, prompt, completion, switched):
    """Log-probs under ``new`` of the tokens from ``switched`` on, over a cache that ``old`` wrote before."""
    past = len(prompt) + switched - 1
    token_ids = torch.tensor([prompt + completion.token_ids])
    cache = old(token_ids[:, :past], use_cache=True).past_key_values
    logits = new(token_ids[:, past:-1], past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(-1, token_ids[0, past + 1 :, None])[:, 0]


def test_a_push_from_another_thread_lands_between_two_steps(engine, monkeypatch):
    running, loading = threading.Event(), threading.Event()
    forward = engine._model.forward

    def watched(*args, **kwargs):
        running.set()
        assert not loading.is_set()
        result = forward(*args, **kwargs)
        assert not loading.is_set()
        return result

    monkeypatch.setattr(engine._model, "forward", watched)
    [prompt] = prompts_of(5)
    new = tiny_model(seed=1)

    def pusher():
        for version in range(1, 6):
            assert running.wait(60)
            engine.pause()
            loading.set()
            engine.load_weights(new.named_parameters())
            loading.clear()
            running.clear()
            engine.resume(version)

    thread = threading.Thread(target=pusher)
    thread.start()
    [completions] = sample(engine, [prompt], SamplingParams(max_tokens=50, n=3, seed=0, ignore_eos=True))
    thread.join()
    versions = completions[0].policy_versions
    assert versions[0] == 0
    assert versions == sorted(versions)
    assert set(versions) == set(range(6))
    [[fresh]] = sample(engine, [prompt], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    assert fresh.policy_versions == [5] * 4
    assert fresh.log_probs == pytest.approx(naive_log_probs(new, prompt, fresh).tolist(), abs=1e-9)


def test_pause_waits_for_the_step_that_runs(engine, monkeypatch):
    running, go_on, returned = threading.Event(), threading.Event(), threading.Event()
    forward = engine._model.forward

    def held(*args, **kwargs):
        running.set()
        assert go_on.wait(60)
        assert not returned.is_set()
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine._model, "forward", held)

    def pauser():
        assert running.wait(60)
        engine.pause()
        returned.set()

    async def main():
        task = asyncio.create_task(engine.generate([1, 2], PARAMS))
        assert not await asyncio.to_thread(returned.wait, 0.3)
        go_on.set()
        assert await asyncio.to_thread(returned.wait, 60)
        returned.clear()
        engine.resume()
        return await task

    thread = threading.Thread(target=pauser)
    thread.start()
    assert len(asyncio.run(main())) == 3
    thread.join()


def test_nothing_is_sampled_while_paused(engine):
    async def main():
        engine.pause()
        task = asyncio.create_task(engine.generate([1, 2], PARAMS))
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done
        engine.resume()
        return await task

    assert len(asyncio.run(main())) == 3
    assert engine.policy_version == 0


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_tied_weights_come_once_under_either_name(kind):
    engine, new = TransformersEngine(tiny_model(kind)), tiny_model(kind, seed=1)
    names = dict(new.named_parameters())
    assert "lm_head.weight" not in names
    embedding = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    for version, name in ((1, embedding), (2, "lm_head.weight")):
        engine.pause()
        engine.load_weights([(name if key == embedding else key, tensor) for key, tensor in names.items()])
        engine.resume(version)
    [prompt] = prompts_of(4)
    [[completion]] = sample(engine, [prompt], SamplingParams(max_tokens=5, seed=0))
    expected = naive_log_probs(new, prompt, completion).tolist()
    assert completion.log_probs == pytest.approx(expected, abs=1e-6)
    engine.shutdown()


def test_persistent_buffers_are_loaded_and_may_be_left_out():
    model = tiny_model()
    model.transformer.h[0].register_buffer("offset", torch.zeros(3))
    engine = TransformersEngine(model)
    engine.pause()
    engine.load_weights([("transformer.h.0.offset", torch.arange(3.0))])
    engine.load_weights(model.named_parameters())
    engine.resume(1)
    assert engine._model.transformer.h[0].offset.tolist() == [0, 1, 2]
    push(engine, model, 2)
    assert engine._model.transformer.h[0].offset.tolist() == [0, 1, 2]
    engine.shutdown()


def test_dtype_is_converted(engine):
    new = tiny_model(seed=1, dtype=torch.float32)
    push(engine, new, 1)
    assert {parameter.dtype for parameter in engine._model.parameters()} == {torch.float64}
    assert torch.equal(engine._model.transformer.wte.weight, new.transformer.wte.weight.double())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "transformer.wte.weights",
            torch.zeros(41, 24),
            "'transformer.wte.weights'.*did you mean 'transformer.wte.weight'",
        ),
        ("transformer.wte.weight", torch.zeros(40, 24), r"shape \(40, 24\); the engine's has \(41, 24\)"),
    ],
)
def test_a_push_that_fails_before_writing_leaves_the_engine_as_it_was(engine, name, tensor, message):
    [prompt] = prompts_of(4)
    before = sample(engine, [prompt], PARAMS)
    engine.pause()
    with pytest.raises(ValueError, match=message):
        engine.load_weights([(name, tensor)])
    engine.resume()
    assert sample(engine, [prompt], PARAMS) == before


def test_half_a_push_never_samples_and_the_next_one_starts_clean(engine):
    new = tiny_model(seed=1)
    weights = list(new.named_parameters())

    def breaks():
        yield from weights[:3]
        raise ConnectionError("the trainer went away")

    engine.pause()
    with pytest.raises(ConnectionError):
        engine.load_weights(breaks())
    for version in (None, 1):
        with pytest.raises(RuntimeError, match=f"{len(weights) - 3} of {len(weights)} parameters were not pushed"):
            engine.resume(version)
    assert engine.policy_version == 0
    # What the first push wrote does not count for the second.
    engine.pause()
    engine.load_weights(weights[3:])
    with pytest.raises(RuntimeError, match=f"3 of {len(weights)}"):
        engine.resume(1)
    push(engine, new, 1)
    [prompt] = prompts_of(4)
    [[completion]] = sample(engine, [prompt], SamplingParams(max_tokens=5, seed=0))
    assert set(completion.policy_versions) == {1}
    assert completion.log_probs == pytest.approx(naive_log_probs(new, prompt, completion).tolist(), abs=1e-9)


def test_a_new_version_needs_all_parameters(engine):
    *most, (last, _) = tiny_model(seed=1).named_parameters()
    engine.pause()
    with pytest.raises(RuntimeError, match="parameters were not pushed"):
        engine.resume(1)
    engine.load_weights(most)
    with pytest.raises(RuntimeError, match=last):
        engine.resume(1)
    assert engine.policy_version == 0


def test_load_and_resume_need_a_pause(engine):
    for call in (lambda: engine.load_weights([]), engine.resume):
        with pytest.raises(RuntimeError, match=r"call pause\(\) first"):
            call()


def test_pause_inside_a_step_is_refused_rather_than_waiting_for_itself(engine):
    engine._model.register_forward_hook(lambda *_: engine.pause())
    with pytest.raises(RuntimeError, match="inside a decoding step"):
        sample(engine, [[1]], PARAMS)


def test_a_shared_engine_takes_versions_but_no_other_weights():
    model = tiny_model()
    engine = TransformersEngine(model, copy_weights=False)
    engine.pause()
    engine.load_weights(model.named_parameters())
    with pytest.raises(ValueError, match="shares with the trainer"):
        engine.load_weights(tiny_model(seed=1).named_parameters())
    engine.resume(3)
    [[completion]] = sample(engine, [[1]], SamplingParams(max_tokens=1))
    assert completion.policy_versions == [3]
    engine.shutdown()
