"""What the scripts leave behind when they have trained a tiny model."""

from transformers import AutoModelForCausalLM, AutoTokenizer


def check_what_is_left(output, model_dir, frames):
    """Look at all that a job leaves but its weights; the state of the trained model, and that before."""
    rows = (output / "csv/scalars/reward.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in rows] == frames
    assert list((output / "tensorboard" / model_dir.name).glob("events.*"))
    assert (output / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert len((output / "answers.md").read_text().splitlines()) == 2 + 8
    trained = AutoModelForCausalLM.from_pretrained(output / "model")
    before = AutoModelForCausalLM.from_pretrained(model_dir)
    assert trained.config._attn_implementation == before.config._attn_implementation
    assert trained.state_dict().keys() == before.state_dict().keys()
    assert AutoTokenizer.from_pretrained(output / "model").chat_template is not None
    return trained.state_dict(), before.state_dict()
