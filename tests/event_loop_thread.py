"""An event loop on a thread of its own, so that tests can call a server as its clients do: from outside."""

import asyncio
import threading


class EventLoopThread:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="server")
        self._thread.start()

    def run(self, coroutine, timeout=60):
        """The coroutine's result; it runs on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self):
        self.run(self.loop.shutdown_asyncgens())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
