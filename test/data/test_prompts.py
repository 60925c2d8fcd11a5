import itertools

import pytest

from torchrl_asyncgrpo import PromptSource


def drawn(source, count):
    return [source.draw() for _ in range(count)]


def test_list_repeats_for_ever_with_a_new_group_each_time():
    """G4: the same prompt drawn twice is two groups."""
    draws = drawn(PromptSource(["a", "b"]), 5)
    assert [d.prompt for d in draws] == ["a", "b", "a", "b", "a"]
    assert [d.group_id for d in draws] == [0, 1, 2, 3, 4]


def test_epochs_end_the_source():
    source = PromptSource(["a", "b"], num_epochs=2)
    assert [d.prompt for d in drawn(source, 4)] == ["a", "b", "a", "b"]
    assert source.exhausted
    assert source.draw() is None


def test_shuffle_is_a_new_permutation_of_every_epoch_and_reproducible():
    data = [str(i) for i in range(20)]
    orders = [[d.prompt for d in drawn(PromptSource(data, shuffle=True, seed=s), 40)] for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:20] != orders[0][20:]
    assert sorted(orders[0][:20]) == sorted(orders[0][20:]) == sorted(data)


def test_columns_and_chats():
    chat = [{"role": "user", "content": "hi"}]
    draws = drawn(PromptSource([{"prompt": chat, "answer": 3}, {"prompt": "x", "answer": 4}, chat]), 3)
    assert [d.prompt for d in draws] == [chat, "x", chat]
    assert [d.columns for d in draws] == [{"answer": 3}, {"answer": 4}, {}]


def test_dataset_with_length_and_rows():
    """What a Hugging Face dataset offers: ``len`` and rows by index, without being a Sequence."""

    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"prompt": [{"role": "user", "content": str(index)}], "answer": index}

    source = PromptSource(Rows(), num_epochs=2, shuffle=True)
    draws = drawn(source, 4)
    assert sorted(d.columns["answer"] for d in draws) == [0, 0, 1, 1]
    assert source.exhausted


def a_list():
    return [str(i) for i in range(7)]


@pytest.mark.parametrize(
    ("make", "shuffle"), [(a_list, False), (a_list, True), (lambda: (str(i) for i in itertools.count()), False)]
)
def test_resume_goes_on_and_repeats_the_unfinished(make, shuffle):
    source = PromptSource(make(), shuffle=shuffle)
    before = drawn(source, 10)
    state = source.state_dict()
    after = drawn(source, 5)
    resumed = PromptSource(make(), shuffle=shuffle)
    assert resumed.load_state_dict(state, unfinished=[9, 2, 7]) == [before[2], before[7], before[9]]
    assert drawn(resumed, 5) == after


def test_iterable_is_read_once_and_lazily():
    read = []

    def prompts():
        for i in range(3):
            read.append(i)
            yield str(i)

    source = PromptSource(prompts())
    assert read == []
    assert [d.prompt for d in drawn(source, 3)] == ["0", "1", "2"]
    assert source.exhausted
    assert source.draw() is None


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        ([], {}, ValueError, "empty.*at least one"),
        (iter([]), {}, ValueError, "empty"),
        (3, {}, TypeError, "int.*list"),
        ("text", {}, TypeError, "one string"),
        (["a"], {"num_epochs": 0}, ValueError, "num_epochs=0"),
        (iter(["a"]), {"shuffle": True}, ValueError, "shuffle=True.*list"),
        ([{"question": "a"}], {}, ValueError, r"\['question'\].*'prompt'"),
        ([""], {}, ValueError, "prompt 0 is ''"),
        ([[{"content": "no role"}]], {}, ValueError, "chat messages"),
    ],
)
def test_bad_input(data, options, error, message):
    with pytest.raises(error, match=message):
        PromptSource(data, **options).draw()
