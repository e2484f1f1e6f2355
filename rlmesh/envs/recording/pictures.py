"""Frames as a file: a strip, an animation or a video."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlmesh.errors import UsageError

__all__ = ["require_format", "write_frames"]

FORMATS = {".png": "PIL", ".gif": "PIL", ".mp4": "imageio_ffmpeg"}
VIDEO_S = 600.0
"""Longest time that a video may take to be written."""
GAP, LINE = 4, 16
"""Pixels between the frames of a strip, and below them for their captions."""


def require_format(path: Path) -> None:
    """Raise `UsageError` unless the file's ending is known and its library is installed."""
    library = FORMATS.get(path.suffix.lower())
    if library is None:
        raise UsageError(f"{path}: a recording ends in .png (a strip of frames), .gif or .mp4")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.absolute().parent}")
    try:
        __import__(library)
    except ImportError as error:
        raise UsageError(f"{path}: {error}; pip install 'rlmesh[record]'") from error


def write_frames(
    path: Path, frames: Sequence[np.ndarray], rewards: Sequence[float], *, fps: int, strip: int = 8
) -> None:
    """Write frames ``[height, width, 3]``, uint8, all of one shape.

    Args:
        path: ``.png``: frames at even distances side by side; ``.gif``, ``.mp4``: all frames.
        rewards: of each step; frame 0 is the one before the first step.
        fps: frames per second of ``.gif`` and ``.mp4``.
        strip: frames of a strip.
    """
    write: dict[str, Callable[[], None]] = {
        ".png": lambda: _write_strip(path, frames, rewards, strip), ".gif": lambda: _write_gif(path, frames, fps),
        ".mp4": lambda: _write_mp4(path, frames, fps),
    }  # fmt: skip
    if len({frame.shape for frame in frames}) != 1:
        raise UsageError(f"{path}: the frames differ in their shapes")
    write[path.suffix.lower()]()


def _write_strip(path: Path, frames: Sequence[np.ndarray], rewards: Sequence[float], number: int) -> None:
    from PIL import Image, ImageDraw

    chosen = sorted({round(i) for i in np.linspace(0, len(frames) - 1, min(number, len(frames)))})
    height, width = frames[0].shape[:2]
    picture = Image.new("RGB", (len(chosen) * (width + GAP) - GAP, height + LINE), "white")
    draw: Any = ImageDraw.Draw(picture)
    for place, at in enumerate(chosen):
        left = place * (width + GAP)
        picture.paste(Image.fromarray(frames[at]), (left, 0))
        draw.text((left + 2, height + 2), f"step {at}, {sum(rewards[:at]):g}", fill="black")
    picture.save(path)


def _write_gif(path: Path, frames: Sequence[np.ndarray], fps: int) -> None:
    from PIL import Image

    first, *others = map(Image.fromarray, frames)
    first.save(path, save_all=True, append_images=others, duration=max(20, round(1000 / fps)), loop=0)


def _write_mp4(path: Path, frames: Sequence[np.ndarray], fps: int) -> None:
    from imageio_ffmpeg import get_ffmpeg_exe

    height, width = frames[0].shape[:2]
    tall, wide = -(-height // 2) * 2, -(-width // 2) * 2  # the codec needs even sizes
    grown = [np.pad(frame, ((0, tall - height), (0, wide - width), (0, 0)), mode="edge") for frame in frames]
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{wide}x{tall}", "-r", str(fps), "-i", "-"]
    done = subprocess.run(
        [get_ffmpeg_exe(), "-y", "-v", "error", *raw, "-c:v", "libx264", "-pix_fmt", "yuv420p", str(path)],
        input=b"".join(frame.tobytes() for frame in grown), capture_output=True, check=False, timeout=VIDEO_S,
    )  # fmt: skip
    if done.returncode:
        raise OSError(f"{path}: the video could not be written: {done.stderr.decode(errors='replace').strip()}")
