"""Restores the files beside the sockets of a node: the job's key, the file that ``rlmesh ps`` reads, and the job.

When a cleaner of temporary files has removed them, each process binds its own socket again, and the agent, which has
the contents in memory, writes these files again. It also touches them, so that cleaners see that they are in use.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from rlmesh import private_files
from rlmesh.agent.protocol import AgentConfig
from rlmesh.runtime.transport.base import make_again

__all__ = ["SocketFolder"]

logger = logging.getLogger(__name__)

LOOK_S = 1.0
TOUCH_EVERY = 3600
"""Checks between two touches."""
RESTORED = ("key", "about.json")


class SocketFolder:
    """The files of one node; they are read when the object is created."""

    def __init__(self, config: AgentConfig) -> None:
        self._folder = Path(config.socket_dir)
        paths = [self._folder / name for name in RESTORED]
        if config.start_master:
            paths.append(Path(config.job_path))
        self._files = {path: path.read_bytes() for path in paths if path.is_file()}
        self._reported = False

    async def watch(self) -> None:
        """Check once a second until cancelled."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            looks += 1
            self.look(touch=looks % TOUCH_EVERY == 0)

    def look(self, *, touch: bool = False) -> None:
        """Write missing files again; called before each start of a member, and once a second."""
        try:
            if not self._folder.is_dir():
                make_again(str(self._folder))
            for path, content in self._files.items():
                if not path.exists():
                    self._write(path, content)
            if touch:
                for each in (*self._files, *self._folder.iterdir(), self._folder, self._folder.parent):
                    os.utime(each, follow_symlinks=False)  # a claim on a start is a link to nothing
        except OSError as error:
            if not self._reported:
                logger.error(
                    "%s was removed, and cannot be restored: %s. No process of the job can start here any more; set "
                    "TMPDIR to a folder that is not cleaned", self._folder, error,
                )  # fmt: skip
            self._reported = True

    def _write(self, path: Path, content: bytes) -> None:
        private_files.write_whole(path, content, secret=True, durable=False)
        logger.warning("%s was removed, perhaps by a cleaner of temporary files, and is restored", path)
