"""Moves KV blocks between the worker's cache and a connector, in the order of the steps.

The worker does everything in the order in which it is asked. So a block that a step overwrites is read before that step is
handed over, and a block that is loaded is written after all steps that knew it for something else. Disks are the connector's
threads' business; the event loop only passes on what is done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from aioengine.core.scheduler import Scheduler
from aioengine.core.scheduler_output import KVLoad, SchedulerOutput
from aioengine.executor.base import Executor
from aioengine.kv_connector.base import KVConnector
from aioengine.printable import get_logger
from aioengine.request import Request

logger = get_logger(__name__)

_SLICE_BYTES = 64 << 20  # written to the cache in one turn of the worker: some 10 ms, for which a step waits
_BLOCKS_PER_SAVE = 128  # of `save_all`

OnLoaded = Callable[[str, int], None]
"""Takes the id of a request and how many blocks of its `KVLoad` hold their content now. Called in the event loop."""


class KVTransfers:
    """Owns the connector. Everything but the callbacks of futures runs in the event loop."""

    def __init__(self, connector: KVConnector, executor: Executor, *, scheduler: Scheduler, on_loaded: OnLoaded) -> None:
        self.connector = connector
        self._executor = executor
        self._scheduler = scheduler
        self._on_loaded = on_loaded
        self._loop = asyncio.get_running_loop()

    def before_step(self, output: SchedulerOutput) -> None:
        """To be called right before a step is handed to the executor."""
        transfers = output.kv_connector_metadata
        if transfers is None:
            return
        hashes = self._scheduler.take_leaving_hashes()
        self._save(transfers.saves, hashes)
        for load in transfers.loads:
            request = self._scheduler.loading[load.req_id]
            first = len(load.computed_block_ids)
            wanted = request.block_hashes[first : first + len(load.block_ids)]
            future = self.connector.load(wanted)
            future.add_done_callback(partial(self._in_loop, self._write, load, request, 0))

    # ------------------------------------------------------------------ saving
    def _save(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> Future[list[Any]] | None:
        """Read blocks as they are when the worker comes to it, and hand them to the connector."""
        missing = self.connector.select_missing(hashes)
        wanted = [(block_id, block_hash) for block_id, block_hash, is_missing in zip(block_ids, hashes, missing, strict=True) if is_missing]
        if not wanted:
            return None
        read: Future[list[Any]] = self._executor.collective_rpc("read_kv_blocks", [block_id for block_id, _ in wanted])
        read.add_done_callback(partial(self._keep, [block_hash for _, block_hash in wanted]))
        return read

    def _keep(self, hashes: list[bytes], done: Future[list[Any]]) -> None:
        """In the worker's thread."""
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            logger.warning("%d KV blocks could not be read, and are not saved: %s", len(hashes), error)
            return
        (content,) = done.result()
        self.connector.save(hashes, content)

    async def save_all(self) -> int:
        """Save all that the prefix cache can serve and the connector does not have; returns how many blocks that were."""
        pool = self._scheduler.kv_cache_manager.block_pool
        blocks, num_saved = pool.cached_blocks(), 0
        for first in range(0, len(blocks), _BLOCKS_PER_SAVE):
            # Steps go on meanwhile: what is not there any more has been saved when it left.
            part = [
                (block_id, block_hash)
                for block_id, block_hash in blocks[first : first + _BLOCKS_PER_SAVE]
                if pool.block_hash[block_id] == block_hash
            ]
            hashes = [block_hash for _, block_hash in part]
            num_missing = sum(self.connector.select_missing(hashes))
            read = self._save([block_id for block_id, _ in part], hashes)
            if read is not None:
                await asyncio.wrap_future(read)
                await asyncio.wrap_future(self.connector.flush())
                num_saved += num_missing
        return num_saved

    # ------------------------------------------------------------------ loading
    def _write(self, load: KVLoad, request: Request, num_written: int, done: Future[list[bytes]]) -> None:
        """The connector has read what it has of a load: write it into the cache, a slice at a time."""
        contents: list[bytes] = []
        if not done.cancelled():
            if (error := done.exception()) is not None:
                logger.warning("the KV blocks of request %r could not be loaded, and are computed: %s", load.req_id, error)
            else:
                contents = done.result()
        self._write_slice(load, request, num_written, contents)

    def _write_slice(self, load: KVLoad, request: Request, num_written: int, contents: list[bytes]) -> None:
        if self._scheduler.loading.get(load.req_id) is not request:
            return  # it ended or was reset; its blocks may be somebody else's
        if num_written == len(contents):
            self._on_loaded(load.req_id, num_written)
            return
        end = num_written + max(1, _SLICE_BYTES // len(contents[0]))
        part = contents[num_written:end]
        written = self._executor.collective_rpc("write_kv_blocks", load.block_ids[num_written : num_written + len(part)], part)
        written.add_done_callback(partial(self._in_loop, self._written, load, request, num_written, contents, len(part)))

    def _written(
        self, load: KVLoad, request: Request, num_written: int, contents: list[bytes], num_more: int, done: Future[list[Any]]
    ) -> None:
        if done.cancelled() or (error := done.exception()) is None:
            self._write_slice(load, request, num_written + num_more, contents)
            return
        logger.warning("the KV blocks of request %r could not be written, and are computed: %s", load.req_id, error)
        self._write_slice(load, request, num_written, contents[:num_written])

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        """In whichever thread completes a future: do the rest in the event loop."""
        with contextlib.suppress(RuntimeError):  # it was closed, and nobody waits for the blocks any more
            self._loop.call_soon_threadsafe(call, *args)

    def close(self) -> None:
        """As `KVConnector.close`. Takes as long as the disk does: not to be called in the event loop."""
        self.connector.close()
