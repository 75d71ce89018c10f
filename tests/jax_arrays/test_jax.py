"""What is peculiar to JAX: compiled functions, derivatives, arrays that cannot be overwritten."""

from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import polyhvd.jax as hvd
import pytest

pytestmark = pytest.mark.ranks(2, framework="jax")


def _operations() -> int:
    return int(hvd.counters()["operations"])


def _mine(*shape: int) -> Any:
    """Numbers that differ between ranks and places."""
    return jnp.arange(float(np.prod(shape))).reshape(shape) + 100.0 * hvd.rank()


VERBS: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
    "compressed allreduce": lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16),
    "grouped allreduce": lambda x: hvd.grouped_allreduce([x, x.astype(jnp.int32)], op=hvd.Max),
    "allgather": lambda x: hvd.allgather(x),
    "grouped allgather": lambda x: hvd.grouped_allgather([x, x[:1] > 3]),
    "broadcast": lambda x: hvd.broadcast(x, 1),
    "alltoall": lambda x: hvd.alltoall(x),
    "reducescatter": lambda x: hvd.reducescatter(x[1:], op=hvd.Sum),
    "empty": lambda x: hvd.allreduce(x[:0]),
    "number": lambda x: hvd.allreduce(x.sum().astype(jnp.bfloat16)),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("verb", VERBS)
def test_a_compiled_collective_does_what_the_eager_one_does(verb: str) -> None:
    x = _mine(6, 2)
    expected, found = VERBS[verb](x), jax.jit(VERBS[verb])(x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("verb", ["allreduce", "grouped allgather", "broadcast", "alltoall", "reducescatter"])
def test_a_compiled_gradient_is_the_eager_one(verb: str) -> None:
    def loss(x: Any) -> Any:
        return sum((r.astype(jnp.float32) ** 2).sum() for r in jax.tree.leaves(VERBS[verb](x)))

    x = _mine(6, 2)
    expected = jax.grad(loss)(x)
    assert np.abs(expected).max() > 0 or verb == "broadcast"
    for compiled in (jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        np.testing.assert_allclose(compiled(x), expected, rtol=1e-6)


def test_second_derivatives_are_those_of_a_sum() -> None:
    def cubes(x: Any) -> Any:
        return (hvd.allreduce(x, op=hvd.Sum) ** 3).sum()

    def slopes(x: Any) -> Any:
        return jax.grad(cubes)(x).sum()

    # Each rank's loss is (2x)^3: all ranks' together have 48 x^2 for a slope, and so the sum of that 192 x.
    for second in (jax.grad(slopes), jax.jit(jax.grad(slopes))):
        assert second(jnp.ones(2)).tolist() == [48.0 * hvd.size() / 2] * 2


def test_a_compiled_collective_runs_once_in_each_call_and_in_its_place() -> None:
    constant = jnp.ones(4)

    def three(x: Any) -> Any:
        hvd.allreduce(x)  # nobody needs it
        hvd.allreduce(constant)  # depends on no argument
        hvd.barrier()
        return hvd.allgather(jnp.ones(5)) * 0 + 1

    compiled, calls = jax.jit(three), 3
    before = _operations()
    for _ in range(calls):
        if hvd.rank() == 0:
            compiled(jnp.ones(3)).block_until_ready()
        else:  # other shapes, or another order, would be a mismatch
            for count in (3, 4):
                hvd.allreduce(jnp.ones(count))
            hvd.barrier()
            hvd.grouped_allgather([jnp.ones(5), jnp.array([[5]], jnp.int32)])
    assert _operations() - before == 4 * calls


def test_a_loop_runs_its_collectives_in_order_also_where_no_gradient_needs_them() -> None:
    def step(carry: Any, _: Any) -> Any:
        hvd.allreduce(carry[:2])  # dropped, if it were an io_callback
        return hvd.allreduce(carry, op=hvd.Sum), None

    def loss(x: Any) -> Any:
        return jax.lax.scan(step, x, None, length=3)[0].sum()

    for gradient in (jax.jit(jax.grad(loss)), jax.grad(loss)):
        before = _operations()
        assert gradient(jnp.ones(3)).tolist() == [hvd.size() ** 3.0] * 3
        assert _operations() - before == 3 * 2 + 3
    branches = jax.jit(lambda x: jax.lax.cond(x.sum() > 0, VERBS["allreduce"], lambda x: x, x))
    assert branches(jnp.ones(2)).tolist() == [hvd.size() / 2] * 2


def test_eager_collectives_come_after_those_of_compiled_functions_that_still_run() -> None:
    slow = jax.jit(lambda x: jnp.linalg.matrix_power(x, 40).sum() * 0 + jnp.arange(3.0))
    compiled = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    matrix, ones = jnp.ones((600, 600)) * 1e-3, jnp.ones(4).block_until_ready()
    for _ in range(5):
        # Once it is compiled, the call returns before its argument is there; the other rank has no such call.
        first = compiled(slow(matrix)) if hvd.rank() == 0 else hvd.allreduce(jnp.arange(3.0), op=hvd.Sum)
        second = hvd.allreduce(ones, op=hvd.Sum)  # of another shape
        assert (first.tolist(), second.tolist()) == ([0.0, 2.0, 4.0], [2.0] * 4)


def test_threads_compile_and_call_in_orders_of_their_own() -> None:
    found: dict[str, list[float]] = {"a": [], "b": []}

    def work(name: str) -> None:
        total = jax.jit(lambda x: hvd.allreduce(x, name=name, op=hvd.Sum))
        for i in range(20):
            found[name].append(float(total(jnp.full(2, float(i)))[0]))

    threads = [threading.Thread(target=work, args=(name,)) for name in sorted(found, reverse=hvd.rank() == 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["a"] == found["b"] == [2.0 * i for i in range(20)]


@pytest.mark.ranks(2, fresh=True, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2"})
def test_one_core_is_enough_and_an_array_on_two_devices_too_much() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX counts them
    slow = jax.jit(lambda x: x @ x * 0 + 1)
    total = jax.jit(lambda x: hvd.allreduce(jnp.sin(hvd.allreduce(x, op=hvd.Sum)) * 0 + x, op=hvd.Sum))
    for _ in range(3):  # 4 MB that are not there yet
        assert (total(slow(jnp.ones((1000, 1000)))) == hvd.size()).all()
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    spread = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    with pytest.raises(TypeError, match="is on 2 devices"):
        hvd.allreduce(spread)
    with pytest.raises(ValueError, match="more than 1 device"):
        jax.jit(VERBS["allreduce"])(spread)
    other = hvd.allreduce(jax.device_put(jnp.ones(4), jax.devices()[1]), op=hvd.Sum)
    assert (other.device, other.tolist()) == (jax.devices()[1], [2.0] * 4)


REFUSED = {
    "vmap": (lambda x: jax.vmap(hvd.allreduce)(x), "outside of the mapped function"),
    "async form": (
        jax.jit(lambda x: hvd.synchronize(hvd.allreduce_async(x))),
        "this function is being compiled",
    ),
    "async in grad": (
        jax.grad(lambda x: hvd.synchronize(hvd.allreduce_async(x)).sum()),
        "call the plain form",
    ),
    "parameters": (jax.jit(hvd.broadcast_parameters), "this function is being compiled"),
    "splits": (jax.jit(lambda x: hvd.alltoall(x, [1, 1])), "parts are equal"),
    "rows": (jax.jit(lambda x: hvd.alltoall(x[:1])), "equally"),
    "scalar": (jax.jit(lambda x: hvd.allgather(x.sum())), "without dimensions"),
    "maximum": (
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum()),
        "has a gradient only for Average and Sum",
    ),
    "complex": (jax.jit(lambda x: hvd.allreduce(x + 1j)), "complex64 cannot be communicated"),
    "keys": (lambda x: hvd.allreduce(jax.random.key(0)), "jax.random.key_data"),
    "process set": (
        jax.jit(lambda x: hvd.allreduce(x, process_set=hvd.ProcessSet([0]))),
        "is not registered",
    ),
    "NumPy": (lambda x: hvd.allreduce(np.ones(2)), "use jnp.asarray"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_says_so_where_it_is_called(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call(jnp.ones((2, 2)))
    assert hvd.allreduce(1.0).tolist() == 1.0


@pytest.mark.ranks(3, env={"POLYHVD_CHECK_DRIFT": "warn"})
@pytest.mark.parametrize("groups", [None, 2])
def test_gradients_of_other_parameters_are_an_error_with_their_names(groups: int | None) -> None:
    tree = {"a": jnp.ones(2), "b": {"w": jnp.ones(2)}}
    frozen = {"a": tree["a"]} if hvd.rank() == 1 else tree
    renamed = {"a": tree["a"], "c": tree["b"]} if hvd.rank() == 1 else tree  # of the same shapes
    for compiled in (False, True):
        gradients = hvd.DistributedGradients(groups=groups, name=f"{groups}, {compiled}")
        reduce = hvd.translated_errors()(jax.jit(gradients)) if compiled else gradients
        for given in (frozen, renamed):
            with pytest.raises(hvd.RankMismatchError, match="on ranks 0, 2 and not on rank 1") as caught:
                reduce(given)
            assert "\"['b']['w']\" is" in str(caught.value)
        jax.tree.map(np.testing.assert_array_equal, reduce(tree), tree)
        # In a later step, too. Compiled groups may start in any order.
        for given in (renamed,) if groups and compiled else (frozen, renamed):
            with pytest.raises(hvd.RankMismatchError, match=r"\['b'\]\['w'\]"):
                reduce(given)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_in_another_order_or_of_another_shape_are_an_error_with_their_names(compiled: bool) -> None:
    gradients = hvd.DistributedGradients(name=f"compiled: {compiled}")
    reduce = hvd.translated_errors()(jax.jit(gradients)) if compiled else gradients
    names = "ab" if hvd.rank() == 0 else "ba"
    with pytest.raises(hvd.RankMismatchError, match=r"different orders: at position 0, rank 0 has"):
        reduce(OrderedDict((name, jnp.ones(2)) for name in names))
    with pytest.raises(hvd.RankMismatchError, match=r"tensor 1 is the gradient of \"\['b'\]\""):
        reduce({"a": jnp.ones(2), "b": jnp.ones(2 + hvd.rank())})


def test_errors_of_compiled_collectives_can_be_had_as_they_are_and_the_job_goes_on() -> None:
    total, rows = jax.jit(hvd.allreduce), jax.jit(hvd.allgather)
    root = jax.jit(lambda x: hvd.broadcast(x, 7))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RankMismatchError"):
        total(jnp.ones(3 + hvd.rank())).block_until_ready()
    with pytest.raises(hvd.RankMismatchError, match="tensor shapes"), hvd.translated_errors():
        total(jnp.ones(3 + hvd.rank()))
    with pytest.raises(hvd.InvalidArgumentError, match=r"\[\[3\], \[4\]\] rows"), hvd.translated_errors():
        rows(jnp.ones(3 + hvd.rank()))
    with pytest.raises(hvd.InvalidArgumentError, match="root rank 7"), hvd.translated_errors():
        root(jnp.ones(2))
    with pytest.raises(ZeroDivisionError), hvd.translated_errors():
        1 / 0  # noqa: B018
    assert total(jnp.ones(3)).tolist() == [1.0] * 3

    # One that fails later, on a thread of XLA's, leaves nothing behind.
    late = jax.jit(lambda x: jnp.linalg.matrix_power(x, 40).sum() * 0 + jnp.ones(2))
    matrix = jnp.ones((600, 600)) * 1e-3
    sets, three = [hvd.add_process_set([0]), hvd.add_process_set([1])], jnp.ones(3)
    own = jax.jit(lambda x: hvd.allreduce(x, process_set=sets[hvd.rank()]))
    own(late(matrix)).block_until_ready()  # both are compiled
    for each in sets:
        hvd.remove_process_set(each)
    with pytest.raises(hvd.InvalidArgumentError, match="is not registered"), hvd.translated_errors():
        own(late(matrix))
    assert total(three).tolist() == [1.0] * 3


def test_a_compiled_function_lives_in_the_next_world() -> None:
    total = jax.jit(VERBS["allreduce"])
    expected = total(_mine(3))
    hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError), hvd.translated_errors():
        total(jnp.ones(3))
    hvd.init()
    np.testing.assert_array_equal(total(_mine(3)), expected)


def test_an_array_that_is_donated_while_it_is_sent_is_sent_as_it_was() -> None:
    x = _mine(1000)
    expected = 2 * np.arange(1000.0) + 100.0
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(x, name="donated", op=hvd.Sum)
        jax.jit(lambda x: x * 0, donate_argnums=0)(x).block_until_ready()
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(x, name="donated", op=hvd.Sum)
    np.testing.assert_array_equal(hvd.synchronize(handle), expected)
    changed = jax.jit(lambda x: x + 1, donate_argnums=0)  # memory of the core's
    assert changed(hvd.allreduce(jnp.ones(1000), op=hvd.Sum)).tolist() == [3.0] * 1000


def test_a_tree_of_parameters_becomes_the_roots_with_keys_and_numbers() -> None:
    rank = hvd.rank()
    state = {"w": _mine(2), "step": rank, "key": jax.random.key(rank), "rest": [None, (np.ones(1) * rank,)]}
    found = hvd.broadcast_parameters(state, root_rank=1)
    assert found["w"].tolist() == [100.0, 101.0]
    assert int(found["step"]) == int(found["rest"][1][0][0]) == 1
    assert found["rest"][0] is None
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(1))).all()
    assert found["rest"][1][0].dtype == jnp.float32  # as everywhere without jax_enable_x64


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"op": "Sum", "compression": "fp16"}])
def test_gradients_of_a_tree_are_reduced_eagerly_and_compiled(options: dict[str, Any]) -> None:
    given: dict[str, Any] = dict(options)
    if "op" in given:
        given |= {"op": hvd.Sum, "compression": hvd.Compression.fp16}

    def loss(params: Any, x: Any) -> Any:
        return (params["w"] * x).sum() + params["b"][0]

    params = {"w": jnp.ones(3), "b": [jnp.zeros(())]}
    x = _mine(3)
    factor = 2 if "op" in given else 1
    for function in (hvd.value_and_grad(loss, **given), jax.jit(hvd.value_and_grad(loss, **given))):
        before = _operations()
        value, gradients = function(params, x)
        assert float(value) == 3 + 300.0 * hvd.rank()
        assert gradients["w"].tolist() == [factor * (i + 50.0) for i in range(3)]
        assert gradients["b"][0].tolist() == factor
        assert _operations() - before == given.get("groups", 1)
    assert hvd.grad(loss, **given)(params, x)["b"][0].tolist() == factor


def test_a_compressor_with_state_is_for_gradients_that_are_there() -> None:
    from polyhvd.training.compression import KeyedCompressor

    class Halves(KeyedCompressor):
        def compress(self, tensor: Any, key: str) -> Any:
            self.state.set(key, tensor)
            return tensor / 2, None

        def decompress(self, tensor: Any, context: Any, key: str) -> Any:
            return tensor * 2

    reduced = hvd.DistributedGradients(compression=Halves)
    assert reduced([jnp.ones(2)])[0].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="keeps state from step to step"):
        jax.jit(reduced)([jnp.ones(2)])


def lose_a_rank() -> str:
    """On each rank of a pool: what the survivor's compiled function has raised."""
    total = jax.jit(partial(hvd.allreduce, op=hvd.Sum))
    total(jnp.ones(2)).block_until_ready()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        try:
            with hvd.translated_errors():
                total(jnp.ones(2))
        except hvd.HorovodInternalError as error:
            raised = type(error).__name__
        else:
            return "nothing"
    return raised
