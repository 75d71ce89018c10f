"""Gradients in fewer bytes on the wire.

``Compression.fp16`` and ``.bf16`` are written once over ``adapter.cast``. A user's own compressor has
Horovod's two methods, and no state::

    class Mine:
        @staticmethod
        def compress(tensor): return smaller, context
        @staticmethod
        def decompress(tensor, context): return original

One that has to know whose gradient it is given, or that keeps something from step to step, derives from
:class:`KeyedCompressor`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from polyhvd.collectives.adapter import FrameworkAdapter
from polyhvd.errors import InvalidArgumentError

__all__ = [
    "NO_COMPRESSION",
    "AnyCompressor",
    "CastCompressor",
    "Compression",
    "Compressor",
    "CompressorState",
    "KeyedCompressor",
    "NoneCompressor",
    "compressor_of",
]

T = TypeVar("T")


class Compressor(Protocol):
    """The interface of ``compression=``: Horovod's, without state."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what ``decompress`` needs to know."""

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The received tensor in its original form."""


class CompressorState:
    """Tensors that a :class:`KeyedCompressor` keeps, by key. TensorFlow's are variables."""

    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}

    def get(self, key: str, initial: Callable[[], Any]) -> Any:
        """The tensor that was kept last under this key.

        Args:
            key: the one of the gradient, or one made of it, such as ``f"{key}.q"``.
            initial: called without arguments, where there is none yet, for the tensor to begin with. In a
                ``tf.function`` it is called eagerly, while the function is traced: of the gradient it may
                use shape and dtype, but no values.
        """
        if key not in self._tensors:
            self._tensors[key] = initial()
        return self._tensors[key]

    def set(self, key: str, tensor: Any) -> None:
        """Keep a tensor, without its past in autograd.

        It must not share memory with what ``compress`` was given or returns: that is reduced in place.
        """
        detach = getattr(tensor, "detach", None)
        self._tensors[key] = tensor if detach is None else detach()

    def items(self) -> dict[str, Any]:
        """All tensors, by key; not copied."""
        return dict(self._tensors)

    def replace(self, tensors: Mapping[str, Any]) -> None:
        """Keep only these; with no tensors, reset the state."""
        self._tensors = dict(tensors)


class KeyedCompressor(ABC):
    """A compressor that gets the key of each gradient it compresses, and may keep tensors for each.

    Its state belongs to one optimizer. Pass the class, and each optimizer makes its own instance,
    without arguments; or pass an instance, which no second optimizer can use as long as the first lives. A
    gradient tape lives for one step: it takes only instances, and several tapes may share one.

    The key is the gradient's name, such as ``"DistributedOptimizer.0.3"``: the same on every rank and in
    every step, whether or not gradients are grouped. Verbs with ``compression=`` use the operation's name,
    and need one; tensors of a group get ``"name.0"``, ``"name.1"`` and so on.

    What is returned by :meth:`compress` is reduced, elementwise, with the operation and the factors of the
    optimizer: it has the same shape and dtype on every rank, whatever its values. Gradients that stay sparse
    are sent as they are, since their rows differ from step to step; with ``sparse_as_dense`` they are dense
    ones.

    State is dropped when an optimizer finds itself in another world than in its last step; a ``tf.function``
    that was traced before does not find out, so call :meth:`reset` after ``init()``. Of a gradient that
    overflows (AMP), what is kept may be infinite for ever: check for that if losses are scaled.

    A method such as PowerSGD (Vogels et al., 2019, arXiv:1905.13727) reduces two tensors for each gradient,
    ``P`` and then ``Q``, which depends on the reduced, orthogonalised ``P``. The interface has room for it:
    an optional third method ``proceed(tensor, context, key)``, called with what was reduced, would return a
    further tensor to reduce with its context, or None, and the reducer would call it until it does, under
    the name with the number of the round, before ``decompress``. ``Q`` is kept under ``f"{key}.q"``, begun
    from the key as a seed so that it is the same on every rank, and the rest that was not sent under the
    key. Nothing of this kind is here yet.

    Example::

        class ErrorFeedback(KeyedCompressor):
            def compress(self, tensor, key):
                wanted = tensor + self.state.get(key, lambda: torch.zeros_like(tensor))
                sent, context = hvd.Compression.fp16.compress(wanted)
                self.state.set(key, wanted - hvd.Compression.fp16.decompress(sent, context))
                return sent, context

            def decompress(self, tensor, context, key):
                return hvd.Compression.fp16.decompress(tensor, context)

        optimizer = hvd.DistributedOptimizer(optimizer, compression=ErrorFeedback)
    """

    _state: CompressorState | None = None
    _owner: weakref.ref[object] | None = None

    @property
    def state(self) -> CompressorState:
        """The tensors kept for each key."""
        if self._state is None:
            self._state = CompressorState()
        return self._state

    @abstractmethod
    def compress(self, tensor: Any, key: str) -> tuple[Any, Any]:
        """Compress a gradient; return the tensor to send.

        Args:
            tensor: the gradient; it may be changed, and returned.
            key: its name.

        Returns:
            The tensor to reduce, and whatever :meth:`decompress` needs to know.
        """

    @abstractmethod
    def decompress(self, tensor: Any, context: Any, key: str) -> Any:
        """The reduced gradient, of shape and dtype of the original.

        Args:
            tensor: what :meth:`compress` returned, reduced over the ranks.
            context: what it returned besides, on this rank.
            key: as there.
        """

    def reset(self) -> None:
        """Forget all state, as after a change of the world; a compressor that keeps more extends it."""
        self.state.replace({})

    def state_dict(self) -> dict[str, Any]:
        """The state by key, to be saved on each rank: it differs between ranks.

        Tensors are not copied; of TensorFlow they are NumPy arrays.
        """
        return self.state.items()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned on this rank.

        Args:
            state: by key; tensors of the framework, or NumPy arrays in TensorFlow.
        """
        self.state.replace(state)

    def serve(self, owner: object, make_state: Callable[[], CompressorState]) -> None:
        """Belong to an optimizer from now on.

        Args:
            owner: lives as long as the optimizer.
            make_state: the state of its framework, if this has none yet.

        Raises:
            InvalidArgumentError: it belongs to another one.
        """
        other = None if self._owner is None else self._owner()
        if other is not None and other is not owner:
            raise InvalidArgumentError(
                f"compression: this {type(self).__name__} belongs to another optimizer, whose gradients its "
                "state is of; pass the class, or make one for each"
            )
        self._owner = weakref.ref(owner)
        self.hold(make_state)

    def for_operation(self, name: str | None) -> Compressor:
        """The compressor of one tensor, for a verb.

        Args:
            name: of the operation; of a tensor in a group, with its position, such as ``"losses.0"``.

        Raises:
            InvalidArgumentError: there is no name.
        """
        if name is None:
            raise InvalidArgumentError(
                f"compression: a {type(self).__name__} keeps state by the operation's name; pass name="
            )
        return _OneKey(self, name)

    def hold(self, make_state: Callable[[], CompressorState]) -> None:
        """Keep tensors as the framework stores them, including those that were loaded before."""
        if self._state is None or type(self._state) is CompressorState:
            state = make_state()
            if self._state is not None:
                state.replace(self._state.items())
            self._state = state


class _OneKey:
    """A :class:`KeyedCompressor` as a :class:`Compressor` of one key."""

    def __init__(self, compressor: KeyedCompressor, key: str) -> None:
        self._compressor = compressor
        self._key = key

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        return self._compressor.compress(tensor, self._key)

    def decompress(self, tensor: Any, context: Any) -> Any:
        return self._compressor.decompress(tensor, context, self._key)


#: What ``compression=`` takes; a KeyedCompressor also as its class.
AnyCompressor = Compressor | KeyedCompressor | type[KeyedCompressor]


class NoneCompressor:
    """Sends tensors as they are."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    def decompress(self, tensor: Any, context: Any) -> Any:
        """Return the tensor itself."""
        return tensor


NO_COMPRESSION: Compressor = NoneCompressor()


class CastCompressor(Generic[T]):
    """Sends float32 and float64 tensors as float16 or bfloat16."""

    def __init__(self, adapter: FrameworkAdapter[T], dtype: str) -> None:
        self._adapter = adapter
        self._dtype = dtype

    def compress(self, tensor: T) -> tuple[T, str | None]:
        """Cast a wider floating-point tensor; others pass."""
        original = self._adapter.dtype(tensor)
        if original not in ("float32", "float64"):
            return tensor, None
        return self._adapter.cast(tensor, self._dtype), original

    def decompress(self, tensor: T, context: str | None) -> T:
        """Cast back to the original type."""
        return tensor if context is None else self._adapter.cast(tensor, context)


class Compression:
    """Values of ``compression=``: the dtype in which gradients are sent.

    ``Compression.none`` sends them as they are, ``Compression.fp16`` as float16, and ``Compression.bf16`` as
    bfloat16.

    Example::

        optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)
    """

    def __init__(self, adapter: FrameworkAdapter[Any]) -> None:
        self.none = NO_COMPRESSION
        self.fp16: Compressor = CastCompressor(adapter, "float16")
        self.bf16: Compressor = CastCompressor(adapter, "bfloat16")


def compressor_of(compression: AnyCompressor) -> Compressor | KeyedCompressor:
    """The given compressor; of a class of :class:`KeyedCompressor` an instance.

    Raises:
        InvalidArgumentError: the class cannot be made without arguments.
    """
    if isinstance(compression, type) and issubclass(compression, KeyedCompressor):
        try:
            return compression()
        except TypeError as error:
            raise InvalidArgumentError(
                f"compression={compression.__name__}: {error}; pass an instance instead of the class"
            ) from error
    return compression
