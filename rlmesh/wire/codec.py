"""Encodes values as frames and decodes them: pickle protocol 5 with out-of-band buffers.

``encode`` captures the value: after it has returned, the caller may change its arrays and tensors. Frame 0 is the
pickle; each further frame is one large buffer (numpy array, torch tensor, bytes-like with the buffer protocol).
``decode`` returns arrays and tensors that the receiver owns and may write to.

torch tensors on the CPU travel as raw bytes, in their own dtype and shape, tensors on a GPU by `rlmesh.memory.device`;
a tensor that is part of an autograd graph arrives without the graph. Functions and classes of ``__main__`` are the
receiver's own if it runs, or has imported, the same program (`rlmesh.wire.main_module`); lambdas and local functions
travel by value (cloudpickle).

Never call ``decode`` on bytes from a peer that has not been authenticated: unpickling runs code.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

from rlmesh.errors import CallError, Unserializable
from rlmesh.memory import device
from rlmesh.wire.envelope import Buffer, Frames
from rlmesh.wire.main_module import by_value, reduce_object

if TYPE_CHECKING:
    import torch

Capture: TypeAlias = Callable[[Sequence[memoryview], int], Sequence[Buffer]]

INLINE_LIMIT_BYTES = 4096
"""Smaller buffers stay inside the pickle: a separate frame would cost more than the copy."""

_MODEST_BYTES = 65536
"""Payloads below this size are not checked, since no limit is smaller."""

_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
"""Types for which ``pickle.dumps`` suffices, in a third of the time of this module's pickler."""


class Deferred(Unserializable):
    """Raised while pickling a value that only some encoders can send, such as a future."""


def _rebuild_tensor(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    if 0 in shape:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        data = buffer if _is_writable(buffer) else bytearray(buffer)
        tensor = torch.frombuffer(data, dtype=dtype)
        if len(shape) != 1:
            tensor = tensor.reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _is_writable(buffer: Buffer) -> bool:
    return not memoryview(buffer).readonly


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return NotImplemented
    if tensor.device.type != "cpu":
        return _reduce_on_device(tensor)
    plain = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.contiguous()
    shape = tuple(plain.shape)
    requires_grad = tensor.requires_grad and tensor.is_leaf
    raw: Any = b"" if plain.numel() == 0 else plain.reshape(-1).view(torch.uint8).numpy()
    return _rebuild_tensor, (pickle.PickleBuffer(raw), tensor.dtype, shape, requires_grad)


def _reduce_on_device(tensor: torch.Tensor) -> Any:
    """Reduce a tensor in the memory of a device."""
    kind, shape = tensor.device.type, tuple(tensor.shape)
    backend = device.backend_for(kind)
    if backend is None:
        return NotImplemented
    nbytes = tensor.numel() * tensor.element_size()
    exported = device.export(backend, tensor, nbytes) if nbytes else b""
    requires_grad = tensor.requires_grad and tensor.is_leaf
    place = (kind, backend.device_of(tensor), nbytes, tensor.dtype, shape)
    return _rebuild_elsewhere, (pickle.PickleBuffer(exported), place, requires_grad)


def _rebuild_elsewhere(buffer: Buffer, place: tuple[str, str, int, Any, tuple[int, ...]], requires_grad: bool) -> Any:
    kind, name, nbytes, dtype, shape = place
    if nbytes == 0:
        import torch

        tensor = torch.empty(shape, dtype=dtype, device=kind)
    else:
        data = buffer if _is_writable(buffer) else bytearray(buffer)
        tensor = device.receive(data, kind, name, nbytes, dtype, shape)
    return tensor.requires_grad_() if requires_grad else tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        torch = sys.modules.get("torch")
        if torch is not None and cls is getattr(torch, "Tensor", None):
            return _reduce_tensor(obj)
        if (cls is FunctionType or isinstance(obj, type)) and (reduced := reduce_object(obj)) is not None:
            return reduced
        return NotImplemented


def encode(value: Any, capture: Capture | None = None) -> Frames:
    """Serialize a value.

    Args:
        capture: makes frames of the large buffers, in order, which later changes of the buffers do not affect; None
            copies each buffer. It also gets the size of the rest of the value in bytes, and may refuse the value.

    Raises:
        Unserializable: the value cannot be serialized; the text names its type.
        PayloadTooLarge: ``capture`` refuses a value of that size.
    """
    if type(value) in _ATOMS or (type(value) is tuple and _is_plain_call(value)):
        small = pickle.dumps(value, 5)
        if len(small) < _MODEST_BYTES:
            return [small]
    large: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < INLINE_LIMIT_BYTES:
            return True
        large.append(raw)
        return False

    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5, buffer_callback=keep).dump(value)
    except (Deferred, CallError):
        raise
    except Exception as first:
        # cloudpickle also serializes a local class or a closure deep inside an object that pickle sends by name.
        large.clear()
        try:
            whole = by_value(value, buffer_callback=keep)
        except (Deferred, CallError):
            raise
        except Exception:
            raise Unserializable(
                f"{_describe(value)} cannot be sent to another process: {type(first).__name__}: {first}. "
                "Send plain data (numbers, text, lists, dicts, arrays, tensors, dataclasses) instead"
            ) from first
    else:
        whole = out.getvalue()
    if not large and len(whole) < _MODEST_BYTES:
        return [whole]
    return [whole, *(capture(large, len(whole)) if capture is not None else map(bytes, device.contents(large)))]


def _is_plain_call(value: tuple[Any, ...]) -> bool:
    """True for the arguments of a call if they are atoms."""
    if len(value) != 2:
        return False
    args, kwargs = value
    return type(args) is tuple and type(kwargs) is dict and not kwargs and _ATOMS.issuperset(map(type, args))


def decode(frames: Frames) -> Any:
    """Rebuild a value from its frames. Errors of unpickling are raised unchanged."""
    if len(frames) == 1:
        return pickle.loads(frames[0])
    buffers = [frame if _is_writable(frame) else bytearray(frame) for frame in frames[1:]]
    return pickle.loads(frames[0], buffers=buffers)


def size_bytes(frames: Frames) -> int:
    """Bytes of a message's frames; a ticket counts with the bytes of its tensor."""
    return sum(ticket.nbytes if (ticket := device.exported_of(f)) else memoryview(f).nbytes for f in frames)


def _describe(value: Any) -> str:
    text = repr(type(value)) if not isinstance(value, tuple) else ", ".join(repr(type(v)) for v in value[:6])
    return f"a value of {text}"
