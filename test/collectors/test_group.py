import math

import pytest
import torch
from fakes import character_tokenizer

from torchrl_asyncgrpo import TreePacker
from torchrl_asyncgrpo.collectors.group import as_answers, encode_prompt, make_group, request_seed
from torchrl_asyncgrpo.data.prompts import PromptDraw
from torchrl_asyncgrpo.engines.base import Completion

CHAT = [{"role": "user", "content": "hi"}]


def test_text_and_chat_prompts():
    tokenizer = character_tokenizer()
    assert tokenizer.decode(encode_prompt(tokenizer, PromptDraw(0, "1+1="), 64)) == "1+1="
    assert tokenizer.decode(encode_prompt(tokenizer, PromptDraw(0, CHAT), 64)) == "<user>hi|<a>"


def test_answers_follow_the_kind_of_prompt():
    tokenizer = character_tokenizer()
    done = [Completion(tokenizer("42")["input_ids"] + [0], [-1.0] * 3, [0] * 3, "stop")]
    assert as_answers(tokenizer, PromptDraw(0, "x"), done) == ["42"]
    assert as_answers(tokenizer, PromptDraw(0, CHAT), done) == [[{"role": "assistant", "content": "42"}]]


def assemble(completions, rewards, mask_truncated=False):
    advantages = torch.tensor([0.5] * len(rewards))
    draw = PromptDraw(7, "p")
    return make_group(draw, [5, 6], completions, rewards, advantages, group_size=4, mask_truncated=mask_truncated)


def test_rollouts_hold_what_was_sampled():
    rows = assemble(
        [Completion([1, 2], [-0.5, -0.25], [3, 4], "stop"), Completion([9], [-1.0], [4], "stop")], [1.0, 0.0]
    )
    assert rows[0]["token_ids"].tolist() == [5, 6, 1, 2]
    assert rows[0]["loss_mask"].tolist() == [False, False, True, True]
    assert rows[0]["sample_log_prob"].tolist() == [0, 0, -0.5, -0.25]
    assert rows[0]["policy_version"].tolist() == [3, 3, 3, 4]
    assert [(int(r["group_id"]), int(r["rollout_id"]), float(r["reward"])) for r in rows] == [
        (7, 28, 1.0),
        (7, 29, 0.0),
    ]


def test_kept_sets_of_a_truncating_sampler_stand_behind_the_whole_vocabulary_of_the_prompt():
    """T2."""
    rows = assemble(
        [
            Completion([1, 2], [-0.5, 0.0], [3, 3], "stop", sampling_mask=[[1, 8], [2]]),
            Completion([1, 2], [-0.5, -0.25], [3, 3], "stop", sampling_mask=[[4, 1], []]),
            Completion([9], [-1.0], [3], "stop"),
        ],
        [1.0, 0.0, 0.5],
    )
    assert [row["kept_count"].tolist() for row in rows[:2]] == [[0, 0, 2, 1], [0, 0, 2, 0]]
    assert [row["kept_token_ids"].tolist() for row in rows[:2]] == [[1, 8, 2], [1, 4]]
    assert "kept_count" not in rows[2]


@pytest.mark.parametrize(
    ("mask", "message"), [([[1], [7]], r"sampling_mask\[3\] .*, 2, is not"), ([[1]], "sampling_mask has 3 sets.* 4")]
)
def test_kept_sets_that_do_not_fit_the_tokens_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        assemble([Completion([1, 2], [-0.5, -0.1], [3, 3], "stop", sampling_mask=mask)], [1.0])


def test_token_without_a_log_prob_is_untrained():
    """T4."""
    (row,) = assemble([Completion([1, 2, 3], [-0.5, math.nan, -1.0], [0] * 3, "stop")], [1.0])
    assert row["loss_mask"].tolist() == [False, False, True, False, True]


def test_unscored_completion_is_left_out_and_keeps_its_id_free():
    """G2."""
    done = [Completion([i], [-1.0], [0], "stop") for i in (1, 2, 3)]
    assert [int(r["rollout_id"]) for r in assemble(done, [1.0, math.nan, 0.0])] == [28, 30]


def two_answers(advantages, rewards=(1.0, 0.0)):
    done = [Completion([1, 2, 3], [-0.5, math.nan, -1.0], [0] * 3, "stop"), Completion([9], [-1.0], [0], "stop")]
    return make_group(PromptDraw(7, "p"), [5, 6], done, rewards, advantages, group_size=4, mask_truncated=False)


def test_advantages_per_token_have_zeros_for_the_prompt():
    rows = two_answers([[0.5, math.nan, -1.0], 2.0])
    assert rows[0]["advantage"][[0, 1, 2, 4]].tolist() == [0.0, 0.0, 0.5, -1.0]
    assert rows[1]["advantage"].shape == ()
    assert rows[1]["advantage"] == 2.0
    (batch,) = TreePacker()(rows)
    assert sorted(batch["entry", "advantage"].tolist()) == [-1.0, 0.5, 2.0]


def test_number_of_one_token_is_a_number_of_that_token():
    assert two_answers([0.0, torch.tensor([2.0])])[1]["advantage"].tolist() == [0.0, 0.0, 2.0]


def test_advantage_of_an_unscored_completion_is_not_read():
    """G2."""
    (row,) = two_answers([[0.0] * 99, 1.0], rewards=[math.nan, 0.0])
    assert row["advantage"] == 1.0


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([1.0], "returned 1 values for the 2 completions of group 7"),
        (torch.zeros(3), "returned 3 values for the 2 completions"),
        ([[1.0, 2.0], 0.0], r"shape \(2,\) for a completion of 3 tokens.*\[3\]"),
        (torch.zeros(2, 3), r"shape \(3,\) for a completion of 1 tokens"),
    ],
)
def test_advantages_that_do_not_fit_are_refused(advantages, message):
    with pytest.raises(ValueError, match=message):
        two_answers(advantages)


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_truncated_completion_can_be_masked(mask_truncated):
    done = [Completion([1, 2], [-1.0] * 2, [0] * 2, reason) for reason in ("stop", "length")]
    rows = assemble(done, [1.0, 0.0], mask_truncated)
    assert [int(r["loss_mask"].sum()) for r in rows] == [2, 0 if mask_truncated else 2]


def test_seeds_differ_between_groups_and_runs():
    """T9."""
    seeds = {request_seed(seed, group) for seed in range(20) for group in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "chat", "limit", "message"),
    [
        (CHAT, False, 64, "no chat template.*tokenizer.chat_template"),
        ("abcd", True, 4, "4 tokens and the engine takes 4.*no room for one token"),
    ],
)
def test_bad_prompts(prompt, chat, limit, message):
    with pytest.raises(ValueError, match=message):
        encode_prompt(character_tokenizer(chat), PromptDraw(3, prompt), limit)
