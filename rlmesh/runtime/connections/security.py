"""The job's key: making it, reading it from a file or the environment, and the CURVE keys derived from it.

Every process of a job holds the same 32 random bytes, and nobody else does. They never leave a process: peers
prove that they hold them (`rlmesh.wire.handshake`), and ZeroMQ's CURVE keys are derived from them, so that a process
without the job's key does not know the public key either and cannot even begin a conversation.
"""

from __future__ import annotations

import os
import secrets
import stat
from functools import cached_property
from pathlib import Path

from rlmesh.errors import UsageError
from rlmesh.wire.key_proof import KEY_BYTES, keyed_hash

KEY_VARIABLE = "RLMESH_KEY_FILE"
"""Environment variable that names the key file where no ``--key-file`` is given."""
KEY_TEXT_VARIABLE = "RLMESH_KEY"
"""Environment variable that holds the key itself, for launchers that can pass a secret no other way."""
_HEX_CHARS = 2 * KEY_BYTES
_HOW = "make one with `rlmesh keygen FILE` and give every node a copy that only its owner can read"


def make_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def check_key(key: object) -> bytes:
    """Return a key unchanged.

    Raises:
        UsageError: the value is not 32 bytes.
    """
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        size = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise UsageError(f"a job's key is {KEY_BYTES} random bytes, not {size}: {_HOW}")
    return key


def write_key_file(path: str | Path, key: bytes | None = None) -> bytes:
    """Write a key (a new one if none is given) to a new file of mode 0600, and return the key.

    Raises:
        UsageError: the file exists already, or cannot be made.
    """
    key = make_key() if key is None else check_key(key)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already and is not replaced, since a job may be using it: name another file, or remove it"
        ) from None
    except OSError as error:
        raise UsageError(f"the key file {path} cannot be made: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return key


def load_key_file(path: str | Path) -> bytes:
    """The key in a file: 64 hexadecimal digits, in a regular file of this user that nobody else can read.

    Raises:
        UsageError: there is no such file, others can read it, or it holds no key; the text says what to do.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"the key file {path} cannot be read: {error.strerror}; {_HOW}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"the key file {path} is no regular file; {_HOW}")
        if found.st_mode & 0o077:
            raise UsageError(
                f"the key file {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others on this machine can read "
                f"or change it: chmod 600 {path}, and if they may have read it, make a new one with `rlmesh keygen`"
            )
        if found.st_uid not in (os.getuid(), 0):
            raise UsageError(f"the key file {path} belongs to user {found.st_uid}, not to you; {_HOW}")
        text = os.read(descriptor, _HEX_CHARS + 16).strip()
    finally:
        os.close(descriptor)
    return parse_key(text, f"the key file {path}")


def parse_key(text: bytes, where: str) -> bytes:
    """A key from its 64 hexadecimal digits.

    Args:
        where: the place the text comes from, for the error.

    Raises:
        UsageError: the text is no key.
    """
    try:
        key = bytes.fromhex(text.decode("ascii")) if len(text) == _HEX_CHARS else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"{where} holds {len(text)} characters that are no key (a key is {_HEX_CHARS} hexadecimal digits); {_HOW}"
        )
    return key


def find_key(key_file: str | Path | None = None) -> bytes:
    """The key of ``key_file``, else of the file that ``RLMESH_KEY_FILE`` names, else the one in ``RLMESH_KEY``.

    Raises:
        UsageError: no key is given, or the given key or file cannot be used.
    """
    path = key_file or os.environ.get(KEY_VARIABLE)
    if path:
        return load_key_file(path)
    text = os.environ.get(KEY_TEXT_VARIABLE, "").strip()
    if text:
        return parse_key(text.encode(), f"the environment variable {KEY_TEXT_VARIABLE}")
    raise UsageError(f"no key: pass --key-file FILE or set {KEY_VARIABLE}=FILE; {_HOW}")


class CurveKeys:
    """A job's CURVE key pairs in ZeroMQ's text form: one pair for all listeners, one for all callers.

    The listeners' *public* key is as secret as the job's key: a caller that does not know it cannot make a first
    message that a listener accepts.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @cached_property
    def listener(self) -> tuple[bytes, bytes]:
        """The public and the secret key."""
        return self._pair(b"rlm-curve-listen")

    @cached_property
    def caller(self) -> tuple[bytes, bytes]:
        """The public and the secret key."""
        return self._pair(b"rlm-curve-caller")

    def _pair(self, label: bytes) -> tuple[bytes, bytes]:
        import zmq
        from zmq.utils import z85

        secret = z85.encode(keyed_hash(self._key, label))
        return zmq.curve_public(secret), secret
