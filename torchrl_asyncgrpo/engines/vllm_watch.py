"""Whether a vLLM server is up and holds current weights: told from outages, waited for once for all requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torchrl._utils import logger as torchrl_logger

from torchrl_asyncgrpo.engines.vllm_description import PolicyAdapter
from torchrl_asyncgrpo.engines.vllm_http import VLLMHTTP, RequestRefused, ServerFailed, ServerHung, ServerUnreachable

# Seconds that a probe of a server in trouble may take; it is repeated until the server is back.
_PROBE_TIMEOUT = 5.0
OUTAGES = (ServerUnreachable, ServerHung, ServerFailed)


class ServerWatch:
    """Send requests to a server, notice when it is gone, and wait until it is back. Belongs to one event loop.

    A server that was started again holds the weights of its checkpoint, and no adapters. It is back when the version of
    its weights, or of its newest adapter, is no older than the newest one seen, which it becomes when the trainer's
    sender pushes again.

    Args:
        http: the server.
        adapters: the server serves adapters.
        restart_timeout: seconds to wait for a server that is down, and again for its weights.
        poll_interval: seconds between two looks.
        hang_timeout: seconds after which a server that answers nothing is given up, with all its requests.
        counters: ``recoveries`` is counted here.

    Attributes:
        policy_version: newest version seen, from 0.
    """

    def __init__(
        self,
        http: VLLMHTTP,
        *,
        adapters: bool,
        restart_timeout: float,
        poll_interval: float,
        hang_timeout: float,
        counters: Counter[str],
    ) -> None:
        self.policy_version = 0
        self._looked = False
        self._looking = asyncio.Lock()
        self._http = http
        self._adapters = adapters
        self._restart_timeout = restart_timeout
        self._poll_interval = poll_interval
        self._hang_timeout = hang_timeout
        self._counters = counters
        self._calls = 0
        self._outage: asyncio.Future[Exception] | None = None
        self._patrol: asyncio.Task[None] | None = None
        self._recovery: asyncio.Task[bool] | None = None

    def saw(self, version: int) -> None:
        """Keep the newest version."""
        self.policy_version = max(self.policy_version, version)

    async def look(self) -> None:
        """Before the first request: see the version that the server holds, so that its first restart is noticed."""
        if self._looked:
            return
        async with self._looking:  # requests go on in the order in which they came
            if not self._looked:
                with contextlib.suppress(*OUTAGES):  # the request itself runs into it, and waits
                    self.saw(await self._version())
                    self._looked = True

    async def newest_adapter(self) -> PolicyAdapter | None:
        """The adapter that a request names, to be answered under the newest weights; None for no adapter."""
        return await self._http.newest_adapter(self._hang_timeout) if self._adapters else None

    async def generate(self, body: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Answer of one generation request; raises within ``hang_timeout`` when the server is gone."""
        if self._patrol is None:
            self._outage = asyncio.get_running_loop().create_future()
            self._patrol = asyncio.ensure_future(self._watch_health())
        outage = self._outage
        assert outage is not None
        call = asyncio.ensure_future(self._http.generate(body, timeout))
        call.add_done_callback(_retrieve)
        self._calls += 1
        try:
            first: set[asyncio.Future[Any]] = {call, outage}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise ServerHung(str(outage.result()))
        finally:
            self._calls -= 1
            call.cancel()

    async def recover(self) -> bool:
        """After a failed request: return at once if the server is well, else wait until it is.

        Returns:
            Whether the server was down or held old weights.

        Raises:
            TimeoutError: if it did not come back in ``restart_timeout``, or did not get current weights in that time.
            ValueError: if it came back without the routes that are needed.
        """
        return await asyncio.shield(self._begin_recovery(None))

    async def _version(self) -> int:
        """Version of the newest weights of a server that is alive."""
        version = await self._http.probe(_PROBE_TIMEOUT)
        adapter = await self._http.newest_adapter(_PROBE_TIMEOUT) if self._adapters else None
        return version if adapter is None else adapter.version

    def _begin_recovery(self, problem: Exception | None) -> asyncio.Task[bool]:
        """The recovery under way, or one that begins: with a ``problem``, of a server that is known to be down."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.ensure_future(self._wait_until_well(problem))
            self._recovery.add_done_callback(_retrieve)
        return self._recovery

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._hang_timeout / 3)
            if not self._calls:
                continue
            try:
                await self._http.check_health(self._hang_timeout * 2 / 3)
            except RequestRefused:
                continue  # it answers
            except OUTAGES as error:
                self._begin_recovery(error)
                outage, self._outage = self._outage, asyncio.get_running_loop().create_future()
                assert outage is not None
                outage.set_result(error)

    async def _wait_until_well(self, known: Exception | None) -> bool:
        now = asyncio.get_running_loop().time
        deadline = now() + self._restart_timeout
        was_down, was_stale = known is not None, False
        if known is not None:
            self._warn(str(known))
        while True:
            try:
                version = await self._version()
            except OUTAGES as error:
                problem = f"{error}"
                remedy = "Look into its log, and start it again at the same address."
            else:
                if version >= self.policy_version:
                    self.saw(version)
                    if was_down:
                        self._counters["recoveries"] += 1
                        torchrl_logger.info(f"{self._http.url} is back, with weights of version {version}.")
                    return was_down
                problem = f"its weights are those of version {version}, and version {self.policy_version} was seen."
                remedy = (
                    "The trainer's weight-sync sender has to push again: does it still run? For a trainer that went "
                    "back to an earlier checkpoint, set the engine's policy_version back too."
                )
                if not was_stale:  # it is up: from now on it is the trainer that is waited for
                    was_stale, deadline = True, now() + self._restart_timeout
            if not was_down:
                was_down = True
                self._warn(problem)
            if now() >= deadline:
                raise TimeoutError(
                    f"{self._http.url} did not recover within restart_timeout={self._restart_timeout:g} s: {problem} "
                    f"{remedy}"
                )
            await asyncio.sleep(self._poll_interval)

    def _warn(self, problem: str) -> None:
        torchrl_logger.warning(
            f"{self._http.url} is down or was restarted ({problem}); waiting up to {self._restart_timeout:g} s."
        )


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Nobody need be left to wait for it: its exception is not worth a word then."""
    if not task.cancelled():
        task.exception()
