"""vLLM's HTTP API: the one file that knows its routes, its answers and its errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from typing import Any, Literal

import httpx

from torchrl_asyncgrpo.engines.vllm_description import (
    PolicyAdapter,
    ServerDescription,
    configured,
    listed_adapters,
)

# Of one TCP connection; a host that drops packets answers a connect with nothing at all.
CONNECT_TIMEOUT = 10.0
# uvicorn closes a connection that idles for 5 s; one that is reused just then would look like a server that died.
_KEEPALIVE = 2.0
# What /weight_info says before the first push
_UNNAMED_VERSION = "default"
_SHOWN = 500


class ServerUnreachable(ConnectionError):  # noqa: N818 - says what happened
    """The connection was refused, reset, or lost in the middle of an answer."""


class ServerHung(TimeoutError):  # noqa: N818 - says what happened
    """No answer within the time-out."""


class ServerFailed(RuntimeError):  # noqa: N818 - says what happened
    """The server answered with a 5xx status, or with something that is no answer."""


class RequestRefused(ValueError):  # noqa: N818 - says what happened
    """The server refused the request: a 4xx status.

    Args:
        message: names the route, the status and the server's reason.
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[RequestRefused], tuple[str, int]]:
        """As it is raised: what pickle does by itself leaves out the status."""
        return type(self), (str(self), self.status)


def parse_version(name: str) -> int:
    """Policy version that a server's weight version stands for: its integer, and 0 before the first push.

    Raises:
        ValueError: if it is not one of ours.
    """
    if name == _UNNAMED_VERSION:
        return 0
    if not (name.isascii() and name.isdecimal()):
        raise ValueError(
            f"the server's weight version is {name!r}; this package pushes whole numbers, so another trainer pushes to "
            "this server. Give each trainer a server of its own, and restart this one."
        )
    return int(name)


def normalized_url(url: str) -> str:
    """``url`` without its trailing slash.

    Raises:
        ValueError: if it is not the address of a server's root.
    """
    try:
        parsed = httpx.URL(url.strip())
    except httpx.InvalidURL as error:
        raise ValueError(f"url={url!r} is not a URL ({error}); give one such as 'http://localhost:8000'.") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url={url!r}; it must start with http:// or https:// and a host: 'http://localhost:8000'.")
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise ValueError(f"url={url!r}; a port lies between 1 and 65535.")
    if parsed.query or parsed.fragment:
        raise ValueError(f"url={url!r}; it must end after host and port: 'http://localhost:8000'.")
    plain = str(parsed).rstrip("/")
    if plain.endswith("/v1"):
        raise ValueError(f"url={url!r}; leave out the path, the routes are added here: {plain.removesuffix('/v1')!r}.")
    return plain


class VLLMHTTP:
    """Calls to one vLLM server, every status of which is checked.

    The plain methods are synchronous and may be called from any thread; each takes ``timeout``, seconds, None for that
    of the client. The coroutines belong to one event loop, the first that awaits one; ``aclose`` ends them. Proxies of
    the environment are not used.

    Every call raises:
        ServerUnreachable: connection refused, reset or lost in the middle.
        ServerHung: no answer in time.
        ServerFailed: a 5xx status, with the server's message, or an answer that is not JSON.
        RequestRefused: a 4xx status, with the server's message.

    Args:
        url: the server's root, such as ``"http://localhost:8000"``.
        timeout: seconds that a synchronous call may take.
        api_key: that of the server's ``--api-key``.

    Raises:
        ValueError: if ``url`` is not the address of a server's root.
    """

    def __init__(self, url: str, *, timeout: float = 30.0, api_key: str | None = None) -> None:
        self.url = normalized_url(url)
        self.timeout = timeout
        self._options: dict[str, Any] = dict(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE),
            trust_env=False,
        )
        self._client: httpx.Client | None = None
        self._opening = threading.Lock()
        self._async_client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether the server answers and its engine lives; never raises."""
        try:
            self._call("GET", "/health", timeout=timeout)
        except (ServerUnreachable, ServerHung, ServerFailed, RequestRefused):
            return False
        return True

    def describe(self, *, timeout: float | None = None) -> ServerDescription:
        """Ask the server what it serves and which routes it opens.

        Raises:
            ValueError: if what answers is not vLLM, or wants another ``api_key``.
        """
        model = self._model(timeout)
        config, info = self._configuration(timeout)
        return ServerDescription(
            model=model["id"],
            root=model.get("root") or model["id"],
            max_model_len=model["max_model_len"],
            has_weight_routes=self._has_route("GET", "/weight_info", {404}, timeout),
            # They refuse the empty request before they do anything; closed, one answers 403, and older ones 404.
            has_generate_route=self._has_route("POST", "/inference/v1/generate", {403, 404, 405}, timeout),
            has_adapter_routes=self._has_route("POST", "/v1/load_lora_adapter", {403, 404, 405}, timeout),
            vllm_version=info.get("version"),
            world_size=self._optional("/get_world_size", timeout=timeout).get("world_size"),
            **configured(config),
        )

    def weight_version(self, *, timeout: float | None = None) -> int:
        """Version of the weights that the server holds; 0 before the first push.

        Raises:
            ValueError: if the server's version is not an integer.
        """
        return parse_version(self._call("GET", "/weight_info", timeout=timeout)["weight_version"])

    def pause(self, mode: Literal["abort", "wait", "keep"], clear_cache: bool, *, timeout: float | None = None) -> None:
        """Hold generation.

        Args:
            mode: ``"abort"`` ends what runs, with the tokens so far; ``"wait"`` waits for it; ``"keep"`` freezes it.
            clear_cache: drop the prefix cache, of which the keys and values are those of the weights before.
            timeout: seconds.
        """
        self._call("POST", "/pause", query={"mode": mode, "clear_cache": str(clear_cache).lower()}, timeout=timeout)

    def resume(self, *, timeout: float | None = None) -> None:
        """Go on generating; no error where nothing was held."""
        self._call("POST", "/resume", timeout=timeout)

    def is_paused(self, *, timeout: float | None = None) -> bool:
        """Whether generation is held."""
        return bool(self._call("GET", "/is_paused", timeout=timeout)["is_paused"])

    def checksums(self, *, timeout: float | None = None) -> dict[str, str]:
        """Checksum of each tensor that the server holds, by the server's name of it."""
        answer = self._call("POST", "/weight_checker", body={"action": "checksum"}, timeout=timeout)
        return dict(answer["checksums"])

    def adapters(self, *, timeout: float | None = None) -> list[PolicyAdapter]:
        """The adapters of policy versions that requests may name, oldest first."""
        return listed_adapters(self._call("GET", "/v1/models", timeout=timeout)["data"])

    def load_adapter(self, adapter: PolicyAdapter, directory: str, *, timeout: float | None = None) -> None:
        """Have every worker read an adapter; from the answer on requests may name it.

        Args:
            adapter: none that was loaded before.
            directory: of ``adapter_model.safetensors`` and ``adapter_config.json``, as the server sees it. vLLM reads
                them again, and dies if it cannot, for a request whose adapter had to make room for another.
            timeout: seconds.
        """
        body = {"lora_name": adapter.name, "lora_path": directory}
        self._call("POST", "/v1/load_lora_adapter", body=body, timeout=timeout, tells_nothing=True)

    def unload_adapter(self, adapter: PolicyAdapter, *, timeout: float | None = None) -> bool:
        """Let no further request name an adapter; those that did keep it. vLLM ends a load of it first.

        Returns:
            Whether requests could name it until now.
        """
        try:
            body = {"lora_name": adapter.name}
            self._call("POST", "/v1/unload_lora_adapter", body=body, timeout=timeout, tells_nothing=True)
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return False
        return True

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None) -> Any:
        """Answer of a POST to any route, for vLLM's own weight-transfer client."""
        return self._call("POST", path, body=body, timeout=timeout)

    def close(self) -> None:
        """Close the connections of the synchronous calls; a later call opens new ones."""
        with self._opening:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    async def generate(self, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Answer of one request to ``/inference/v1/generate``; cancelling it ends the request on the server too.

        Args:
            body: the request, as vLLM words it.
            timeout: seconds until the answer.
        """
        return await self._call_async("POST", "/inference/v1/generate", body=body, timeout=timeout)

    async def check_health(self, timeout: float) -> None:
        """Return if the server answers and its engine lives; else raise what is the matter."""
        await self._call_async("GET", "/health", timeout=timeout)

    async def probe(self, timeout: float) -> int:
        """Version of the weights of a server that is alive, asked of the very process that decodes."""
        await self.check_health(timeout)
        return parse_version((await self._call_async("GET", "/weight_info", timeout=timeout))["weight_version"])

    async def newest_adapter(self, timeout: float) -> PolicyAdapter | None:
        """The last publication of the newest policy version that requests may name; None without any."""
        models = (await self._call_async("GET", "/v1/models", timeout=timeout))["data"]
        return max(listed_adapters(models), default=None)

    async def aclose(self) -> None:
        """Close the connections of the coroutines; call it in their event loop."""
        client, self._async_client, self._loop = self._async_client, None, None
        if client is not None:
            await client.aclose()

    def _model(self, timeout: float | None) -> Mapping[str, Any]:
        remedy = "url must be the root of a vLLM server, such as 'http://localhost:8000', without a path."
        try:
            models = self._call("GET", "/v1/models", timeout=timeout)["data"]
            # Adapters have a parent.
            return next(model for model in models if model["max_model_len"] and not model.get("parent"))
        except RequestRefused as refused:
            if refused.status in (401, 403):
                raise ValueError(f"{refused} Pass the server's --api-key as api_key.") from None
            raise ValueError(f"{self.url} does not speak vLLM's API: {refused} {remedy}") from None
        except (ServerFailed, KeyError, TypeError, StopIteration) as error:
            raise ValueError(f"{self.url} does not speak vLLM's API ({error!r}); {remedy}") from None

    def _configuration(self, timeout: float | None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The resolved configuration, empty without development mode, and the release."""
        info = self._optional("/version", timeout=timeout)
        answer = self._optional("/server_info", query={"config_format": "json"}, timeout=timeout)
        return answer.get("vllm_config", {}), info

    def _optional(self, path: str, **options: Any) -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = self._call("GET", path, **options)
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return {}
        return answer

    def _has_route(self, method: str, path: str, closed: set[int], timeout: float | None) -> bool:
        try:
            self._call(method, path, body={} if method == "POST" else None, timeout=timeout)
        except RequestRefused as refused:
            return refused.status not in closed
        return True

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        tells_nothing: bool = False,
    ) -> Any:
        """The JSON of an answer; with ``tells_nothing``, whatever it holds is not looked at."""
        seconds = self.timeout if timeout is None else timeout
        with self._opening:
            if self._client is None:
                # uvicorn resets a connection some time after a 500: these calls are few, and each gets a new one
                limits = httpx.Limits(max_keepalive_connections=0)
                self._client = httpx.Client(**(self._options | {"limits": limits}))
            client = self._client
        try:
            response = client.request(method, self.url + path, params=query, json=body, timeout=_httpx_timeout(seconds))
        except httpx.RequestError as error:
            raise self._lost(error, method, path, seconds) from error
        return self._answer(response, method, path, tells_nothing)

    async def _call_async(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, timeout: float
    ) -> Any:
        loop = asyncio.get_running_loop()
        if self._async_client is None:
            self._async_client, self._loop = httpx.AsyncClient(**self._options), loop
        if self._loop is not loop:
            raise RuntimeError("the coroutines of one VLLMHTTP belong to one event loop; build another VLLMHTTP.")
        try:
            response = await self._async_client.request(
                method, self.url + path, json=body, timeout=_httpx_timeout(timeout)
            )
        except httpx.RequestError as error:
            raise self._lost(error, method, path, timeout) from error
        return self._answer(response, method, path)

    def _lost(self, error: httpx.RequestError, method: str, path: str, seconds: float) -> Exception:
        call = f"{method} {self.url}{path}"
        if isinstance(error, httpx.TimeoutException):
            return ServerHung(f"{call}: no answer within {seconds:g} s ({type(error).__name__}).")
        return ServerUnreachable(f"{call}: {str(error) or type(error).__name__}.")

    def _answer(self, response: httpx.Response, method: str, path: str, tells_nothing: bool = False) -> Any:
        call = f"{method} {self.url}{path}"
        if response.status_code >= 500:
            raise ServerFailed(f"{call} answered {response.status_code}: {_message(response)}")
        if not response.is_success:
            raise RequestRefused(f"{call} answered {response.status_code}: {_message(response)}", response.status_code)
        if tells_nothing or not response.content:
            return {}
        try:
            return response.json()
        except ValueError:
            raise ServerFailed(f"{call} answered {response.text[:_SHOWN]!r}, which is not JSON.") from None


def _httpx_timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT), pool=None)


def _message(response: httpx.Response) -> str:
    """The reason in a body, which vLLM's routes put in different places."""
    text = response.text
    try:
        body = json.loads(text)
    except ValueError:
        return text[:_SHOWN]
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return text if text.endswith(".") else f"{text}."
