"""Reloads of a model inside vLLM, in a process that holds both: staged beside the served tensors, and in place."""

import subprocess
import sys
from pathlib import Path

import pytest
from fakes import tiny_qwen3

pytestmark = pytest.mark.vllm

PROGRAM = """
import os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config

def inside(worker):
    from torchrl_asyncgrpo.weight_sync.vllm_reload import StagedReload, reload_in_place
    model, config = worker.model_runner.get_model(), worker.model_runner.model_config
    moved = {name: tensor * 1.5 for name, tensor in weights.items()}
    few = dict(list(moved.items())[:-1])
    wrong = {**moved, "model.norm.weight": torch.zeros(3)}
    with set_current_vllm_config(worker.vllm_config):
        before = answer()
        for bad in (few, wrong):
            try:
                StagedReload(model, bad)
            except (ValueError, AssertionError, RuntimeError):
                assert answer() == before, "a staged reload that failed has changed the model"
            else:
                raise AssertionError("a bad push was staged")
        staged = StagedReload(model, moved, keep_unpacked=True)
        assert answer() == before, "staging has changed the model"
        staged.commit(config)
        after = answer()
        assert after != before
        StagedReload(model, weights, keep_unpacked=True).commit(config)
        assert answer() == before, "the first weights do not come back"
        for bad in (few, wrong):
            try:
                reload_in_place(model, bad, config)
            except (ValueError, AssertionError, RuntimeError):
                reload_in_place(model, moved, config)
                assert answer() == after, "a failed reload in place has left something behind"
            else:
                raise AssertionError("a bad push was loaded")
        digests = worker.compute_weight_checksums()
        empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        assert empty not in digests.values(), "packed weights cannot be read"

weights = load_file(sys.argv[1] + "/model.safetensors")
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, enable_prefix_caching=False)

def answer():
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params, use_tqdm=False)
    return [(token, row[token].logprob) for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)]

llm.collective_rpc(inside)
print("passed")
"""


def test_staged_and_in_place_reloads_give_the_pushed_model_and_survive_bad_pushes(tmp_path):
    # untied: vLLM's own reload leaves the packed head of a tied model behind on a CPU, where it is not used here
    model = tiny_qwen3(
        hidden_size=128, head_dim=64, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False
    )
    model.save_pretrained(tmp_path)
    (tmp_path / "reloads.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, tmp_path / "reloads.py", tmp_path], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "passed" in done.stdout
