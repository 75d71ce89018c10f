"""Somebody between two hosts, who has let handshakes pass: what he does then ends the job with a line."""

from __future__ import annotations

import json
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from joining import ROOT, SECRET, environment, free_port
from launching import DEADLINE_S
from man_in_the_middle import Attack, ManInTheMiddle, Message, dropped, flipped, replayed, server_behind

from polyhvd import run
from polyhvd.launch.job import agent, job
from polyhvd.launch.job.joining import reach
from polyhvd.launch.providers.arriving import Arrivals
from polyhvd.rendezvous.signed_stream import SignedStream, TamperedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ATTACKS = [flipped, replayed, dropped]
HOSTS = "localhost:1,127.0.0.1:1"  # two hosts to the job


@pytest.fixture
def man(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManInTheMiddle]:
    man = ManInTheMiddle()
    monkeypatch.setattr(job, "Server", server_behind(man))
    yield man
    man.close()


def once(attack: Attack, wanted: Callable[[Message], bool]) -> Attack:
    """The attack on the first message that is wanted; those that follow pass."""
    hit: list[Message] = []

    def on(message: Message) -> bytes:
        if hit or not wanted(message):
            return message.data
        hit.append(message)
        return attack(message)

    return on


def steps() -> list[Any]:
    """A rank's work: each step sends an object from rank 0, and one from each rank to all."""
    import numpy as np
    import polyhvd.numpy as hvd

    hvd.init()
    received: list[Any] = [hvd.cross_size()]
    for number in range(4):
        word = f"this is word {number}" + 100 * "."
        received.append(hvd.broadcast_object(word if hvd.rank() == 0 else None))
        received.append(hvd.allgather_object((hvd.rank(), f"that is word {number}")))
        assert hvd.allreduce(np.ones(3), op=hvd.Sum, name="x").tolist() == [2.0] * 3
    return received


def large() -> float:
    import numpy as np
    import polyhvd.numpy as hvd

    hvd.init()
    array = np.full(1 << 18, 7.0)
    return float(hvd.broadcast_object({"array": array} if hvd.rank() == 0 else None)["array"].sum())


def failure(work: Callable[[], Any] = steps) -> str:
    """The line with which the job of two hosts ends, soon."""
    began = time.monotonic()
    with pytest.raises((RuntimeError, OSError)) as caught:
        run(work, np=2, hosts=HOSTS)
    assert time.monotonic() - began < 30  # seconds, on a machine that does nothing else
    (line,) = str(caught.value).splitlines()
    return line


def test_who_changes_nothing_is_not_noticed(man: ManInTheMiddle) -> None:
    seen: set[str] = set()

    def look(message: Message) -> bytes:
        seen.add(message.greeting.purpose)
        return message.data

    man.attack = look
    results = run(steps, np=2, hosts=HOSTS)
    assert results[0] == results[1]
    assert results[0][0] == 2
    assert seen == {"store", "control", "data"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("from_caller", [True, False], ids=["up", "down"])
def test_a_control_message_ends_the_job_on_both_ranks(
    man: ManInTheMiddle, attack: Attack, from_caller: bool
) -> None:
    sender, receiver = (1, 0) if from_caller else (0, 1)
    man.attack = once(
        attack, lambda m: (m.greeting.purpose, m.from_caller, m.number) == ("control", from_caller, 9)
    )
    line = failure()
    assert f"a control message from rank {sender} (pid " in line
    assert f") to rank {receiver} was changed, replayed or lost in transit: message " in line


@pytest.mark.sample(1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_frame_to_the_rendezvous(man: ManInTheMiddle, attack: Attack) -> None:
    man.attack = once(attack, lambda m: m.greeting.source == 1 and b'/failed","forget"' in m.payload)
    assert "what rank 1 sent to the rendezvous was changed, replayed or lost in transit" in failure()


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_function_on_its_way_to_a_rank(man: ManInTheMiddle, attack: Attack) -> None:
    man.attack = once(
        attack, lambda m: (m.greeting.purpose, m.greeting.source) == ("store", 1) and not m.from_caller
    )
    assert "what the launcher sent to this process was changed" in failure()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_rank_s_question_for_the_function(man: ManInTheMiddle, attack: Attack) -> None:
    man.attack = once(attack, lambda m: m.greeting.source == 1 and b'"run/function"' in m.payload)
    assert "what rank 1 sent to the rendezvous was changed" in failure()


@pytest.mark.sample(1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_result_on_its_way_back(man: ManInTheMiddle, attack: Attack) -> None:
    man.attack = once(
        attack,
        lambda m: m.greeting.purpose == "store" and m.from_caller and b'"run/result"' in m.payload,
    )
    assert "sent to the rendezvous was changed, replayed or lost in transit" in failure()


# Objects: their bytes travel as those of tensors do


def put_in_place_of(old: bytes, new: bytes) -> Attack:
    assert len(old) == len(new)
    return lambda message: (
        message.data.replace(old, new) if message.greeting.purpose == "data" else message.data
    )


def test_a_pickle_in_place_of_another_is_not_run(man: ManInTheMiddle, tmp_path: Path) -> None:
    trace = tmp_path / "was here"
    word = cloudpickle.dumps("this is word 2" + 100 * ".")
    evil = f"cos\nsystem\n(Vtouch '{trace}'\ntR.".encode().ljust(len(word), b" ")
    pickle.loads(evil)
    assert trace.exists()  # so it would
    trace.unlink()
    man.attack = put_in_place_of(word, evil)
    line = failure()
    assert "broadcast_object: what rank 0 sent to rank 1 was changed, replayed or lost in transit" in line
    assert not trace.exists()


def test_an_earlier_object_in_place_of_a_later_one(man: ManInTheMiddle) -> None:
    man.attack = put_in_place_of(b"this is word 3", b"this is word 2")
    assert "broadcast_object: what rank 0 sent to rank 1 was changed, replayed or lost" in failure()


@pytest.mark.parametrize("sender", [0, 1])
def test_an_object_of_one_rank_among_those_of_all(man: ManInTheMiddle, sender: int) -> None:
    def attack(message: Message) -> bytes:
        of_sender = message.from_caller == (sender == 1) and message.greeting.purpose == "data"
        return message.data.replace(b"that is word 1", b"that is word 0") if of_sender else message.data

    man.attack = attack
    line = failure()
    assert f"allgather_object: what rank {sender} sent to rank {1 - sender} was changed" in line


def test_the_memory_of_a_large_array(man: ManInTheMiddle) -> None:
    assert run(large, np=2, hosts=HOSTS) == [7.0 * (1 << 18)] * 2
    man.attack = once(flipped, lambda m: m.greeting.purpose == "data" and len(m.data) > 60_000)
    assert "broadcast_object: what rank 0 sent to rank 1 was changed" in failure(large)


def exchange() -> Any:
    import numpy as np
    import polyhvd.numpy as hvd

    hvd.init()
    return hvd.alltoall(np.full(4, hvd.rank()), name="x").tolist()


def test_a_number_of_rows_that_no_rank_can_send_ends_an_alltoall(man: ManInTheMiddle) -> None:
    """The numbers of rows travel as tensors do, and become places in memory."""
    assert run(exchange, np=2, hosts=HOSTS) == [[0, 0, 1, 1]] * 2
    attack = put_in_place_of(struct.pack("<2q", 2, 2), struct.pack("<2q", 1 << 62, 2))
    man.attack = lambda message: attack(message) if message.from_caller else message.data
    line = f"data from rank 1 cannot be trusted: it announces {1 << 62} rows for rank 0, expected 0 to "
    assert line in failure(exchange)


# Hosts that come by themselves

IDLE = "import os, time\nos.write(1, b'working\\n')\nwhile True: time.sleep(0.05)\n"


def two_nodes(tmp_path: Path, attack: Attack, *options: str) -> list[tuple[int, str]]:
    """Status and last words of polyhvdrun on the first host and on the second."""
    (tmp_path / "train.py").write_text(IDLE)
    port = free_port()
    common = ["--nnodes", "2", "--start-timeout", "20", *options]
    command = [sys.executable, "-m", "polyhvd.launch", *common]
    program = [sys.executable, str(tmp_path / "train.py")]
    man = ManInTheMiddle()
    man.attack = attack
    started = []
    try:
        for number, reached in enumerate((port, man.before("127.0.0.1", port))):
            node = ["--node-rank", str(number), "--rdzv-endpoint", f"127.0.0.1:{reached}"]
            started.append(
                subprocess.Popen(
                    [*command, *node, *program],
                    cwd=ROOT,
                    env=environment(POLYHVD_SECRET=SECRET),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return [
            (node.returncode, err)
            for node, err in ((n, n.communicate(timeout=DEADLINE_S)[1]) for n in started)
        ]
    finally:
        for node in started:
            node.kill()
            node.communicate()
        man.close()


def kind_of(message: Message) -> int:
    return int(agent.split_frames(bytearray(message.payload))[0][0]) if message.payload else 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_an_agent_says_to_the_first_host(tmp_path: Path, attack: Attack) -> None:
    attack = once(attack, lambda m: m.from_caller and kind_of(m) == agent.STDOUT)
    (status, first), (other, second) = two_nodes(tmp_path, attack, "--heartbeat-timeout-s", "6")
    line = (
        f"what polyhvdrun on {socket.gethostname()} sent to this one was changed, replayed or lost in transit"
    )
    assert (status, other) == (1, 1)
    assert line in first, first
    assert line in second, second


@pytest.mark.sample(1)
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_the_first_host_says_to_an_agent(tmp_path: Path, attack: Attack) -> None:
    attack = once(attack, lambda m: not m.from_caller and kind_of(m) == agent.BEAT)
    (status, first), (other, second) = two_nodes(tmp_path, attack, "--heartbeat-timeout-s", "6")
    assert (status, other) == (1, 1)
    line = "what polyhvdrun on 127.0.0.1 sent to that on "
    assert line in first, first
    assert line in second, second
    assert "was changed, replayed or lost in transit" in second


def test_what_a_host_says_while_others_are_awaited(tmp_path: Path) -> None:
    man = ManInTheMiddle()
    man.attack = lambda message: message.data if kind_of(message) == agent.HELLO else flipped(message)
    names = ["a", "b", "c"]
    port = free_port()
    arrivals = Arrivals(bytes(32), names, "127.0.0.1", port, nonce="", version="1")
    reached = man.before("127.0.0.1", port)

    def come() -> None:
        connection, keys = reach("127.0.0.1", reached, 1, bytes(32), time.monotonic() + DEADLINE_S)
        signed = SignedStream(keys)
        hello = json.dumps({"name": "b", "slots": 1, "hosts": 3, "version": "1"}).encode()
        connection.sendall(signed.seal(agent.frame(agent.HELLO, -1, hello)))
        while 1 not in arrivals.arrived:
            time.sleep(0.01)
        connection.sendall(signed.seal(agent.frame(agent.BEAT, -1)))
        while connection.recv(1 << 16):  # until the result arrives
            pass
        connection.close()

    coming = threading.Thread(target=come)
    coming.start()
    with pytest.raises(TamperedError, match="what polyhvdrun on b sent to this one was changed"):
        arrivals.wait(time.monotonic() + DEADLINE_S)
    arrivals.close()
    arrivals.arrived[1].conclude({})
    coming.join(DEADLINE_S)
    man.close()


def test_how_a_host_introduces_itself(tmp_path: Path) -> None:
    attack = once(flipped, lambda m: m.from_caller and kind_of(m) == agent.HELLO)
    (status, first), (other, second) = two_nodes(tmp_path, attack)
    assert (status, other) == (1, 1)
    for words in (first, second):
        assert "what polyhvdrun on node 1 sent to this one was changed, replayed or lost in transit" in words
