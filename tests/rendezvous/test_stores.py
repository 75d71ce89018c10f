"""What every store keeps to, whatever it is made of."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import FolderPlace, Place, ServerPlace

from polyhvd.rendezvous.store import COUNT_MAX, VALUE_BYTES_MAX, GatherTimeoutError, Store, StoreError

VALUES = [b"", b"\0", bytes(range(256)), b"{}\n" * 5, os.urandom(1 << 20)]


def make(kind: str, tmp_path: Path) -> Place:
    return FolderPlace(tmp_path / "store") if kind == "folder" else ServerPlace()


@pytest.fixture(params=["server", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = make(request.param, tmp_path)
    yield place
    place.close()


def taken(store: Store, request: int, deadline_s: float = 20.0) -> list[bytes]:
    deadline = time.monotonic() + deadline_s
    while (values := store.take(request)) is None:
        assert time.monotonic() < deadline, "nothing came"
        store.pause()
    return values


def absent(store: Store, scope: str, count: int = 1) -> list[int]:
    """Which values are not there now."""
    try:
        store.gather(scope, count, 0.0)
    except GatherTimeoutError as error:
        return error.missing
    return []


def settle(store: Store, scope: str, missing: list[int], count: int = 1) -> None:
    """Wait until just these values are absent."""
    deadline = time.monotonic() + 20
    while absent(store, scope, count) != missing:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def on_threads(count: int, function: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]


def test_first_writer_wins(place: Place) -> None:
    first, second = place.join(0), place.join(1)
    first.put("key", 0, b"first")
    assert first.gather("key", 1, 10) == [b"first"]
    second.put("key", 0, b"second")
    second.put("key", 0, b"third", own=True)
    assert second.gather("key", 1, 10, own=(0, b"fourth")) == [b"first"]
    second.close()
    assert first.gather("key", 1, 10) == [b"first"]


def test_one_of_many_that_write_at_once_wins_for_everybody(place: Place) -> None:
    begin = threading.Barrier(8)
    stores = [place.join(rank) for rank in range(8)]
    seen: list[list[bytes]] = []

    def run(rank: int) -> None:
        for turn in range(20):
            begin.wait()
            stores[rank].put("key", turn, bytes([rank]) * (1 + 1000 * rank))
        seen.append(stores[rank].gather("key", 20, 10))

    on_threads(8, run)
    assert all(values == seen[0] for values in seen)
    assert all(value == bytes([value[0]]) * (1 + 1000 * value[0]) for value in seen[0])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_gather_returns_all_values_in_order_whoever_comes_first(place: Place, order: list[int]) -> None:
    stores = {rank: place.join(rank) for rank in order}
    requests = {
        rank: stores[rank].post_gather("a", 4, 20, own=(rank, bytes([rank]) * rank)) for rank in order
    }
    for rank in reversed(order):
        assert taken(stores[rank], requests[rank]) == [b"", b"\1", b"\2\2", b"\3\3\3"]


def test_requests_are_answered_in_whatever_order_they_are_taken(place: Place) -> None:
    asking, writing = place.join(0), place.join(1)
    requests = [asking.post_gather(f"scope {number}", 1, 20) for number in range(5)]
    for number in (4, 0, 3, 1, 2):
        writing.put(f"scope {number}", 0, bytes([number]))
    for number in (2, 3, 0, 4, 1):
        assert taken(asking, requests[number]) == [bytes([number])]


def test_a_request_ends_with_its_answer(place: Place) -> None:
    store = place.join()
    store.put("a", 0, b"x")
    request = store.post_gather("a", 1, 10)
    assert taken(store, request) == [b"x"]
    assert store.take(request) is None
    late = store.post_gather("b", 1, 0.0)
    with pytest.raises(GatherTimeoutError):
        taken(store, late)
    assert store.take(late) is None


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{len(value)} bytes")
def test_values_arrive_as_they_were_written(place: Place, value: bytes) -> None:
    writing, reading = place.join(0), place.join(1)
    writing.put("value", 0, value)
    assert reading.gather("value", 2, 10, own=(1, value)) == [value, value]


@pytest.mark.parametrize(
    "scope", ["", "a/b/c", "..", "../x", "/", "a\0b", "ü \u2028\n", "\ud800", "%2f", "x" * 3000]
)
def test_a_scope_is_any_text(place: Place, scope: str) -> None:
    writing, reading = place.join(0), place.join(1)
    writing.put(scope, 0, scope.encode("utf-8", "surrogatepass"))
    assert reading.gather(scope, 1, 10) == [scope.encode("utf-8", "surrogatepass")]
    assert absent(reading, f"{scope}/0") == [0]


def test_scopes_that_look_alike_are_different(place: Place) -> None:
    store = place.join()
    scopes = ["a", "A", "a/", "a//", "a/0", "a%2f", "a%2F", "a.", "a ", "ä", "a\u0308", "x" * 400, "x" * 401]
    for number, scope in enumerate(scopes):
        store.put(scope, 0, bytes([number]))
    assert [store.gather(scope, 1, 10) for scope in scopes] == [[bytes([n])] for n in range(len(scopes))]


def test_gather_that_times_out_names_the_missing(place: Place) -> None:
    store = place.join()
    with pytest.raises(GatherTimeoutError, match=r"still missing: \[0, 1, 3\]") as caught:
        store.gather("a", 4, 0.1, own=(2, b""))
    assert caught.value.missing == [0, 1, 3]


def test_a_time_of_nothing_still_finds_what_is_there(place: Place) -> None:
    store = place.join()
    store.put("a", 0, b"x")
    assert store.gather("a", 1, 0.0) == [b"x"]


def test_take_does_not_block(place: Place) -> None:
    store = place.join()
    request = store.post_gather("never", 1, 1000)
    began = time.monotonic()
    for _ in range(100):
        assert store.take(request) is None
    assert time.monotonic() - began < 60


def test_a_value_wakes_who_waits_for_the_descriptor(place: Place) -> None:
    waiting, writing = place.join(0), place.join(1)
    request = waiting.post_gather("a", 1, 30)
    while (values := waiting.take(request)) is None:
        writing.put("a", 0, b"woken")
        poller = select.poll()
        if waiting.fileno() >= 0:
            poller.register(waiting.fileno(), select.POLLIN)
        assert poller.poll(1000 * min(waiting.poll_s, 20.0)) or waiting.fileno() < 0
    assert values == [b"woken"]


def test_own_values_go_when_their_rank_closes(place: Place) -> None:
    staying, leaving = place.join(0), place.join(1)
    assert leaving.gather("a", 1, 10, own=(0, b"mine")) == [b"mine"]
    leaving.put("b", 0, b"mine too", own=True)
    leaving.put("c", 0, b"kept")
    assert staying.gather("c", 1, 10) == [b"kept"]
    leaving.close()
    settle(staying, "a", [0])
    settle(staying, "b", [0])
    assert staying.gather("c", 1, 10) == [b"kept"]
    assert staying.gather("a", 1, 10, own=(0, b"next")) == [b"next"]


def test_answer_stays_good_when_a_rank_that_has_it_leaves_before_the_others_look(place: Place) -> None:
    stores = [place.join(rank) for rank in range(3)]
    onlooker = place.join(3)
    looked_for = onlooker.post_gather("a", 3, 20)
    assert onlooker.gather("posted", 1, 20, own=(0, b"")) == [b""]
    requests = [stores[rank].post_gather("a", 3, 20, own=(rank, bytes([rank]) * rank)) for rank in range(3)]
    for rank in (2, 0, 1):
        assert taken(stores[rank], requests[rank]) == [b"", b"\1", b"\2\2"]
        stores[rank].close()
    assert taken(onlooker, looked_for) == [b"", b"\1", b"\2\2"]
    settle(onlooker, "a", [0, 1, 2], 3)


def test_answer_to_an_earlier_gather_is_not_one_to_a_later(place: Place) -> None:
    with place.join(0) as first, place.join(1) as second:
        request = first.post_gather("a", 2, 20, own=(0, b"old zero"))
        assert second.gather("a", 2, 20, own=(1, b"old one")) == [b"old zero", b"old one"]
        assert taken(first, request) == [b"old zero", b"old one"]
    third, fourth = place.join(0), place.join(1)
    settle(third, "a", [0, 1], 2)
    request = third.post_gather("a", 2, 20, own=(0, b"new zero"))
    assert third.take(request) is None
    assert fourth.gather("a", 2, 20, own=(1, b"new one")) == [b"new zero", b"new one"]
    fourth.close()
    assert taken(third, request) == [b"new zero", b"new one"]


def test_only_its_writer_can_have_a_value_forgotten(place: Place) -> None:
    first, other = place.join(1), place.join(2)
    first.put("a", 0, b"value")
    assert other.gather("a", 1, 10) == [b"value"]
    other.forget("a", 0)
    other.forget("no such", 0)
    assert other.gather("a", 1, 10) == [b"value"]
    first.close()
    later = place.join(1)
    later.forget("a", 0)
    assert later.gather("a", 1, 10, own=(0, b"new")) == [b"new"]


def test_what_was_forgotten_and_written_by_another_stays_when_the_first_closes(place: Place) -> None:
    first, other = place.join(1), place.join(2)
    first.put("a", 0, b"first", own=True)
    assert first.gather("a", 1, 10) == [b"first"]
    first.forget("a", 0)
    settle(other, "a", [0])
    other.put("a", 0, b"other", own=True)
    assert other.gather("a", 1, 10) == [b"other"]
    first.close()
    later = place.join(3)
    assert later.gather("a", 1, 10) == [b"other"]


def test_value_that_takes_the_place_of_a_forgotten_own_one_stays(place: Place) -> None:
    staying, leaving = place.join(0), place.join(1)
    leaving.put("a", 0, b"own", own=True)
    leaving.forget("a", 0)
    leaving.put("a", 0, b"for all")
    assert leaving.gather("b", 1, 10, own=(0, b"")) == [b""]
    leaving.close()
    settle(staying, "b", [0])
    assert staying.gather("a", 1, 10) == [b"for all"]


def test_gather_waits_again_for_a_rank_that_left_and_came_back(place: Place) -> None:
    waiting, leaving = place.join(0), place.join(1)
    leaving.put("a", 0, b"old", own=True)
    request = waiting.post_gather("a", 2, 20)
    assert waiting.take(request) is None
    settle(waiting, "a", [1], 2)
    leaving.close()
    settle(waiting, "a", [0, 1], 2)
    waiting.put("a", 1, b"one")
    assert waiting.take(request) is None
    back = place.join(1)
    back.put("a", 0, b"new", own=True)
    assert taken(waiting, request) == [b"new", b"one"]


def test_closed_stores_raise(place: Place) -> None:
    store = place.join()
    request = store.post_gather("a", 1, 10)
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", 0, b""),
        lambda: store.forget("a", 0),
        lambda: store.post_gather("a", 1, 1),
        lambda: store.take(request),
        lambda: store.gather("a", 1, 1),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="the store is closed"):
            call()
    assert store.fileno() == -1


def test_waiting_ends_when_the_store_goes_away(place: Place) -> None:
    store = place.join()
    request = store.post_gather("never", 1, 1000)
    store.put("there", 0, b"")
    assert store.gather("there", 1, 10) == [b""]
    place.lose()
    with pytest.raises(StoreError):
        taken(store, request)
    with pytest.raises(StoreError):
        store.gather("never", 1, 1000)
    store.close()


def test_waiting_ends_when_the_store_goes_away_and_another_answer_was_not_taken(place: Place) -> None:
    store = place.join()
    store.put("there", 0, b"")
    store.post_gather("there", 1, 10)
    request = store.post_gather("never", 1, 1000)
    store.gather("there", 1, 10)
    place.lose()
    with pytest.raises(StoreError):
        taken(store, request)


@pytest.mark.parametrize("count", [0, -1, COUNT_MAX + 1])
def test_impossible_counts_are_refused_where_they_are_asked_for(place: Place, count: int) -> None:
    store = place.join()
    with pytest.raises(ValueError, match=f"a gather of {count} values"):
        store.post_gather("a", count, 1)
    store.put("a", 0, b"unharmed")
    assert store.gather("a", 1, 10) == [b"unharmed"]


def test_values_beyond_the_bound_are_refused_where_they_are_written(place: Place) -> None:
    store = place.join()
    value = bytes(VALUE_BYTES_MAX + 1)
    with pytest.raises(ValueError, match="too large for a store"):
        store.put("a", 0, value)
    with pytest.raises(ValueError, match="too large for a store"):
        store.post_gather("a", 1, 1, own=(0, value))
    store.put("a", 0, b"unharmed")
    assert store.gather("a", 1, 10) == [b"unharmed"]


def test_a_gather_of_the_most_values_says_who_is_missing(place: Place) -> None:
    store = place.join()
    with pytest.raises(GatherTimeoutError) as caught:
        store.gather("a", COUNT_MAX, 0.0, own=(5, b""))
    assert caught.value.missing == [*range(5), *range(6, COUNT_MAX)]


def test_ranks_of_a_job_agree_on_its_name_and_another_job_has_another(place: Place, tmp_path: Path) -> None:
    one, two = place.join(0), place.join(1)
    assert one.job == two.job
    assert one.secret == two.secret == place.secret
    assert one.secret.hex() not in one.job
    kinds = {FolderPlace: "folder", ServerPlace: "server"}
    (tmp_path / "other").mkdir()
    other = make(kinds[type(place)], tmp_path / "other")
    try:
        assert other.join().job != one.job
    finally:
        other.close()


def test_many_ranks_on_threads_meet_again_and_again(place: Place) -> None:
    stores = [place.join(rank) for rank in range(12)]

    def run(rank: int) -> None:
        for turn in range(5):
            values = stores[rank].gather(f"turn {turn}", 12, 30, own=(rank, f"{turn} {rank}".encode()))
            assert values == [f"{turn} {other}".encode() for other in range(12)]

    on_threads(12, run)


# Several processes


def test_many_ranks_in_processes_meet(place: Place) -> None:
    code = """
values = store.gather('cards', 4, 30, own=(int(rank), rank.encode() * 1000))
assert values == [str(other).encode() * 1000 for other in range(4)], values
store.gather('done', 4, 30, own=(int(rank), b''))
"""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(place.process(rank, code)) for rank in range(4)]
        assert [process.wait(60) for process in processes] == [0] * 4


def test_a_rank_that_was_killed_comes_back_with_another_value(place: Place) -> None:
    code = "store.put('cards', 1, b'old', own=True); print('put', flush=True); time.sleep(600)"
    staying = place.join(0)
    with place.process(1, code) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == "put\n"
        settle(staying, "cards", [0], 2)
        dying.send_signal(signal.SIGKILL)
        dying.wait(20)
    back = place.join(1)
    request = back.post_gather("cards", 2, 20, own=(1, b"new"))
    staying.put("cards", 0, b"zero", own=True)
    assert taken(back, request) == [b"zero", b"new"]
    back.close()
    settle(staying, "cards", [1], 2)


def test_writer_that_is_killed_in_the_middle_of_a_put_leaves_nothing_to_see(place: Place) -> None:
    reading = place.join(0)
    request = reading.post_gather("value", 1, 30)
    with place.process(1, f"{place.halve}\nstore.put('value', 0, bytes(1 << 20))") as writing:
        assert writing.stdout is not None
        assert writing.stdout.readline() == "half\n"
        assert absent(reading, "value") == [0]
        writing.send_signal(signal.SIGKILL)
        writing.wait(20)
    assert absent(reading, "value") == [0]
    assert reading.take(request) is None
    back = place.join(1)
    back.put("value", 0, b"whole")
    assert taken(reading, request) == [b"whole"]


def test_values_are_whole_or_absent_whenever_their_writer_is_killed(place: Place) -> None:
    code = """
for number in range(10000):
    store.put('value', number, bytes([number % 256]) * (1 << 20))
    print(number, flush=True)
"""
    reading = place.join(0)
    chance = random.Random(7)
    for turn in range(4):
        with place.process(1, code.replace("'value'", f"'value {turn}'")) as writing:
            assert writing.stdout is not None
            for _ in range(chance.randint(1, 12)):
                last = int(writing.stdout.readline())
            time.sleep(chance.random() * 0.02)
            writing.send_signal(signal.SIGKILL)
            writing.wait(20)
        for number in range(last + 30):
            try:
                (*_, value) = reading.gather(f"value {turn}", number + 1, 0.0)
            except GatherTimeoutError:
                break
            assert value == bytes([number % 256]) * (1 << 20)
