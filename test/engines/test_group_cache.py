"""What the cache holds; what it computes is tested through the engine."""

import pytest
import torch

from torchrl_asyncgrpo.engines.group_cache import GroupCache, PromptPass, StepPass


def test_prompts_without_rows_are_freed_and_holes_are_filled_from_the_end():
    cache = GroupCache([3, 5, 9], 4, torch.device("cpu"))
    prompt = torch.arange(3 * 2 * 9 * 8, dtype=torch.float32).view(3, 2, 9, 8)
    layer = cache.layer(0, prompt, prompt)
    layer.prompt_key_GKPD.copy_(prompt)
    cache.start_rows([0, 0, 1, 1, 2])
    own = torch.arange(5.0)[:, None, None, None].expand(5, 2, 1, 8)
    step = StepPass(cache)
    step.attend(own.repeat(1, 2, 1, 1), own, own, scaling=1.0, window=None, softcap=None, sink_H=None)
    step.finish()

    assert cache.keep_rows([0, 2, 3, 4]) == [0, 4, 2, 3]
    assert layer.own_key_RKSD[:4, 0, 0, 0].tolist() == [0, 4, 2, 3]
    assert cache.groups_of_rows == [0, 2, 1, 1]
    assert len(layer.prompt_key_GKPD) == 3

    assert cache.keep_rows([2, 3]) == [2, 3]
    assert layer.own_key_RKSD[:2, 0, 0, 0].tolist() == [2, 3]
    assert cache.groups_of_rows == [0, 0]
    assert cache.longest == 5
    assert torch.equal(layer.prompt_key_GKPD, prompt[1:2, :, :5])


def test_a_model_that_attends_less_often_in_a_later_pass_is_refused():
    """What it skips would be read as keys all the same."""
    cache = GroupCache([1], 2, torch.device("cpu"))
    new = torch.ones(1, 1, 1, 4)
    options = dict(scaling=1.0, window=None, softcap=None, sink_H=None)
    prompt = PromptPass(cache, 0, 1, 0, 1)
    for _ in range(2):
        prompt.attend(new, new, new, **options)
    prompt.finish()
    cache.start_rows([0])
    step = StepPass(cache)
    step.attend(new, new, new, **options)
    with pytest.raises(ValueError, match=r"attention 1 times in this pass and 2 times .*VLLMEngine"):
        step.finish()
    assert cache.own_tokens == 0
