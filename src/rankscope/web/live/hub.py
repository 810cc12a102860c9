"""Tells listening pages that there is something new; looks for it only while one listens."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import anyio.to_thread

POLL_SECONDS = 1.0
"""Seconds between two looks at what pages listen to."""
_COST = 5.0
"""The same as a multiple of what a look took: a slow disk is not kept busy."""


class Hub:
    """Listeners by topic, and the one task that looks for news.

    Args:
        version_of: Returns the version of a topic's page now, None if there is none. It may take
            its time: it runs in another thread.
        poll_seconds: Seconds between two looks.
    """

    def __init__(
        self, version_of: Callable[[str], str | None], poll_seconds: float = POLL_SECONDS
    ) -> None:
        self._version_of = version_of
        self._poll_seconds = poll_seconds
        self._listeners: Counter[str] = Counter()
        self._versions: dict[str, str | None] = {}
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def follow(self, topic: str, have: str) -> AsyncIterator[dict[str, str]]:
        """Yield an event whenever a page's version is not the one that it has.

        The first is ``hello``. After the first look comes ``news``, or ``current`` if there is
        none, and then ``news`` only.

        Args:
            topic: What the page shows.
            have: The version that it shows.
        """
        told = False
        self._listeners[topic] += 1
        try:
            yield {"event": "hello", "data": topic}
            while not self._closed:
                self._start()
                await self._looked.wait()
                version = self._versions.get(topic)
                if version is None or self._closed or (told and version == have):
                    continue
                event = "current" if version == have else "news"
                have, told = version, True
                yield {"event": event, "data": version}
        finally:
            self._listeners[topic] -= 1
            if not self._listeners[topic]:
                del self._listeners[topic]
                self._versions.pop(topic, None)

    def close(self) -> None:
        """End all streams; call it in the event loop."""
        self._closed = True
        self._looked.set()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while self._listeners and not self._closed:
            began = loop.time()
            topics = list(self._listeners)
            found = await asyncio.gather(
                *(anyio.to_thread.run_sync(self._version_of, topic) for topic in topics),
                return_exceptions=True,
            )
            for topic, version in zip(topics, found, strict=True):
                if not isinstance(version, BaseException):
                    self._versions[topic] = version
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(max(self._poll_seconds, _COST * (loop.time() - began)))
