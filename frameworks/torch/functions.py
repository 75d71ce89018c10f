"""The functions of polyhvd.torch that differ from those of other frameworks.

Those that return new tensors are differentiable. Asynchronous and in-place forms are not: their results
are unknown to autograd. In ``torch.compile`` all but the asynchronous ones are operators of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from polyhvd.torch import derivatives
from polyhvd.torch.adapter import check
from polyhvd.torch.base import Compression, as_tensor, collectives, increment_version
from polyhvd.torch.compiled import is_compiling, overwritten

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.operation import process_set_id, resolve_op
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Arguments, CopyArguments, ReductionArguments, ScatterArguments
from polyhvd.runtime import current

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Compression", "TorchFunctions", "functions"]

Tensor = torch.Tensor
_ALLREDUCE = OpKind.ALLREDUCE  # read once: an enum's member takes a look-up


class TorchFunctions(Functions[Tensor]):
    """See :class:`polyhvd.collectives.functions.Functions`."""

    def value(self, tensor: Any) -> Tensor:
        """A tensor, or a number as one."""
        return as_tensor(tensor)

    def overwritten(self, tensors: Sequence[Tensor]) -> None:
        """Mark it as written to for autograd: a backward that needs the old values then fails."""
        for tensor in tensors:
            increment_version(tensor)

    def allreduce_one(
        self,
        tensor: Tensor,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        priority: int,
    ) -> Tensor:
        """Differentiable."""
        if not (is_compiling() or derivatives.wants_gradient(tensor)):
            return Functions.allreduce_one(
                self, tensor, name, op, prescale_factor, postscale_factor, process_set, priority
            )
        (result,) = derivatives.allreduce_group(
            (tensor,),
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return result

    def allreduce_group(
        self, tensors: Sequence[Tensor], *, op: int, **arguments: Unpack[ReductionArguments]
    ) -> list[Tensor]:
        """Differentiable."""
        return derivatives.allreduce_group(tensors, op=op, **arguments)

    def allgather_group(self, tensors: Sequence[Tensor], **arguments: Unpack[CopyArguments]) -> list[Tensor]:
        """Differentiable."""
        given: Any = arguments
        return derivatives.allgather_group(tensors, **given)

    def broadcast_one(self, tensor: Tensor, root_rank: int, **arguments: Unpack[CopyArguments]) -> Tensor:
        """Differentiable."""
        given: Any = arguments
        return derivatives.broadcast_one(tensor, root_rank, **given)

    def exchange(self, tensor: Tensor, splits: Any, **arguments: Unpack[Arguments]) -> Any:
        """Differentiable."""
        given: Any = arguments
        return derivatives.alltoall_parts(tensor, splits, **given)

    def reducescatter_group(
        self, tensors: Sequence[Tensor], *, op: int, **arguments: Unpack[ScatterArguments]
    ) -> list[Tensor]:
        """Differentiable."""
        given: Any = arguments
        return derivatives.reducescatter_group(tensors, op=op, **given)

    def allreduce_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> Tensor:
        """The tensor is checked when it could not be reduced: that takes longer than a small collective."""
        if is_compiling():
            new = self.allreduce(
                tensor.detach(), average, name, None, op, prescale_factor, postscale_factor, process_set
            )
            return overwritten([tensor], [new])[0]
        reduction = resolve_op(op, average)
        try:
            # The memory of a lazily negated tensor has other values than it.
            if self._direct and not tensor.is_neg():
                world = current.world()
                number = 0 if process_set is global_process_set else process_set_id(process_set, world)
                _core.run(
                    world.engine,
                    _ALLREDUCE,
                    name,
                    tensor,
                    reduction,
                    -1,
                    prescale_factor,
                    postscale_factor,
                    number,
                    priority,
                )
                increment_version(tensor)
                return tensor
        except BufferError:  # not dense
            pass
        except (AttributeError, RuntimeError, TypeError):
            check(tensor)
            raise
        return self._reduced_in_place(
            tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority
        )

    def grouped_allreduce_(
        self,
        tensors: Iterable[Tensor],
        average: bool | None = None,
        *,
        op: int | None = None,
        **arguments: Unpack[ReductionArguments],
    ) -> list[Tensor]:
        """In a compiled program, new tensors whose values are put into the given ones."""
        if not is_compiling():
            return super().grouped_allreduce_(tensors, average, op=op, **arguments)
        targets = list(tensors)
        given = [tensor.detach() for tensor in targets]
        return overwritten(targets, self.grouped_allreduce(given, average, op=op, **arguments))

    def broadcast_(
        self,
        tensor: Tensor,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> Tensor:
        """In a compiled program, a new tensor whose values are put into the given one."""
        if is_compiling():
            new = self.broadcast(
                tensor.detach(), root_rank, name=name, process_set=process_set, exact_gradient=None
            )
            return overwritten([tensor], [new])[0]
        check(tensor)
        if not tensor.is_neg():
            return super().broadcast_(tensor, root_rank, name, process_set, priority)
        handle = self.broadcast_async_(tensor, root_rank, name=name, process_set=process_set)
        return self.synchronize(handle)


functions = TorchFunctions(collectives)
