"""Gradients over the ranks, for all optimizers and tapes: which, under which names, in what form.

A framework defines in an :class:`Exchange` how its tensors are sent. All else is decided here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar, cast

import numpy as np

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives
from polyhvd.errors import InvalidArgumentError, RankMismatchError, UnsupportedError
from polyhvd.runtime import current
from polyhvd.training.compression import (
    NO_COMPRESSION,
    Compressor,
    CompressorState,
    KeyedCompressor,
    compressor_of,
)
from polyhvd.training.drift import names_at_some_positions
from polyhvd.training.gradient_groups import KeyGroups
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Mapped, WeightMapping
from polyhvd.training.naming import numbered
from polyhvd.training.options import Options

__all__ = ["Exchange", "GradientReducer", "Results", "keras_layers", "mark_of_names"]

T = TypeVar("T")
#: Of operations that have been started: waits, if anybody has to, and returns the tensors in order.
Results = Callable[[], Sequence[T]]
#: Key, gradient, what is sent of it, the compressor's context, and how the gradient lies.
_Packed = tuple[Any, T, T, Any, Layout | None]
_MARKS = 1 << 20


def mark_of_names(names: Iterable[str]) -> int:
    """Return a number from 1 on that is the same on ranks with the same names in the same order."""
    return 1 + zlib.crc32("\0".join(names).encode()) % _MARKS


class Exchange(Generic[T]):
    """How a framework reduces tensors. This one: asynchronously and in place, for tensors without layouts.

    ``request`` has, for all methods, the arguments ``op``, ``prescale_factor``, ``postscale_factor`` and
    ``process_set`` of :meth:`polyhvd.collectives.verbs.Collectives.allreduce_async`.

    Args:
        collectives: of the framework.
    """

    #: Gradients of no group are reduced as one operation, not each by itself; and sources are known.
    whole_steps = False
    #: Local gradients are scaled for every reduction, not only for averages.
    scales_local_sums = False

    def __init__(self, collectives: Collectives[T]) -> None:
        self._collectives = collectives

    def begin(self) -> None:
        """Called before the gradients of a step are reduced."""

    def start(self, tensors: Sequence[T], name: str, priority: int, request: Mapping[str, Any]) -> Results[T]:
        """Begin to reduce dense tensors, as one operation; in place where that can be."""
        collectives = self._collectives
        handle: Handle[Any]
        if len(tensors) == 1:
            handle = self.start_one(tensors[0], name, priority, request)
        else:
            handle = collectives.grouped_allreduce_async(
                tensors, name=name, priority=priority, in_place=True, **request
            )

        def results() -> Sequence[T]:
            collectives.synchronize(handle)
            return tensors

        return results

    def start_one(self, tensor: T, name: str, priority: int, request: Mapping[str, Any]) -> Any:
        """Begin to reduce a dense tensor in place; what :meth:`wait` takes."""
        return self._collectives.allreduce_async(
            tensor, name=name, priority=priority, in_place=True, **request
        )

    def wait(self, handle: Any) -> None:
        """Wait for what :meth:`start_one` has begun."""
        self._collectives.synchronize(handle)

    def start_sparse(
        self,
        gradients: Mapping[Any, T],
        prefix: str,
        compression: Compressor,
        priority: int,
        request: Mapping[str, Any],
    ) -> Results[T]:
        """Begin to reduce sparse gradients, by key, without making them dense."""
        raise NotImplementedError

    def is_sparse(self, gradient: T) -> bool:
        """Return whether :meth:`start_sparse` is for it."""
        return False

    def dense(self, gradient: T) -> T:
        """A gradient as :meth:`start` takes it."""
        return gradient

    def put(self, key: Any, gradient: T, reduced: T) -> T:
        """Hand out what became of a gradient; here in the gradient's own memory."""
        if reduced is not gradient:
            self._collectives.adapter.assign(gradient, reduced)
        return gradient

    def size_of(self, process_set: ProcessSet) -> Any:
        """How many ranks a process set has now."""
        return process_set.size()

    def divided(self, gradient: T, divisor: Any) -> T:
        """A gradient that stays on its rank, dense or sparse, divided; it may be written to."""
        tensor: Any = gradient
        quotient: T = tensor / divisor
        return quotient

    def zeros(self, source: Any) -> T:
        """A dense gradient of nothing but zeros, for a variable that this rank has not used."""
        raise NotImplementedError

    def transposed(self, tensor: T, axes: Sequence[int]) -> T:
        """A dense tensor with its axes permuted, for ranks whose frameworks have other layouts."""
        return cast(T, cast(Any, tensor).transpose(axes))

    def reshaped(self, tensor: T, shape: Sequence[int]) -> T:
        """A dense tensor in another shape, row by row."""
        return cast(T, cast(Any, tensor).reshape(shape))

    def taken(self, tensor: T, places: Sequence[int]) -> T:
        """A dense tensor with the numbers along its last axis in another order."""
        return cast(T, cast(Any, tensor)[..., list(places)])

    def with_overflow_of(self, gradient: T, others: Sequence[T]) -> T:
        """A gradient, without finite numbers if one of the others is not finite; any may be sparse."""
        raise NotImplementedError

    def identity(self, source: Any) -> Any:
        """The identity of a variable, the same for a variable and its wrapper."""
        return id(source)

    def name_of(self, source: Any) -> str:
        """The name of a variable in messages. Only with ``whole_steps``, as the next two."""
        raise NotImplementedError

    def mark_of(self, keys: Sequence[Any]) -> int:
        """Return a number for the keys of a step's gradients; 0 for 0, 1, 2 and so on without a gap."""
        return 0 if list(keys) == list(range(len(keys))) else mark_of_names(map(str, keys))

    def marker(self, like: T, mark: int) -> T:
        """Return a tensor of the type of another one and of shape ``(0, mark)``: without elements."""
        raise NotImplementedError

    def new_state(self) -> CompressorState:
        """Return a new place for the tensors of a :class:`KeyedCompressor`."""
        return CompressorState()


class GradientReducer(Generic[T]):
    """Reduces the gradients of one optimizer or tape. Not thread-safe.

    A gradient has a key, the same on every rank and in every step: its position in the optimizer. Either all
    gradients of a step come at once, to :meth:`reduce`, or one by one to :meth:`start`, and :meth:`finish`
    has them.

    With a mapping, ranks may have different frameworks: a gradient travels by itself, in common form, as
    the mapping calls it, and one that this rank does not have is zero. Else, on the wire, a gradient is
    ``prefix.key``, a group ``prefix.group.number``, or with its first key where
    not all of a group need come together; a whole step, or the first group of one, is ``prefix``.

    Args:
        exchange: of the framework.
        prefix: begins the names on the wire.
        options: of the optimizer.
        groups: of keys; None: of sources, as the options list them.
        local_layers: layers of Keras whose gradients stay on their rank; they need not be built yet.
        shares_compressor: whether a :class:`KeyedCompressor` outlives this and may be used by others.
        sources: the parameters, by key, if :meth:`reduce` does not get them.

    Raises:
        InvalidArgumentError: a source is in two groups, a keyed compressor cannot be used here, or the
            mapping lacks a source.
    """

    def __init__(
        self,
        exchange: Exchange[T],
        *,
        prefix: str,
        options: Options,
        groups: KeyGroups | None = None,
        local_layers: Sequence[Any] = (),
        shares_compressor: bool = False,
        sources: Mapping[Any, Any] | None = None,
    ) -> None:
        self.exchange = exchange
        self._moves = exchange.transposed, exchange.reshaped, exchange.taken
        self.prefix = prefix
        self.options = options
        self.process_set = options.process_set
        #: Identities of sources, or keys where there are none, whose gradients stay on this rank.
        self.local: set[Any] = set()
        self.local_layers = local_layers
        self._groups = KeyGroups(_identities(options.grouping, exchange)) if groups is None else groups
        self._request = {
            "op": options.op,
            "prescale_factor": options.prescale_factor,
            "postscale_factor": options.postscale_factor,
            "process_set": options.process_set,
        }
        self._stateless: Compressor = NO_COMPRESSION
        self._keyed: KeyedCompressor | None = None
        self._take_compressor(shares_compressor)
        self._is_compressed = self._keyed is not None or self._stateless is not NO_COMPRESSION
        self._generation = 0  # of the world that the compressor's state is of
        self._mapping: WeightMapping | None = options.mapping
        self._mapped: dict[Any, Mapped] = (
            {} if self._mapping is None else self._mapping.by_source(exchange.identity)
        )
        self._sources = dict(sources or {})
        if self._mapping is not None:
            for key, source in self._sources.items():
                self._of_source(key, source)
        self._numbers: dict[Any, int] = {}  # of sources, in order of appearance
        self._pending: list[tuple[Results[T], list[_Packed[T]], bool]] = []
        self._single: list[tuple[Any, Any, T]] = []  # handle, key, gradient

    def _take_compressor(self, is_shared: bool) -> None:
        given = self.options.compression
        if is_shared and isinstance(given, type) and issubclass(given, KeyedCompressor):
            raise InvalidArgumentError(
                f"compression={given.__name__}: its state would be lost with the tape; pass an instance"
            )
        compressor = compressor_of(given)
        if not isinstance(compressor, KeyedCompressor):
            self._stateless = compressor
            return
        self._keyed = compressor
        if is_shared:
            compressor.hold(self.exchange.new_state)
        else:
            compressor.serve(self, self.exchange.new_state)

    # Which gradients ----------------------------------------------------------

    def takes_part(self) -> bool:
        """Return whether this rank is in the process set; another one keeps its gradients as they are."""
        if self.process_set is global_process_set or self.process_set.process_set_id is None:
            return True  # if the set is not registered, the collective raises an error that explains it
        return self.process_set.included()

    def keep_local(self, source: Any) -> None:
        """Let the gradient of a source, or of a key where there are none, stay on this rank."""
        self.local.add(self.exchange.identity(source) if self.exchange.whole_steps else source)

    def are_local(self, sources: Sequence[Any]) -> list[bool]:
        """Which gradients stay on this rank; of layers that were not built when they were listed, too."""
        if not self.local and not self.local_layers:
            return [False] * len(sources)
        identity = self.exchange.identity
        local = self.local.union(identity(v) for layer in self.local_layers for v in layer.weights)
        return [identity(source) in local for source in sources]

    def share_overflow(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """The gradients of a scaled loss, of which those that stay here can overflow on this rank only.

        One that is reduced then overflows, too: the loss scaler of every rank skips the step.
        """
        shared = list(gradients)
        is_local = self.are_local(sources)
        there = [i for i, gradient in enumerate(shared) if gradient is not None]
        local = [shared[i] for i in there if is_local[i]]
        sent = next((i for i in there if not is_local[i]), None)
        if local and sent is not None:
            shared[sent] = self.exchange.with_overflow_of(shared[sent], local)
        return shared

    def scaled_local(self, gradient: T) -> T:
        """A gradient that stays here as large as if the other ranks had sent zeros, if that was asked for."""
        is_scaled = self.options.op == ReduceOp.Average or self.exchange.scales_local_sums
        if not (is_scaled and self.options.scale_local_gradients and self.takes_part()):
            return gradient
        return self.exchange.divided(gradient, self.exchange.size_of(self.process_set))

    # All at once ----------------------------------------------------------------

    def reduce(
        self, gradients: Mapping[Any, T], sources: Sequence[Any] | None = None, *, prefix: str | None = None
    ) -> dict[Any, T]:
        """The reduced gradients, by key; on a rank outside of the process set its own.

        Nothing is sent if a compressor fails. If an operation does, the others are waited for.

        Args:
            gradients: those that there are, by key.
            sources: the variables at all positions, which then are the keys.
            prefix: for this call.

        Raises:
            InvalidArgumentError: there are groups of sources, and no sources.
            RankMismatchError: the ranks' gradients differ in their variables, shapes or types.
            HorovodInternalError: a reduction failed.
        """
        if not self.takes_part():
            return dict(gradients)
        self.exchange.begin()
        if self._mapping is not None:
            return self._reduce_mapped(self._mapping, gradients, sources)
        prefix = prefix or self.prefix
        local = self._local_among(gradients, sources)
        results = {key: self.scaled_local(gradients[key]) for key in local}
        dense: dict[Any, T] = {}
        sparse: dict[Any, T] = {}
        for key, gradient in gradients.items():
            if key not in local:
                stays_sparse = self.exchange.is_sparse(gradient) and not self.options.sparse_as_dense
                (sparse if stays_sparse else dense)[key] = gradient
        names = self._key_names(dense, sources)
        operations = [
            (name, [self._packed(key, names, dense[key]) for key in keys])
            for name, keys in self._operations(list(dense), sources)
        ]
        # Gradients are paired by their order, so ranks that lack different ones get an error.
        sent = [*dense, *(f"sparse {key}" for key in sparse)]
        mark = self.exchange.mark_of(sent) if dense and self.exchange.whole_steps else 0
        if self.exchange.whole_steps and len(operations) > 1:
            mark = mark_of_names([str(mark), *map(str, sent), *(name for name, _ in operations)])
        try:
            with self._whole():
                for number, (name, packed) in enumerate(operations):
                    # The first layers are needed first in the next forward pass.
                    self._send(f"{prefix}{name}", packed, self._urgency(packed[0][0]), mark)
                    if mark and number == 0 and len(operations) > 1:
                        results |= self.finish()  # ranks that get an error here may not have the rest
                        mark = 0
                if sparse:
                    self._send_sparse(sparse, prefix, self._urgency(next(iter(sparse))))
            return results | self.finish()
        except RankMismatchError as error:
            if self.exchange.whole_steps and sources is not None:
                self._explain(error, prefix, [key for key in gradients if key not in local], sources)
            raise

    def _explain(self, error: Exception, prefix: str, keys: Sequence[Any], sources: Sequence[Any]) -> None:
        """Compare after a mismatch, which every rank has got, which variables the gradients belong to.

        Raises:
            RankMismatchError: they differ; with the names of the variables.
        """
        names = numbered(map(self.exchange.name_of, sources))
        found = names_at_some_positions(
            current.world(),
            process_set_id(self.process_set),
            f"{prefix}.names",
            {-len(names): "", **{key: names[key] for key in keys}},
        )
        if found:
            raise RankMismatchError(
                f"{prefix}: the ranks have gradients of different variables: {found}; compute gradients of "
                "the same variables on every rank, and pass zeros for a variable that a rank does not use"
            ) from error

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Let go of what was started when the rest cannot be."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                self.finish()
            raise
        except BaseException:
            self.drop()
            raise

    # Over frameworks --------------------------------------------------------------

    def _of_source(self, key: Any, source: Any) -> Mapped:
        """The mapping's entry for the gradient of a source."""
        found = self._mapped.get(self.exchange.identity(source))
        if found is None:
            raise InvalidArgumentError(
                f"mapping: it has no trained weight for the one at {key} of the optimizer; create the "
                "mapping "
                "from the model of the optimizer, after all its weights are created and others are frozen"
            )
        return found

    def mapped_values(
        self, names: Iterable[str], sources: Iterable[Any], values: Iterable[Any] | None = None
    ) -> list[tuple[str, Any] | None]:
        """Weights in common form, by the numbers of the mapping; None for those that stay on this rank.

        Args:
            names: of some weights that other ranks have, too.
            sources: of these.
            values: of these, as this framework has them; None: read them.
        """
        found: list[tuple[str, Any] | None] = [None] * len(self._mapped)
        entries = [(name, self._of_source(name, source)) for name, source in zip(names, sources, strict=True)]
        arrays = [mapped.read() for _, mapped in entries] if values is None else values
        for (name, mapped), array in zip(entries, arrays, strict=True):
            found[mapped.number] = name, mapped.layout.array_to_common(np.asarray(array))
        return found

    def _reduce_mapped(
        self, mapping: WeightMapping, gradients: Mapping[Any, T], sources: Sequence[Any] | None
    ) -> dict[Any, T]:
        """Each gradient by itself, in the order of the mapping's numbers; see the class."""
        known = self._sources if sources is None else dict(enumerate(sources))
        if not known:
            raise InvalidArgumentError("mapping: the call has no variables for the gradients; pass both")
        stay = dict(zip(known, self.are_local(list(known.values())), strict=True))
        results: dict[Any, T] = {}
        chosen: list[tuple[Mapped, Any, T]] = []
        for key, source in known.items():
            if not stay[key] and key not in self.local:
                gradient = gradients[key] if key in gradients else self.exchange.zeros(source)
                chosen.append((self._of_source(key, source), key, gradient))
            elif key in gradients:
                results[key] = self.scaled_local(gradients[key])
        names = self._key_names(gradients, sources)
        with self._whole():
            for mapped, key, gradient in sorted(chosen, key=lambda each: each[0].number):
                self._send_mapped(mapping.prefix, mapped, key, gradient, names)
        return results | self.finish()

    def _send_mapped(
        self, prefix: str, mapped: Mapped, key: Any, gradient: T, names: Mapping[Any, str]
    ) -> None:
        if not self.exchange.is_sparse(gradient) or self.options.sparse_as_dense:
            packed = self._packed(key, names, gradient, mapped.layout)
            self._send(f"{prefix}.{mapped.number}", [packed], -mapped.number)
        elif mapped.layout.is_common:
            self._send_sparse({key: gradient}, prefix, -mapped.number, number=mapped.number)
        else:
            raise UnsupportedError(
                f"mapping: the gradient at {key} is sparse, and the weight has another layout than on "
                "other ranks; pass sparse_as_dense=True"
            )

    def _local_among(self, gradients: Mapping[Any, T], sources: Sequence[Any] | None) -> set[Any]:
        if not self.local and not self.local_layers:
            return set()
        if sources is None:
            return self.local & gradients.keys()
        stays = self.are_local(sources)
        return {key for key in gradients if stays[key]}

    def _urgency(self, key: Any) -> int:
        return -key if isinstance(key, int) and not self.exchange.whole_steps else 0

    def _operations(self, keys: list[Any], sources: Sequence[Any] | None) -> list[tuple[str, list[Any]]]:
        """The gradients that are reduced together, by the suffix of its name."""
        whole = self.exchange.whole_steps
        if not keys:
            return []
        if not self._groups:
            return [("", keys)] if whole else [(f".{key}", [key]) for key in keys]
        members = keys
        if whole and self._groups.are_listed:
            if sources is None:
                raise InvalidArgumentError("groups=: the call has no variables for the gradients; pass both")
            members = [self.exchange.identity(sources[key]) for key in keys]
        operations = []
        for number, group in self._groups.numbered(keys, members):
            if number is None or (len(group) == 1 and not whole):
                operations.append((f".{group[0]}", group))
            else:
                operations.append((f".group.{number if whole else group[0]}", group))
        if whole:
            operations[0] = "", operations[0][1]  # which is the same on ranks with other gradients
        return operations

    # One by one -----------------------------------------------------------------

    def start(self, name: str, gradients: Mapping[Any, T], *, priority: int = 0) -> None:
        """Begin to reduce dense gradients, by key, as one operation of this name: all or none."""
        names = self._key_names(gradients, None)
        packed = [self._packed(key, names, gradient) for key, gradient in gradients.items()]
        self._send(f"{self.prefix}.{name}", packed, priority)

    def start_one(self, key: Any, gradient: T, *, priority: int = 0) -> None:
        """Begin to reduce a dense gradient by itself, in place: hundreds of times in a step."""
        if self._is_compressed:
            self.start(str(key), {key: gradient}, priority=priority)
            return
        handle = self.exchange.start_one(gradient, f"{self.prefix}.{key}", priority, self._request)
        self._single.append((handle, key, gradient))

    def start_sparse(self, key: Any, gradient: T, *, priority: int = 0) -> None:
        """Begin to reduce a sparse gradient as it is."""
        self._send_sparse({key: gradient}, self.prefix, priority)

    def drop(self) -> None:
        """Forget all gradients: others may never send theirs. Their memory lives until the core lets go."""
        self._pending, self._single = [], []

    def finish(self) -> dict[Any, T]:
        """Wait for all gradients that were started; they are in the framework's hands then, and returned.

        When one fails, the others are waited for all the same, and the first error is raised.
        """
        pending, single = self._pending, self._single
        self.drop()
        finished: dict[Any, T] = {}
        first_error: Exception | None = None
        for handle, key, gradient in single:
            try:
                self.exchange.wait(handle)
                finished[key] = gradient
            except Exception as error:
                first_error = first_error or error
        for results, packed, is_compressed in pending:
            try:
                # A marker comes last.
                for (key, gradient, _, context, layout), result in zip(packed, results(), strict=False):
                    restored = self._restored(result, context) if is_compressed else result
                    if layout is not None:
                        restored = layout.from_common(restored, *self._moves)
                    finished[key] = self.exchange.put(key, gradient, restored)
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return finished

    # What is sent -----------------------------------------------------------------

    def _send(self, name: str, packed: list[_Packed[T]], priority: int, mark: int = 0) -> None:
        """``mark``: of all gradients of the step, if it is not 0; other marks on other ranks are an error."""
        sent = [part[2] for part in packed]
        if mark:
            sent.append(self.exchange.marker(sent[0], mark))
        results = self.exchange.start(sent, name, priority, self._request)
        self._pending.append((results, packed, self._is_compressed))

    def _send_sparse(
        self, gradients: Mapping[Any, T], prefix: str, priority: int, *, number: int | None = None
    ) -> None:
        """``number``: what the mapping calls the only one."""
        sent = gradients if number is None else dict.fromkeys([number], *gradients.values())
        results = self.exchange.start_sparse(sent, prefix, self._stateless, priority, self._request)
        packed: list[_Packed[T]] = [
            (key, gradient, gradient, None, None) for key, gradient in gradients.items()
        ]
        self._pending.append((results, packed, False))

    def _key_names(self, keys: Mapping[Any, T], sources: Sequence[Any] | None) -> dict[Any, str]:
        """Return the gradients' names for the compressor: a variable's position may change between steps."""
        if self._keyed is None:
            return {}
        if sources is None:
            return {key: f"{self.prefix}.{key}" for key in keys}
        for source in sources:
            self._numbers.setdefault(self.exchange.identity(source), len(self._numbers))
        return {key: f"{self.prefix}.{self._numbers[self.exchange.identity(sources[key])]}" for key in keys}

    def _packed(
        self, key: Any, names: Mapping[Any, str], gradient: T, layout: Layout | None = None
    ) -> _Packed[T]:
        """``layout``: of the gradient, if it is to be sent in common form."""
        tensor = self.exchange.dense(gradient)
        if layout is not None and layout.is_common:
            layout = None
        if layout is not None:
            tensor = layout.to_common(tensor, *self._moves)
        if self._keyed is not None:
            self._begin_in_this_world(self._keyed)
            name = names[key]
            sent, context = self._keyed.compress(tensor, name)
            return key, gradient, sent, (name, context), layout
        if not self._is_compressed:
            return key, gradient, tensor, None, layout
        return key, gradient, *self._stateless.compress(tensor), layout

    def _restored(self, result: T, context: Any) -> T:
        restored: T
        if self._keyed is not None:
            name, own = context
            restored = self._keyed.decompress(result, own, name)
        else:
            restored = self._stateless.decompress(result, context)
        return restored

    def _begin_in_this_world(self, compressor: KeyedCompressor) -> None:
        generation = current.world().placement.generation
        if self._generation not in (0, generation):
            compressor.reset()
        self._generation = generation


def _identities(
    grouping: int | Sequence[Sequence[Any]], exchange: Exchange[Any]
) -> int | Sequence[Sequence[Any]]:
    if isinstance(grouping, int):
        return grouping
    return [[exchange.identity(source) for source in group] for group in grouping]


def keras_layers(local_layers: Any, remedy: str) -> list[Any]:
    """``local_layers=`` of an optimizer or tape: layers of Keras, each of which has variables.

    Args:
        local_layers: a layer, several, or None.
        remedy: what variables are given to instead.

    Raises:
        InvalidArgumentError: it is something else.
    """
    if local_layers is None:
        return []
    layers = list(local_layers) if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    for layer in layers:
        if not hasattr(type(layer), "weights"):
            raise InvalidArgumentError(
                f"local_layers: expected layers of Keras, found {type(layer).__name__}; variables go to "
                f"{remedy}"
            )
    return layers
