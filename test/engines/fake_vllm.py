"""vLLM's HTTP API from a script, for the faults that a real server cannot be made to show."""

import contextlib
import json
import select
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WAIT_S = 30  # for what surely comes


def sampled(body, versions=((0, None),), reason="length", tokens=None, **fields):
    """A generate answer: ``tokens`` tokens per completion, all asked for by default, in spans (version, end)."""
    params = body["sampling_params"]
    count = params["max_tokens"] if tokens is None else tokens
    choices = []
    for i in range(params["n"]):
        token_ids = [(params["seed"] + i + j) % 50 for j in range(count)]
        content = [{"token_id": token, "logprob": -1.0 - token, "top_logprobs": []} for token in token_ids]
        spans, start = [], 0
        for version, end in versions:
            spans.append({"version": str(version) if version else "default", "start": start, "end": end or count})
            start = spans[-1]["end"]
        choice = dict(index=i, token_ids=token_ids, finish_reason=reason, logprobs={"content": content})
        choices.append(choice | dict(weight_versions=spans, sampling_mask=None) | fields)
    return {"choices": choices, "model": body.get("model", "policy")}


class FakeVLLM:
    """A server whose answers to generate requests are a script, and after it all that was asked for.

    An answer is a JSON value, ``(status, JSON value or bytes)``, ``"hang"``, ``"half"`` of one, None for a connection
    that is closed, or a callable that makes one of the request.
    """

    def __init__(self, **config):
        self.version = "default"
        self.versions = []  # the next answers of /weight_info, then the version
        self.script = []
        self.bodies = []
        self.headers = []
        self.paths = []
        self.posts = []  # (path, body) of all but generate requests
        self.post_answers = {}  # (status, content) by path, or a callable that makes it of the body
        self.empty_request = (400, {"error": {"message": "token_ids: Field required"}})
        self.connections = 0
        self.sequences = self.most_sequences = 0
        self.health = []  # statuses of the next answers of /health, then 200
        self.gate = threading.Event()  # closed, /health does not answer
        self.gate.set()
        self.disconnected = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.routes = {
            "/v1/models": {"data": [{"id": "policy", "root": "/m", "max_model_len": 64, "parent": None}]},
            "/version": {"version": "0.32.0"},
            "/get_world_size": {"world_size": 2},
            "/server_info": {
                "vllm_config": {
                    "model_config": {
                        "dtype": "torch.bfloat16",
                        "logprobs_mode": config.get("logprobs_mode", "processed_logprobs"),
                        "return_sampling_mask": config.get("return_sampling_mask", False),
                    },
                    "scheduler_config": {
                        "max_num_seqs": config.get("max_num_seqs", 8),
                        "enable_chunked_prefill": config.get("chunked", False),
                    },
                    "weight_transfer_config": {"backend": "nccl"},
                    "device_config": {"device": "cpu"},
                }
            },
        }
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server = None
        self._port = 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def start(self):
        """Listen, on the same port after the first time."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                with fake._lock:
                    fake.connections += 1
                    fake._sockets.add(self.connection)

            def do_GET(self):
                fake._get(self)

            def do_POST(self):
                fake._post(self)

            def log_message(self, *arguments):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request, client_address):
                pass

        self._sockets = set()
        self._server = Server(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def kill(self):
        """Close the port and every connection, as a process that is gone."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    def stop(self):
        self._stopping.set()
        self.gate.set()
        self.kill()

    def wait_for_disconnect(self, handler):
        """Return when the other side has hung up."""
        while not self._stopping.is_set():
            readable, _, _ = select.select([handler.connection], [], [], 0.02)
            if readable:
                self.disconnected.release()
                return

    def _get(self, handler):
        path = handler.path.partition("?")[0]
        self.headers.append(dict(handler.headers))
        self.paths.append(path)
        if path == "/health":
            while not self.gate.wait(0.02):
                pass
            self._send(handler, self.health.pop(0) if self.health else 200, b"")
        elif path == "/weight_info" and self.version is not None:
            self._send(handler, 200, {"weight_version": self.versions.pop(0) if self.versions else self.version})
        elif path in self.routes:
            answer = self.routes[path]
            self._send(handler, *(answer if isinstance(answer, tuple) else (200, answer)))
        else:
            self._send(handler, 404, {"detail": "Not Found"})

    def _post(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])) or b"null")
        if not handler.path.startswith("/inference/v1/generate"):
            self.posts.append((handler.path, body))
            answer = self.post_answers.get(handler.path, (200, {"status": handler.path}))
            self._send(handler, *(answer(body) if callable(answer) else answer))
            return
        if not body:
            self._send(handler, *self.empty_request)
            return
        with self._lock:
            self.bodies.append(body)
            answer = self.script.pop(0) if self.script else sampled
            self.sequences += body["sampling_params"]["n"]
            self.most_sequences = max(self.most_sequences, self.sequences)
        self.arrived.release()
        try:
            answer = answer(body) if callable(answer) else answer
        finally:
            with self._lock:
                self.sequences -= body["sampling_params"]["n"]
        if answer == "hang":
            self.wait_for_disconnect(handler)
        elif answer == "half":
            handler.send_response(200)
            handler.send_header("Content-Length", "100")
            handler.end_headers()
            handler.wfile.write(b'{"choices": [')
            handler.wfile.flush()
            handler.connection.shutdown(2)
        elif answer is None:
            handler.connection.shutdown(2)
        else:
            status, content = answer if isinstance(answer, tuple) else (200, answer)
            self._send(handler, status, content)

    def _send(self, handler, status, content):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def wait_until(condition, seconds=WAIT_S):
    """Poll a condition of another process or thread; False when it did not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
