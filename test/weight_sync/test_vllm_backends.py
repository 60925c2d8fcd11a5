"""vLLM's own backends: assembled with a stand-in for the GPU's side, and NCCL for real where there are two GPUs."""

import threading

import pytest
import torch
from adapted import lora
from fakes import served_qwen3, tiny_moe, tiny_qwen3
from push_tools import own_log_probs, perturb, sample
from safetensors.torch import load_file

from torchrl_asyncgrpo import VLLMEngine, VLLMWeightSyncSender
from torchrl_asyncgrpo.engines.vllm_description import ServerDescription
from torchrl_asyncgrpo.engines.vllm_server import VLLMServer

pytestmark = pytest.mark.vllm


class Server:
    """Answers a sender as a server of some backend would, and remembers the calls."""

    url = "http://server"

    def __init__(self, backend, dtype="float32"):
        self.calls, self.version, self.paused = [], 0, False
        self.description = ServerDescription(
            model="policy", root="/elsewhere", max_model_len=128, has_weight_routes=True, has_generate_route=True,
            dtype=dtype, transfer_backend=backend, world_size=2,
        )  # fmt: skip

    def describe(self):
        return self.description

    def health(self, **_):
        return True

    def weight_version(self, **_):
        return self.version

    def pause(self, mode, clear_cache, **_):
        self.calls.append(f"pause {mode} {clear_cache}")
        self.paused = True

    def resume(self, **_):
        self.calls.append("resume")
        self.paused = False

    def post(self, path, body=None, **_):
        self.calls.append(path)
        if path == "/finish_weight_update":
            self.version = int(body["weight_version"])

    def close(self):
        pass


class Transfer:
    """What vLLM's trainer-side engine does to its client and source, without the collective between."""

    def __init__(self, client, source, **settings):
        self.settings, self.client, self.source, self.blocked, self.closed = settings, client, source, None, False
        self.ended = threading.Event()

    def send_weights(self):
        self.client.start_weight_update()
        if self.blocked is not None:
            self.blocked.wait()
        self.sent = dict(self.source)
        assert [(meta.name, meta.dtype, meta.shape) for meta in self.source.metadata()] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.sent.items()
        ]
        self.client.update_weights({"names": list(self.sent)})
        self.client.finish_weight_update()
        self.ended.set()

    def shutdown(self):
        self.closed = True


@pytest.fixture
def pushing(monkeypatch):
    from torchrl_asyncgrpo.weight_sync import vllm_transfer

    opened = []

    def open_transfer(*arguments, **settings):
        opened.append(Transfer(*arguments, **settings))
        return opened[-1]

    monkeypatch.setattr(vllm_transfer, "open_transfer", open_transfer)

    def make(backend, **options):
        sender = VLLMWeightSyncSender(served_qwen3(), Server.url, backend=backend, verify="none", **options)
        sender._http = Server(backend, str(options.get("serving_dtype", torch.float32)).removeprefix("torch."))
        return sender, sender._http, opened

    return make


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_a_push_pauses_sends_everything_once_names_the_version_and_resumes(backend, pushing):
    sender, server, opened = pushing(backend, serving_dtype=torch.bfloat16, pause_mode="wait", clear_cache=False)
    assert [sender.update_weights(), sender.update_weights()] == [1, 2]
    (transfer,) = opened
    round_of_calls = ["pause wait False", "/start_weight_update", "/update_weights", "/finish_weight_update", "resume"]
    assert server.calls == 2 * round_of_calls
    assert server.version == 2
    assert transfer.settings["workers"] == 2
    assert {tensor.dtype for tensor in transfer.sent.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in transfer.sent  # tied to the embedding


@pytest.mark.parametrize(
    ("make", "serving_dtype", "packed"),
    [
        (served_qwen3, torch.float32, False),
        (served_qwen3, torch.bfloat16, True),
        (lambda: lora(served_qwen3()), torch.float32, True),
    ],
)
def test_ipc_holds_no_more_than_a_buffer_of_what_is_made_for_a_push(make, serving_dtype, packed, monkeypatch):
    """Unpacked, vLLM keeps all tensors alive until the push ends; a buffer takes the largest one in any case."""
    from torchrl_asyncgrpo.weight_sync import vllm_transfer

    opened = []
    monkeypatch.setattr(
        vllm_transfer.WeightTransferTrainerFactory, "trainer_init", lambda info, **_: opened.append(info)
    )
    sender = VLLMWeightSyncSender(make(), Server.url, backend="ipc", serving_dtype=serving_dtype)
    sender._http = Server("ipc", str(serving_dtype).removeprefix("torch."))
    for limit in (2**30, 100):
        monkeypatch.setattr(vllm_transfer, "DEFAULT_PACKED_BUFFER_SIZE_BYTES", limit)
        sender.init_weight_transfer()
    sizes = [tensor.numel() * serving_dtype.itemsize for _, tensor in sender.named_weights()]
    assert [info.packed for info in opened] == [packed] * 2
    assert [info.packed_buffer_size_bytes for info in opened] == [sum(sizes), max(sizes)]


def test_a_collective_that_hangs_is_an_error_within_the_time_out_and_the_next_push_shakes_hands_anew(pushing):
    sender, server, opened = pushing("nccl", timeout=0.2)
    sender.update_weights()
    opened[0].blocked = threading.Event()
    opened[0].ended.clear()
    with pytest.raises(TimeoutError, match=r"longer than timeout=0.2 s"):
        sender.update_weights()
    assert sender.policy_version == 1
    assert server.paused  # nobody knows what the server holds
    assert sender.update_weights() == 2
    assert len(opened) == 2
    assert opened[0].closed
    assert not server.paused
    calls = len(server.calls)
    opened[0].blocked.set()
    assert not opened[0].ended.wait(0.5)
    assert len(server.calls) == calls  # what was given up says nothing more to the server


def test_delta_needs_a_backend_that_sends_elements():
    with pytest.raises(ValueError, match=r"delta=True with backend='nccl'.*'shm' or 'sparse_nccl'"):
        VLLMWeightSyncSender(served_qwen3(), Server.url, backend="nccl", delta=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gloo"}, "backend='gloo'; it is one of 'shm', 'nccl', 'ipc', 'sparse_nccl'"),
        ({"pause_mode": "freeze"}, "pause_mode='freeze'; it is one of 'keep', 'wait', 'abort'"),
        ({"verify": "sha"}, "verify='sha'; it is one of 'checksum', 'none'"),
    ],
)
def test_a_wrong_choice_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        VLLMWeightSyncSender(served_qwen3(), Server.url, **options)


def test_parameters_of_several_dtypes_need_a_serving_dtype():
    model = served_qwen3()
    model.lm_head.to(torch.bfloat16)
    model.model.norm.to(torch.float64)
    with pytest.raises(ValueError, match=r"parameters of torch\.\w+, torch\.\w+.*pass serving_dtype"):
        VLLMWeightSyncSender(model, Server.url)


@pytest.mark.parametrize(("has_routes", "backend", "message"), [
    (False, None, r"VLLM_SERVER_DEV_MODE=1"),
    (True, None, r"no weight-transfer backend: add --weight-transfer-config '\{\"backend\": \"shm\"\}'"),
])  # fmt: skip
def test_a_server_without_routes_or_backend_is_found_at_the_handshake(has_routes, backend, message):
    sender = VLLMWeightSyncSender(served_qwen3(), Server.url)
    sender._http = Server("shm")
    sender._http.description = ServerDescription(
        model="policy", root="/elsewhere", max_model_len=128, has_weight_routes=has_routes, has_generate_route=True,
        dtype="float32", transfer_backend=backend,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        sender.update_weights()


def test_a_server_that_is_not_there_is_an_error_that_names_the_address():
    sender = VLLMWeightSyncSender(served_qwen3(), "http://127.0.0.1:9", restart_timeout=1)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        sender.update_weights()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["dense", "mixture of experts"])
def test_weights_travel_under_the_names_and_shapes_of_the_base_checkpoint(kind, tied, tmp_path):
    model = tiny_qwen3(tie_word_embeddings=tied) if kind == "dense" else tiny_moe(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(VLLMWeightSyncSender(model, Server.url).named_weights())
    assert sent.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in sent.items())


def test_persistent_buffers_travel_and_others_do_not():
    model = served_qwen3()
    model.model.register_buffer("scale", torch.ones(3))
    model.model.register_buffer("table", torch.ones(3), persistent=False)
    names = [name for name, _ in VLLMWeightSyncSender(model, Server.url).named_weights()]
    assert "model.scale" in names
    assert "model.table" not in names


class Sparse:
    """vLLM's sparse engine, applied to a server's tensors at once."""

    def __init__(self, held):
        self.held, self.pushes = held, []

    def send_weight_chunk(self, patches):
        for patch in patches:
            self.pushes[-1] += len(patch.indices)
            self.held[patch.name].view(-1)[patch.indices.long()] = patch.values


def test_sparse_pushes_are_full_first_and_after_a_failure_and_bit_identical(monkeypatch):
    from torchrl_asyncgrpo.weight_sync import vllm_transfer

    model = served_qwen3()
    weights = dict(model.named_parameters())
    held = {name: torch.zeros_like(tensor, dtype=torch.bfloat16).detach() for name, tensor in weights.items()}
    engine = Sparse(held)
    monkeypatch.setattr(vllm_transfer.WeightTransferTrainerFactory, "trainer_init", lambda *_, **__: engine)
    source = vllm_transfer.PushSource((name, torch.bfloat16, tuple(tensor.shape)) for name, tensor in weights.items())
    client = vllm_transfer.PushClient(Server("sparse_nccl"), 10.0)
    client.version = "1"
    transfer = vllm_transfer.SparseTransfer(None, client, source, delta=True)
    total = sum(tensor.numel() for tensor in weights.values())

    def push():
        engine.pushes.append(0)
        source.weights = weights.items()
        transfer.send_weights()
        assert all(torch.equal(held[name], tensor.to(torch.bfloat16)) for name, tensor in weights.items())

    push()
    perturb(model, share=0.01)
    push()
    assert engine.pushes[0] == total
    assert 0 < engine.pushes[1] < 0.03 * total
    perturb(model, share=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "send_weight_chunk", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            push()
    push()
    assert engine.pushes[3] == total


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["nccl", "sparse_nccl"])
def test_pushes_over_nccl_from_one_gpu_to_a_server_on_another(backend, tmp_path):
    model = served_qwen3().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    model.to("cuda:0")
    environment = {"CUDA_VISIBLE_DEVICES": "1"}
    with VLLMServer(
        tmp_path, backend=backend, dtype="bfloat16", max_model_len=128, device="cuda", environment=environment
    ) as server:
        sender = VLLMWeightSyncSender(
            model, server.url, backend=backend, delta=backend == "sparse_nccl", verify="checksum", timeout=120
        )
        engine = VLLMEngine(server.url)
        for version in (1, 2, 3):
            perturb(model, seed=version)
            assert sender.update_weights() == version
        completions = sample(engine, n=8, max_tokens=32)
        assert {version for completion in completions for version in completion.policy_versions} == {3}
        own_L, sampled_L = own_log_probs(model, completions)
        torch.testing.assert_close(own_L, sampled_L, rtol=0, atol=0.05)
        engine.shutdown()
        sender.destroy()
