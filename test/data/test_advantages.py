import itertools
import math
import pickle
import statistics

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_asyncgrpo.data.advantages import (
    batch_advantages,
    gdpo_advantages,
    group_advantages,
    leave_one_out_advantages,
    make_estimator,
    pass_at_k_advantages,
)

NAN = math.nan

# None marks an unscored rollout; few different values, so that ties are frequent
SCORES = st.lists(
    st.one_of(st.none(), st.floats(-100, 100, width=32), st.sampled_from([0.0, 1.0, 0.1])), min_size=2, max_size=8
)


def tensor(scores):
    return torch.tensor([NAN if score is None else score for score in scores], dtype=torch.float64)


def close(result, expected, scale=1.0):
    """NaN where expected is None; otherwise equal up to the float32 of the result and the size of the terms."""
    assert result.dtype == torch.float32
    assert result.isnan().tolist() == [e is None for e in expected]
    for value, e in zip(result.tolist(), expected, strict=True):
        assert e is None or value == pytest.approx(e, rel=2e-7, abs=1e-11 * scale + 1e-12)


def with_unscored(scores, of_scored):
    """Values of the scored ones put back between the unscored."""
    of_scored = iter(of_scored)
    return [None if score is None else next(of_scored) for score in scores]


@pytest.mark.parametrize(
    ("scale", "eps", "winner"), [("std", 1e-4, 1.4997), ("population_std", 1e-8, 1.7321), ("none", 0.0, 0.75)]
)
def test_kinds_of_scale(scale, eps, winner):
    """G1."""
    advantage = group_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0]), scale=scale, eps=eps)
    assert advantage[3].item() == pytest.approx(winner, abs=5e-5)
    assert advantage[:3].tolist() == pytest.approx([-winner / 3] * 3, abs=5e-5)


def test_unscored_rollouts_are_left_out_of_the_baseline():
    """G2."""
    advantage = group_advantages(torch.tensor([1.0, NAN, 0.0, 1.0]), scale="none")
    assert advantage.isnan().tolist() == [False, True, False, False]
    assert advantage[[0, 2, 3]].tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])


@pytest.mark.parametrize("rewards", [[0.7], [NAN], [NAN, 0.3]])
def test_group_with_one_score_has_advantage_zero(rewards):
    """G3."""
    advantage = group_advantages(torch.tensor(rewards))
    assert advantage[~advantage.isnan()].tolist() == [0.0] * sum(not math.isnan(r) for r in rewards)


ALL = {
    "std": lambda r: group_advantages(r, eps=0.0),
    "none": lambda r: group_advantages(r, scale="none"),
    "leave_one_out": leave_one_out_advantages,
    "pass_at_1": lambda r: pass_at_k_advantages(r, k=1, eps=0.0),
    "pass_at_2": lambda r: pass_at_k_advantages(r, k=2, eps=0.0),
    "pass_at_all": lambda r: pass_at_k_advantages(r, k=len(r), eps=0.0),
    "gdpo": lambda r: gdpo_advantages(torch.stack([r, r], 1), [0.3, 0.7], eps=0.0),
    "batch": lambda r: batch_advantages(
        torch.cat([r, torch.tensor([1.0, -1.0]).to(r)]), [0] * len(r) + [1, 1], eps=0.0
    )[: len(r)],
}


@pytest.mark.parametrize("name", ALL)
@given(value=st.floats(-(2.0**99), 2.0**99), count=st.integers(2, 9), dtype=st.sampled_from(["32", "64"]))
@example(value=0.1, count=3, dtype="64")
def test_equal_rewards_give_exactly_zero(name, value, count, dtype):
    rewards = torch.full((count,), value, dtype=getattr(torch, f"float{dtype}"))
    assert ALL[name](rewards).tolist() == [0.0] * count
    rewards[0] = NAN
    advantage = ALL[name](rewards)
    assert advantage[0].isnan()
    assert advantage[1:].tolist() == [0.0] * (count - 1)


@pytest.mark.parametrize("name", ALL)
def test_one_score_or_none_among_several_is_zero_or_unscored(name):
    assert str(ALL[name](torch.tensor([NAN, 0.3, NAN])).tolist()) == "[nan, 0.0, nan]"
    assert ALL[name](torch.tensor([NAN, NAN])).isnan().all()


def test_a_spread_that_vanishes_in_float64_divides_nothing():
    tiny = torch.tensor([0.0, 1e-170, 3e-170], dtype=torch.float64)
    assert group_advantages(tiny, eps=0.0).tolist() == [0.0] * 3


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_equals_the_formula(rewards):
    if max(rewards) == min(rewards):
        return
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    expected = [(r - mean) / (std + 1e-4) for r in rewards]
    assert group_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist() == pytest.approx(expected, abs=1e-5)


@given(SCORES)
def test_leave_one_out_compares_with_the_others(scores):
    scored = [score for score in scores if score is not None]
    expected = [r - math.fsum(scored[:i] + scored[i + 1 :]) / max(1, len(scored) - 1) for i, r in enumerate(scored)]
    close(
        leave_one_out_advantages(tensor(scores)),
        with_unscored(scores, [0.0] if len(scored) == 1 else expected),
        scale=100,
    )


def pass_at_k(rewards, k):
    """By enumeration: advantage of each reward before scaling, and the best ones of all k-subsets."""
    k = min(k, len(rewards))
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = {subset: max(rewards[i] for i in subset) for subset in subsets}
    mean = math.fsum(best.values()) / len(best)
    own = [[best[subset] for subset in subsets if i in subset] for i in range(len(rewards))]
    return [math.fsum(b) / len(b) - mean for b in own], list(best.values())


@settings(max_examples=200)
@given(SCORES, st.data())
def test_pass_at_k_equals_enumeration(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    scored = [score for score in scores if score is not None]
    advantages, best = pass_at_k(scored, k) if scored else ([], [])
    rewards = tensor(scores)
    close(pass_at_k_advantages(rewards, k=k, scale="none"), with_unscored(scores, advantages), scale=100)
    spread = statistics.pstdev(best) if best else 0.0
    scaled = [a / (spread + 0.5) for a in advantages]
    close(pass_at_k_advantages(rewards, k=k, eps=0.5), with_unscored(scores, scaled), scale=100)


def test_pass_at_k_of_binary_rewards():
    """arXiv:2508.10751: R = 1 - C(wrong, k) / C(G, k), right ones (1 - R) / sigma, wrong ones as derived there."""
    G, wrong, k = 8, 5, 3
    mean = 1 - math.comb(wrong, k) / math.comb(G, k)
    sigma = math.sqrt(mean * (1 - mean))
    expected = [(1 - mean - math.comb(wrong - 1, k - 1) / math.comb(G - 1, k - 1)) / sigma] * wrong
    expected += [(1 - mean) / sigma] * (G - wrong)
    close(pass_at_k_advantages(tensor([0.0] * wrong + [1.0] * (G - wrong)), k=k, eps=0.0), expected)


def test_pass_at_k_ranks_ties_alike_and_takes_large_groups():
    rewards = torch.arange(400) % 7 / 10
    advantage = pass_at_k_advantages(rewards, k=150, scale="none")
    for value in rewards.unique():
        assert len(advantage[rewards == value].unique()) == 1
    assert advantage.double().sum().item() == pytest.approx(0, abs=1e-6)
    assert advantage.isfinite().all()


@given(SCORES)
def test_pass_at_1_is_centring(scores):
    for scale in ("none", "population_std"):
        expected = group_advantages(tensor(scores), scale=scale).tolist()
        close(
            pass_at_k_advantages(tensor(scores), k=1, scale=scale),
            [None if math.isnan(e) else e for e in expected],
            scale=1e5,
        )


def test_too_few_scored_for_a_subset_are_one_subset():
    assert str(pass_at_k_advantages(tensor([1.0, None, 0.0, None]), k=3).tolist()) == "[0.0, nan, 0.0, nan]"


@given(
    st.lists(st.tuples(*[st.sampled_from([None, 0.0, 1.0, 0.1, 7.0])] * 3), min_size=2, max_size=6),
    st.sampled_from(["std", "population_std", "none"]),
    st.sampled_from([None, [1.0, 0.5, -2.0], [1.0, 0.0, 3.0]]),
)
def test_gdpo_normalises_each_function(rows, scale, weights):
    total = [None] * len(rows)
    for k, weight in enumerate(weights or [1.0] * 3):
        scored = [row[k] for row in rows if row[k] is not None]
        for i, row in enumerate(rows):
            if row[k] is None:
                continue
            flat = len(set(scored)) < 2
            deviation = 0.0 if flat else row[k] - math.fsum(scored) / len(scored)
            spread = {"std": statistics.stdev, "population_std": statistics.pstdev, "none": lambda _: 1 - 0.01}[scale]
            share = 0.0 if flat else deviation / (spread(scored) + 0.01)
            total[i] = weight * share + (total[i] or 0.0)
    rewards = torch.stack([tensor(row) for row in rows])
    close(gdpo_advantages(rewards, weights, scale=scale, eps=0.01), total, scale=10)


def test_gdpo_tells_apart_what_sums_alike():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    of_sums = group_advantages(rewards.sum(1))
    of_parts = gdpo_advantages(rewards)
    assert of_sums[0] == of_sums[1]
    assert of_parts[0] > of_parts[1] + 0.4


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([None, 0.0, 1.0, 0.1, 7.0])), min_size=2, max_size=9))
def test_batch_scale_is_that_of_all_rewards(rows):
    scored = [score for _, score in rows if score is not None]
    spread = statistics.stdev(scored) if len(scored) > 1 else 0.0
    expected = []
    for group, score in rows:
        own = [s for g, s in rows if g == group and s is not None]
        deviation = None if score is None else score - math.fsum(own) / len(own)
        expected.append(None if score is None else 0.0 if len(set(own)) < 2 else deviation / (spread + 0.01))
    close(batch_advantages(tensor([s for _, s in rows]), torch.tensor([g for g, _ in rows]), eps=0.01), expected, 10)


@pytest.mark.parametrize("name", ["std", "none", "leave_one_out", "pass_at_2", "gdpo", "batch"])
def test_clip_bounds_both_signs_and_leaves_the_rest(name):
    rewards, clip = torch.tensor([0.0, 0.0, 1.0, 9.0, NAN]), 0.4
    clipped = {
        "std": lambda: group_advantages(rewards, eps=0.0, clip=clip),
        "none": lambda: group_advantages(rewards, scale="none", clip=clip),
        "leave_one_out": lambda: leave_one_out_advantages(rewards, clip=clip),
        "pass_at_2": lambda: pass_at_k_advantages(rewards, k=2, eps=0.0, clip=clip),
        "gdpo": lambda: gdpo_advantages(torch.stack([rewards] * 2, 1), [0.3, 0.7], eps=0.0, clip=clip),
        "batch": lambda: batch_advantages(
            torch.cat([rewards, torch.tensor([1.0, -1.0])]), [0] * 5 + [1, 1], eps=0.0, clip=clip
        )[:5],
    }[name]()
    free = ALL[name](rewards)
    assert free[:4].abs().max() > clip
    torch.testing.assert_close(clipped, free.clamp(-clip, clip), equal_nan=True, rtol=0, atol=0)


def test_estimators_by_name():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert make_estimator("group", scale="none")(rewards)[3] == 0.75
    assert make_estimator("leave_one_out")(rewards)[3] == 1.0
    assert make_estimator("pass_at_k", k=2, scale="none")(rewards)[3] == 0.5
    for weights in ([1.0, 0.0], torch.tensor([1.0, 0.0])):
        of_parts = make_estimator("gdpo", weights_K=weights, scale="none")(torch.stack([rewards, 1 - rewards], 1))
        assert of_parts[3] == 0.75
    pickle.loads(pickle.dumps(make_estimator("pass_at_k", k=2, group_size=4)))


def test_group_with_failed_completions_is_no_error_where_the_group_size_is_known():
    """G6: of 4 completions two failed, so that the rewards of two come."""
    with pytest.raises(ValueError, match="k=3 for a group of 2"):
        make_estimator("pass_at_k", k=3)(torch.tensor([0.0, 1.0]))
    known = make_estimator("pass_at_k", k=3, group_size=4)
    assert known(torch.tensor([0.0, 1.0])).tolist() == [0.0, 0.0]
    rewards = torch.tensor([0.0, 0.0, NAN, 1.0])
    assert str(known(rewards).tolist()) == str(pass_at_k_advantages(rewards, k=3).tolist())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {}, "'grpo' is unknown; choose one of 'group', 'leave_one_out', 'pass_at_k', 'gdpo'"),
        ("group", dict(epsilon=0.1), r"\['epsilon'\].*'group'; it takes scale, eps, clip\."),
        ("pass_at_k", {}, r"options \[\].*needs k\."),
        ("group", dict(scale="mad"), "scale='mad'"),
        ("pass_at_k", dict(k=9, group_size=8), "k=9 for a group of 8"),
        ("pass_at_k", dict(k=2, scale="std"), "'std' is unknown; choose one of 'population_std', 'none'"),
        ("leave_one_out", dict(group_size=1), "leave_one_out on a group of 1"),
        ("group", dict(group_size=0), "group_size=0"),
        ("gdpo", dict(weights_K=[1.0, math.inf]), "2 reward functions; give one finite number each"),
    ],
)
def test_bad_configurations_are_found_when_the_estimator_is_made(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_estimator(name, **options)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (group_advantages, dict(rewards_G=torch.tensor([[1.0]])), r"shape \(1, 1\).*\[G\]"),
        (group_advantages, dict(rewards_G=torch.tensor([1.0, math.inf])), "infinity.*finite"),
        (group_advantages, dict(rewards_G=torch.tensor([1.0]), scale="mad"), "'mad'.*'std', 'population_std', 'none'"),
        (group_advantages, dict(rewards_G=torch.tensor([1.0]), eps=-1.0), "eps=-1.0.*>= 0"),
        (group_advantages, dict(rewards_G=torch.tensor([1.0]), clip=0.0), "clip=0.0.*above 0"),
        (leave_one_out_advantages, dict(rewards_G=torch.tensor([1.0])), "leave_one_out on a group of 1.*n="),
        (leave_one_out_advantages, dict(rewards_G=torch.tensor([1.0, -math.inf])), "infinity"),
        (leave_one_out_advantages, dict(rewards_G=torch.tensor([1.0, 0.0]), clip=-1.0), "clip=-1.0"),
        (pass_at_k_advantages, dict(rewards_G=torch.tensor([1.0, 0.0]), k=0), "k=0 for a group of 2"),
        (pass_at_k_advantages, dict(rewards_G=torch.tensor([1.0, NAN]), k=3), "k=3 for a group of 2"),
        (pass_at_k_advantages, dict(rewards_G=torch.tensor([1.0, math.inf]), k=1), "infinity"),
        (pass_at_k_advantages, dict(rewards_G=torch.tensor([1.0]), k=1, eps=NAN), "eps=nan"),
        (gdpo_advantages, dict(rewards_GK=torch.tensor([1.0])), r"shape \(1,\).*advantage_per_reward=True"),
        (gdpo_advantages, dict(rewards_GK=torch.tensor([[1.0, math.inf]])), "infinity"),
        (gdpo_advantages, dict(rewards_GK=torch.zeros(2, 2), weights_K=[1.0]), r"\[1.0\] for 2 reward functions"),
        (batch_advantages, dict(rewards_S=torch.zeros(3), group_id_S=[0, 1]), r"shape \(2,\) and rewards_S \(3,\)"),
        (batch_advantages, dict(rewards_S=torch.tensor([math.inf]), group_id_S=[0]), "infinity"),
        (batch_advantages, dict(rewards_S=torch.zeros(1), group_id_S=[0], clip=NAN), "clip=nan"),
    ],
)
def test_bad_input(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments)
