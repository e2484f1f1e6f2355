"""Saves the job's state: finds the changed rows on the loop, and writes them on a thread.

``save`` is called after each batch of events and before their orders go out, so that the next master knows of every
order. A store that fails never stops the job: unwritten changes are held and tried again, and ``trouble`` says what is
wrong.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlmesh.master.state.store import Changes, Key, Row, Store, Stored, StoreError, StoreRefused

logger = logging.getLogger(__name__)

_STALE = object()
OPENING_S = 20.0
"""Seconds that a master waits at its start for a reader that locks the store: without the state of the previous master,
all members would start again."""
RETRY_S = 2.0
"""Seconds between retries of a store that failed."""
CLOSE_S = 5.0


class Persistence:
    """The store of one job, used from one loop.

    Args:
        path: path of the file.
        job_id: the job whose state it is.
        clock: seconds, monotonic.
    """

    def __init__(self, path: Path, job_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._job_id, self._clock = path, job_id, clock
        self._written: dict[Key, object] = {}
        self._unwritten: dict[Key, Row | None] = {}
        self._work: queue.SimpleQueue[tuple[Changes, asyncio.Future[bool]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[Stored] = self._loop.create_future()
        self._retry_at: float | None = None
        self.trouble = ""
        """Reason why the state is not being saved; empty if it is."""
        self._thread = threading.Thread(target=self._write_all, name="rlmesh-store", daemon=True)
        self._thread.start()

    async def load(self) -> Stored:
        """Return the state that a previous master left; empty if the store cannot be used.

        Raises:
            StoreRefused: the store may belong to another user, or is of another version.
        """
        try:
            return await asyncio.shield(self._opened)
        except StoreRefused:
            raise
        except StoreError:
            return Stored({})

    def save(self, rows: dict[Key, tuple[object, Callable[[], Row]]]) -> asyncio.Future[bool]:
        """Write the rows that changed.

        Args:
            rows: for all rows, key → (a value that changes whenever the row does, a function that makes the row).

        Returns:
            a future: True when the rows are written, False if they could not be.
        """
        changes: dict[Key, Row | None] = {}
        for key, (mark, make) in rows.items():
            if key not in self._written or self._written[key] != mark:
                changes[key] = make()
                self._written[key] = mark
        if len(self._written) > len(rows):
            for key in [key for key in self._written if key not in rows]:
                del self._written[key]
                changes[key] = None
        done: asyncio.Future[bool] = self._loop.create_future()
        self._unwritten.update(changes)
        if not self._unwritten or (self._retry_at is not None and self._clock() < self._retry_at):
            done.set_result(not self._unwritten)
            return done
        handed, self._unwritten = self._unwritten, {}
        self._work.put((handed, done))
        return done

    async def close(self) -> None:
        """Write the pending changes, for ``CLOSE_S`` at most, and close the file."""
        self._work.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s: the last write hangs; it is left behind", self._path)
        if self._opened.done() and not self._opened.cancelled():
            self._opened.exception()

    # On the thread

    def _write_all(self) -> None:
        store: Store | None = None
        try:
            store = Store(self._path, self._job_id, OPENING_S)
            self._post(self._set_opened, store.read(), None)
        except StoreError as error:
            self._post(self._set_opened, None, error)
        except Exception as error:  # a bug here must not leave the master waiting
            self._post(self._set_opened, None, StoreError(f"{self._path} cannot be opened: {error!r}"))
        while (work := self._work.get()) is not None:
            batch = [work]
            last = False
            while not self._work.empty():
                more = self._work.get()
                if more is None:
                    last = True
                    break
                batch.append(more)
            changes = {key: row for part, _ in batch for key, row in part.items()}
            failed: StoreError | None = None
            try:
                if store is None:
                    store = Store(self._path, self._job_id)
                store.write(changes)
            except StoreError as error:
                failed = error
                if store is not None:
                    store.close()  # it is opened again, and set aside if it is corrupt
                    store = None
            except Exception as error:  # one value that cannot be stored must not stop the saving of others
                logger.exception("a part of the job's state cannot be stored")
                failed = StoreError(f"the job's state cannot be written to {self._path}: {error!r}")
            self._post(self._finished, changes, [done for _, done in batch], failed)
            if last:
                break
        if store is not None:
            store.close()

    def _post(self, fn: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            pass  # the loop has ended, so no one waits for the result

    # On the loop

    def _set_opened(self, stored: Stored | None, error: StoreError | None) -> None:
        if error is not None:
            self._trouble(error)
            self._opened.set_exception(error)
        elif stored is not None:
            self._opened.set_result(stored)

    def _finished(self, changes: Changes, waiting: list[asyncio.Future[bool]], failed: StoreError | None) -> None:
        if failed is None:
            if self.trouble:
                logger.warning("the job's state is saved again to %s", self._path)
            self.trouble, self._retry_at = "", None
        else:
            self._unwritten = {**changes, **self._unwritten}
            self._written = dict.fromkeys(self._written, _STALE)  # the next save may go to a new file
            self._retry_at = self._clock() + RETRY_S
            self._trouble(failed)
        for done in waiting:
            if not done.done():
                done.set_result(failed is None)

    def _trouble(self, error: StoreError) -> None:
        if not self.trouble:
            logger.error("%s. The job goes on, but does not outlive its master until this is mended", error)
        self.trouble = str(error)
