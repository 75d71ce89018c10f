"""PyTorch tensors, as the collectives see them: of strided layout, on a CPU or an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from polyhvd import _core
from polyhvd.collectives.adapter import Capability, Handle, Operation, OpKind
from polyhvd.errors import InvalidArgumentError, UnsupportedTypeError

__all__ = ["TorchAdapter", "check", "copy_all"]

Tensor = torch.Tensor

# Absent before torch 2.10: tensors are then described by address, shape and dtype.
_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)
if _EXCHANGE is not None:
    _core.register_dlpack_exchange(Tensor, _EXCHANGE)


_DTYPES = frozenset(getattr(torch, name) for name in _core.DTYPES if hasattr(torch, name))


def check(tensor: Tensor) -> None:
    """Raise TypeError for what cannot be communicated; of a tensor, a ValueError as well."""
    try:
        if (tensor.is_cpu or tensor.is_cuda) and tensor.layout is torch.strided and tensor.dtype in _DTYPES:
            return
    except AttributeError:
        pass
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected a torch.Tensor, found {type(tensor).__name__}; use torch.as_tensor()")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise UnsupportedTypeError(
            f"the tensor is on {tensor.device}, expected one on the CPU or an NVIDIA GPU; move it with .cpu()"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedTypeError(f"the layout is {tensor.layout}, expected torch.strided; use .to_dense()")
    advice = "pass torch.view_as_real(tensor)" if tensor.is_complex() else "cast it"
    raise UnsupportedTypeError(
        f"a tensor of {_dtype_name(tensor.dtype)} cannot be communicated, expected one of "
        f"{', '.join(_core.DTYPES)}; {advice}"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _label(operation: Operation) -> str:
    return f"{OpKind(operation.kind).name.lower()} {operation.label!r}"


def _reference(tensor: Tensor) -> _core.TensorRef:
    if not tensor.is_contiguous():
        raise BufferError("not dense")
    shape, dtype = tuple(tensor.shape), _dtype_name(tensor.dtype)
    if tensor.is_cpu:
        return _core.TensorRef(tensor.data_ptr(), shape, dtype, tensor)
    return _core.TensorRef(
        tensor.data_ptr(), shape, dtype, tensor, gpu=tensor.device.index, stream=_stream(tensor.device.index)
    )


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Overwrite tensors with others of the same shapes: ``copy_`` for each, but faster on a CPU."""
    with torch.no_grad():
        for number in _core.copy([*map(_plain, targets)], [*map(_plain, sources)]):
            targets[number].copy_(sources[number])


def _plain(tensor: Tensor) -> Tensor | _core.TensorRef | None:
    """A tensor whose elements are the bytes at its address, one after the other; else None."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_neg() or tensor.is_conj():
        return None
    if _EXCHANGE is not None:
        return tensor
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    return _reference(tensor) if _dtype_name(tensor.dtype) in _core.DTYPES else None


def _stream(gpu: int) -> int:
    """Address of the stream that this thread gives its work to."""
    return int(torch.cuda.current_stream(gpu).cuda_stream)


# Their outputs are made here; those of others, whose shapes follow from all ranks' tensors, in the core.
_KEEPS_SHAPE = frozenset((OpKind.ALLREDUCE, OpKind.BROADCAST))


def _tensor(buffer: _core.Buffer) -> Tensor:
    """The core's buffer as a tensor that keeps it alive. DLPack has no bool in older versions of torch."""
    dtype = getattr(torch, buffer.dtype)
    if 0 in buffer.shape:
        return torch.empty(buffer.shape, dtype=dtype, device="cpu" if buffer.gpu is None else buffer.gpu)
    if buffer.gpu is not None:
        on_gpu: Tensor = torch.utils.dlpack.from_dlpack(buffer)
        return on_gpu
    return torch.frombuffer(buffer, dtype=dtype).view(buffer.shape)


def _tensors(handle: Any) -> list[Tensor]:
    return [_tensor(buffer) for buffer in handle.buffers()]


def _held(gpu: int, finish: Any) -> Any:
    """``finish``, or the result that is there, once the stream that is current then goes on after it."""

    def wait_and_finish(handle: Any) -> Any:
        handle.wait(_stream(gpu))
        return handle.result if finish is None else finish(handle)

    return wait_and_finish


class TorchAdapter:
    """See :class:`polyhvd.collectives.adapter.FrameworkAdapter`.

    Args:
        by_reference: describe tensors in Python, even where torch has DLPack's C exchange API.
    """

    name = "torch"
    capabilities = frozenset(
        {
            Capability.DIRECT,
            Capability.IN_PLACE,
            Capability.ASYNC,
            Capability.BFLOAT16,
            Capability.INT16,
            Capability.BOOL,
            Capability.NON_CONTIGUOUS,
            Capability.EMPTY,
            Capability.AUTOGRAD,
            *((Capability.UNSIGNED,) if hasattr(torch, "uint16") else ()),  # from torch 2.3 on
        }
    )

    def __init__(self, *, by_reference: bool = _EXCHANGE is None) -> None:
        self._by_reference = by_reference
        if by_reference:
            self.capabilities = self.capabilities - {Capability.DIRECT}

    def submit(self, operation: Operation, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> Handle:
        """Hand tensors to the core where they lie; those that are not dense through a copy."""
        for tensor in tensors:
            check(tensor)
        if not any(tensor.is_neg() for tensor in tensors):  # such a view has other values than its memory
            try:
                return self._submit(operation, tensors, out)
            except BufferError:
                pass
        return self._submit_copies(operation, tensors, out)

    def is_plain(self, tensor: Tensor) -> bool:
        """All on a CPU but lazily negated views, which have other values than their memory."""
        check(tensor)
        return tensor.is_cpu and not tensor.is_neg()

    def _submit(
        self, operation: Operation, tensors: Sequence[Tensor], out: Sequence[Tensor] | None
    ) -> Handle:
        keeps_shape = operation.kind in _KEEPS_SHAPE
        if out is None and keeps_shape:
            out = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        inputs: Sequence[Any] = tensors
        outputs: Sequence[Any] | None = out
        if self._by_reference:
            inputs = [_reference(t) for t in tensors]
            outputs = inputs if out is tensors else out and [_reference(t) for t in out]
        handle = operation.submit(inputs, outputs)
        if keeps_shape:
            handle.result = out
        else:
            handle.finish = _tensors
        if tensors and tensors[0].is_cuda:
            handle.finish = _held(tensors[0].device.index, handle.finish)
        return handle

    def _submit_copies(
        self, operation: Operation, tensors: Sequence[Tensor], out: Sequence[Tensor] | None
    ) -> Handle:
        dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]
        if out is None:
            return self._submit(operation, dense, dense if operation.kind in _KEEPS_SHAPE else None)
        for target in out:
            if any(step == 0 and n > 1 for step, n in zip(target.stride(), target.shape, strict=True)):
                raise InvalidArgumentError(
                    f"{_label(operation)}: elements of the expanded tensor share memory; pass a clone()"
                )
        handle = self._submit(operation, dense, dense)
        hold = handle.finish

        def copy_back(finished: Any) -> Sequence[Tensor]:
            if hold is not None:
                hold(finished)
            for target, value in zip(out, dense, strict=True):
                self.assign(target, value)
            return out

        handle.finish = copy_back
        return handle

    def dtype(self, tensor: Tensor) -> str:
        """Name of the tensor's element type, without "torch."."""
        return _dtype_name(tensor.dtype)

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """``tensor.to(dtype)``; the same tensor when it has that type."""
        return tensor.to(getattr(torch, dtype))

    def assign(self, target: Tensor, value: Tensor) -> None:
        """``target.copy_(value)``, unseen by autograd."""
        with torch.no_grad():
            target.copy_(value)

    def named_parameters(self, owner: object) -> Iterable[tuple[str, Tensor]]:
        """State of a module, items of a mapping, pairs, or tensors named by position."""
        if isinstance(owner, torch.nn.Module):
            owner = owner.state_dict(keep_vars=True)
        if isinstance(owner, Mapping):
            return sorted(owner.items())
        if isinstance(owner, Tensor) or not isinstance(owner, Iterable):
            raise InvalidArgumentError(
                f"expected a dict of tensors or (name, tensor) pairs, found {type(owner).__name__}"
            )
        pairs = list(owner)
        return [pair if isinstance(pair, tuple) else (str(i), pair) for i, pair in enumerate(pairs)]
