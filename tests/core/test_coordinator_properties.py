"""Whatever ranks ask for, and in whatever order messages travel, all ranks run the same.

Hypothesis makes up programs and schedules for the ranks of ``simulated_ranks`` and shrinks what
fails. ``make nightly`` runs more examples than ``make test``, and ``HYPOTHESIS_PROFILE=long`` many more.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_ranks import Call, Event, Rank, World, units

OpKind, ReduceOp, DType, ErrorCode = units.OpKind, units.ReduceOp, units.DType, units.ErrorCode
TENSOR_KINDS = (
    OpKind.ALLREDUCE,
    OpKind.ALLGATHER,
    OpKind.BROADCAST,
    OpKind.BARRIER,
    OpKind.ALLTOALL,
    OpKind.REDUCESCATTER,
)
REDUCTIONS = (OpKind.ALLREDUCE, OpKind.REDUCESCATTER)
OWN_ROWS = (OpKind.ALLGATHER, OpKind.ALLTOALL)
WORLD = 0

SETTINGS = {
    "suite": settings(max_examples=60, stateful_step_count=60, derandomize=True),
    "nightly": settings(max_examples=300, stateful_step_count=60, print_blob=True),
    "long": settings(max_examples=10_000, stateful_step_count=100, print_blob=True),
}

small = st.integers(0, 5)
names = st.sampled_from("abc")
schedules = st.lists(st.integers(0, 30), max_size=40)
specs = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(TENSOR_KINDS),
        "dtype": st.sampled_from((DType.FLOAT32, DType.INT32)),
        "op": st.sampled_from((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT)),
        "prescale": st.sampled_from((1.0, 2.0)),
        "root": small,
        "columns": st.lists(st.integers(1, 3), min_size=1, max_size=2),
    }
)
#: What one rank asks for differently, if it does.
oddities = st.sampled_from([None] * 8 + ["kind", "dtype", "op", "prescale", "root", "columns", "tensors"])


def request_of(spec: dict[str, Any], process_set: int, name: str, rows: int, members: list[int]) -> Any:
    request = units.Request()
    request.process_set, request.name, request.where = process_set, name, f"line {rows}"
    request.kind, request.priority = spec["kind"], rows % 3 - 1
    if spec["kind"] in REDUCTIONS:
        request.op, request.prescale = spec["op"], spec["prescale"]
    if spec["kind"] == OpKind.BROADCAST:
        request.root = members[spec["root"] % len(members)]
    if spec["kind"] != OpKind.BARRIER:
        request.dtype = spec["dtype"]
        first = rows if spec["kind"] in OWN_ROWS else 2
        request.shapes = [[first, columns] for columns in spec["columns"]]
    return request


def changed(spec: dict[str, Any], oddity: str | None) -> dict[str, Any]:
    if oddity is None:
        return spec
    others = {
        "kind": TENSOR_KINDS[(TENSOR_KINDS.index(spec["kind"]) + 1) % len(TENSOR_KINDS)],
        "dtype": DType.INT32 if spec["dtype"] == DType.FLOAT32 else DType.FLOAT32,
        "op": ReduceOp.MAX if spec["op"] == ReduceOp.SUM else ReduceOp.SUM,
        "prescale": 3.0 - spec["prescale"],
        "root": spec["root"] + 1,
        "columns": [column + 1 for column in spec["columns"]],
        "tensors": [*spec["columns"], 1],
    }
    return {**spec, "columns" if oddity == "tensors" else oddity: others[oddity]}


# The model: what an agreement is, said once more and in another way -----------------------------


def meaning(request: Any) -> tuple[Any, ...]:
    """What must be alike on all ranks."""
    shapes = request.shapes
    if request.kind in OWN_ROWS:
        shapes = [shape[1:] for shape in shapes]
    reduction = (request.op, request.prescale) if request.kind in REDUCTIONS else None
    has_root = request.kind in (OpKind.BROADCAST, OpKind.REMOVE_PROCESS_SET)
    return (request.kind, request.dtype, shapes, reduction, request.root if has_root else None)


def check_ran(event: Event, members: list[int]) -> None:
    """All members took part, by a call or by standing in, and ran what they had asked for."""
    agreement = event.agreement
    calls = {rank: call.request for rank, call in event.calls.items() if call is not None}
    assert calls, f"{event.key} ran though nobody has asked"
    assert len({repr(meaning(request)) for request in calls.values()}) == 1, f"{event.key} ran unlike"
    one = next(iter(calls.values()))
    assert (agreement.kind, agreement.dtype) == (one.kind, one.dtype)
    if one.kind in REDUCTIONS:
        assert (agreement.op, agreement.prescale) == (one.op, one.prescale)
    if one.kind == OpKind.BROADCAST:
        assert agreement.root == one.root
        assert one.root in calls, f"{event.key}: the root has nothing to send"
    if one.kind == OpKind.ALLGATHER:
        width = len(one.shapes)
        rows = [calls[rank].shapes[i][0] if rank in calls else 0 for rank in members for i in range(width)]
        assert agreement.rows == rows
        assert [shape[0] for shape in agreement.shapes] == [sum(rows[i::width]) for i in range(width)]
    elif one.kind not in OWN_ROWS:
        assert agreement.shapes == one.shapes


def check_refused(event: Event, world: World, members: list[int], removed: set[int]) -> None:
    """There was a reason; a disagreement is told to all who take part."""
    calls = [call.request for call in event.calls.values() if call is not None]
    text = f"{event.key}: {event.message}"
    if event.error == ErrorCode.PEER_DEPARTED:
        assert any(world.ranks[rank].departed for rank in members), text
    elif event.error == ErrorCode.RANK_MISMATCH:
        assert len({repr(meaning(request)) for request in calls}) > 1, text
    elif event.key[0] not in removed:
        assert event.error == ErrorCode.INVALID_ARGUMENT, text
        lacks_root = all(r.kind == OpKind.BROADCAST and r.root not in event.calls for r in calls)
        is_product = all(r.op == ReduceOp.PRODUCT and r.prescale != 1 for r in calls)
        assert len(calls) < len(members), text
        assert lacks_root or is_product, text


class Programs(RuleBasedStateMachine):
    """Random programs of a few ranks, and random schedules of what carries them out."""

    world: World

    @initialize(
        parents=st.lists(small, min_size=0, max_size=4),
        capacity=st.sampled_from((0, 1, 2, 3, 100)),
        fusion_bytes=st.sampled_from((0, 40, 1000)),
        patience=st.sampled_from((0.0, 2.0, 1e9)),
    )
    def begin(self, parents: list[int], capacity: int, fusion_bytes: int, patience: float) -> None:
        tree = [0] + [parent % (i + 1) for i, parent in enumerate(parents)]
        self.world = World(tree, cache_capacity=capacity, fusion_bytes_max=fusion_bytes, patience=patience)
        self.calls: list[tuple[int, Call]] = []
        #: The spec that an operation had last, so that most ranks ask for the same, again and again.
        self.plan: dict[Any, dict[str, Any]] = {}
        self.asked: Counter[Any] = Counter()
        self.sets_ever = {WORLD: list(range(self.world.size))}

    def submit(self, rank: Rank, request: Any) -> None:
        self.calls.append((rank.rank, rank.submit(request)))

    @rule(asked=st.lists(st.tuples(small, small, names, oddities, st.integers(0, 2)), max_size=8), spec=specs)
    def ask(self, asked: list[tuple[int, int, str, str | None, int]], spec: dict[str, Any]) -> None:
        """Some ranks ask for something, alike or not."""
        for who, which_set, name, odd, rows in asked:
            rank = self.world.ranks[who % self.world.size]
            ids = [i for i in rank.sets.ids() if rank.may_submit(i, name)]
            if ids:
                again = rows > 0
                self.ask_for(rank, ids[which_set % len(ids)], name, spec, again=again, odd=odd, rows=rows)

    @rule(
        spec=specs, which_set=small, order=st.permutations("abc"), schedules=st.lists(schedules, max_size=4)
    )
    def train(
        self, spec: dict[str, Any], which_set: int, order: list[str], schedules: list[list[int]]
    ) -> None:
        """All members ask for the same, each in an order of its own, time and again."""
        for schedule in schedules:
            for rank in self.world.ranks:
                ids = rank.sets.ids()
                process_set = ids[which_set % len(ids)]
                for i in range(3):
                    name = order[(i + rank.rank) % 3]
                    if rank.may_submit(process_set, name):
                        self.ask_for(rank, process_set, name, spec)
            self.go_on(schedule)

    def ask_for(
        self,
        rank: Rank,
        process_set: int,
        name: str,
        spec: dict[str, Any],
        *,
        again: bool = True,
        odd: str | None = None,
        rows: int = 1,
    ) -> None:
        """The next use of a name; the first rank that comes to it decides what it is."""
        key = (process_set, name)
        count = self.asked[rank.rank, key]
        self.asked[rank.rank, key] += 1
        before = self.plan.get((key, count - 1), spec)
        planned = self.plan.setdefault((key, count), before if again else spec)
        members = rank.sets.members(process_set)
        self.submit(rank, request_of(changed(planned, odd), process_set, name, rows, members))

    @rule(
        spec=specs,
        which_set=small,
        counts=st.lists(st.integers(0, 4), min_size=5, max_size=5),
        odd=st.tuples(small, oddities),
        rows=st.integers(0, 2),
    )
    def ask_without_names(
        self,
        spec: dict[str, Any],
        which_set: int,
        counts: list[int],
        odd: tuple[int, str | None],
        rows: int,
    ) -> None:
        """Each rank makes some calls without a name; those of all ranks are alike, but for one."""
        for rank in self.world.ranks:
            ids = [i for i in rank.sets.ids() if rank.may_submit_unnamed(i)]
            if not ids:
                continue
            process_set = ids[which_set % len(ids)]
            for _ in range(counts[rank.rank]):
                self.ask_unnamed(rank, process_set, spec, odd[1] if odd[0] == rank.rank else None, rows)

    def ask_unnamed(
        self, rank: Rank, process_set: int, spec: dict[str, Any], odd: str | None, rows: int
    ) -> None:
        """The next call of a kind; the first rank that comes to it decides what it is."""
        kind = spec["kind"]
        turn = rank.turns[process_set, kind] + 1
        planned = self.plan.setdefault(((process_set, kind), turn), spec)
        members = rank.sets.members(process_set)
        asked = changed(planned, None if odd == "kind" else odd)
        request = request_of(asked, process_set, "", rows, members)
        self.calls.append((rank.rank, rank.submit_unnamed(request)))

    @rule(schedule=schedules)
    def go_on(self, schedule: list[int]) -> None:
        """Do some of what can be done, in any order."""
        for choice in schedule:
            steps = self.world.steps()
            if steps:
                steps[choice % len(steps)]()

    @rule(seconds=st.sampled_from((0.5, 3.0)))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def drain(self) -> None:
        self.world.drain()

    @rule(who=small)
    def join(self, who: int) -> None:
        rank = self.world.ranks[who % self.world.size]
        if rank.may_submit(WORLD, "join"):
            self.submit(rank, control_request(OpKind.JOIN, "join"))

    @rule(who=st.lists(small, min_size=1, max_size=6), members=st.sets(small, min_size=1))
    def add_set(self, who: list[int], members: set[int]) -> None:
        ranks = sorted({member % self.world.size for member in members})
        for rank in self.some(who, "add set"):
            if ranks not in [rank.sets.members(i) for i in rank.sets.ids()]:
                request = control_request(OpKind.ADD_PROCESS_SET, "add set")
                request.shapes = [[member] for member in ranks]
                self.submit(rank, request)

    @rule(who=st.lists(small, min_size=1, max_size=6), which=small)
    def remove_set(self, who: list[int], which: int) -> None:
        for rank in self.some(who, "remove set"):
            ids = [i for i in rank.sets.ids() if i != WORLD]
            if ids:
                request = control_request(OpKind.REMOVE_PROCESS_SET, "remove set")
                request.root = ids[which % len(ids)]
                self.submit(rank, request)

    def some(self, who: list[int], name: str) -> list[Rank]:
        chosen = {number % self.world.size for number in who}
        return [self.world.ranks[i] for i in sorted(chosen) if self.world.ranks[i].may_submit(WORLD, name)]

    @precondition(lambda self: len(self.calls) > 50)
    @rule(who=small)
    def depart(self, who: int) -> None:
        rank = self.world.ranks[who % self.world.size]
        if rank.may_depart():
            self.calls = [item for item in self.calls if item[1] not in rank.in_flight.values()]
            rank.depart()

    @invariant()
    def remember_sets(self) -> None:
        for rank in getattr(
            self, "world", World([0], cache_capacity=1, fusion_bytes_max=0, patience=0)
        ).ranks:
            for number in rank.sets.ids():
                known = self.sets_ever.setdefault(number, rank.sets.members(number))
                assert known == rank.sets.members(number), "one number, two sets"

    # The end

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.finish()
            self.check()

    def finish(self) -> None:
        """Let the ranks ask for what others still wait for, until nobody waits."""
        for _ in range(200):
            self.world.drain()
            waiting = [rank for rank in self.world.ranks if rank.in_flight]
            if not waiting:
                return
            if not any([self.help(rank, call) for rank in waiting for call in [*rank.in_flight.values()]]):
                break
        left = {rank.rank: [call.key for call in rank.in_flight.values()] for rank in self.world.ranks}
        raise AssertionError(f"left pending: {left}")

    def help(self, waiting: Rank, call: Call) -> bool:
        request, helped = call.request, False
        if request.process_set not in waiting.sets.ids():
            return False
        for number in waiting.sets.members(request.process_set):
            rank = self.world.ranks[number]
            if request.turn:
                line = (request.process_set, request.kind)
                if rank.may_submit_unnamed(request.process_set) and rank.turns[line] < request.turn:
                    self.calls.append((number, rank.submit_unnamed(copy_of(request))))
                    helped = True
            elif rank.may_submit(*call.key):
                self.submit(rank, copy_of(request))
                helped = True
        return helped

    def check(self) -> None:
        world = self.world
        here = [rank for rank in world.ranks if not rank.departed]
        removed = set(self.sets_ever) - set(here[0].sets.ids())
        for rank in here:
            assert rank.applied == len(world.order), "a decision did not arrive"
            assert rank.sets.ids() == here[0].sets.ids(), "process sets differ"
            assert len(rank.cache) == len(here[0].cache), "replicas differ"
            for line, turn in rank.turns.items():
                members = [world.ranks[number] for number in rank.sets.members(line[0])]
                if not any(member.departed for member in members):  # else it all fails anyway
                    assert all(member.turns[line] == turn for member in members), f"{line}: turns differ"
        assert world.ranks[0].coordinator.stalled(world.now) == [], "something is left at the coordinator"
        for number, call in self.calls:
            assert call.outcome is not None, f"{call.key} of rank {number} came to nothing"
        for event in world.events():
            members = self.sets_ever[event.key[0]]
            there = {rank for rank in members if not world.ranks[rank].departed}
            if event.agreement is not None:
                assert there <= set(event.calls), f"{event.key} ran on ranks {sorted(event.calls)} only"
                check_ran(event, members)
            elif event.calls:
                check_refused(event, world, members, removed)


def control_request(kind: Any, name: str) -> Any:
    request = units.Request()
    request.kind, request.name = kind, name
    return request


def copy_of(request: Any) -> Any:
    copy = units.Request()
    for name in ("process_set", "kind", "op", "dtype", "root", "prescale", "shapes", "name", "where"):
        setattr(copy, name, getattr(request, name))
    return copy


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    SETTINGS[os.environ.get("HYPOTHESIS_PROFILE") or os.environ.get("TEST_DEPTH") or "suite"],
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
