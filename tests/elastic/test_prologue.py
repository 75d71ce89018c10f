"""Collectives between init() and the first elastic function, in a process that joins a running job."""

from __future__ import annotations

import re

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

#: What a script does before it trains, by framework, and how it adds a number to its weights on all ranks.
PROLOGUES = {
    "numpy": """
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
weights = np.full(3, 1.0 + hvd.rank())
hvd.broadcast_parameters({"weights": weights}, root_rank=0)
own = hvd.broadcast(np.full(2, 7.0 + is_joining), 0)
assert own.tolist() == [7.0 + is_joining] * 2
state = hvd.elastic.ArrayState(weights=weights, step=0, full=0)
def add(number):
    state.weights += hvd.allreduce(np.full(3, number), name="gradient")
def total():
    return float(state.weights.sum())
""",
    "torch": """
import polyhvd.torch as hvd
import torch
hvd.init()
model = torch.nn.Linear(3, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0 + hvd.rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank()), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
own = hvd.synchronize(hvd.broadcast_async(torch.full((2,), 7.0 + is_joining), 0))
assert own.tolist() == [7.0 + is_joining] * 2
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, full=0)
def add(number):
    optimizer.zero_grad()
    (model(torch.ones(1, 3)).sum() * number).backward()
    optimizer.step()
def total():
    return model.weight.sum().item()
""",
    "tensorflow": """
import tensorflow as tf
import polyhvd.tensorflow as hvd
hvd.init()
weights = tf.Variable(tf.fill([3], 1.0 + hvd.rank()))
hvd.broadcast_variables([weights], root_rank=0)
graph = tf.function(lambda value: hvd.broadcast(value, 0))
assert graph(tf.fill([2], 7.0 + is_joining)).numpy().tolist() == [7.0 + is_joining] * 2
state = hvd.elastic.TensorFlowState([weights], step=0, full=0)
def add(number):
    weights.assign_add(hvd.allreduce(tf.fill([3], float(number))))
def total():
    return float(tf.reduce_sum(weights))
""",
    "mxnet": """
import polyhvd.mxnet as hvd
import mxnet as mx
hvd.init()
net = mx.gluon.nn.Dense(1, in_units=3, use_bias=False)
net.initialize(mx.init.Constant(1.0 + hvd.rank()))
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
own = hvd.broadcast(mx.nd.full((2,), 7.0 + is_joining), 0)
hvd.broadcast_(mx.nd.ones(100000), 0)
state = hvd.elastic.GluonState(net, trainer, step=0, full=0)
def add(number):
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 3))).sum() * number
    loss.backward()
    trainer.step(1)
def total():
    return float(net.weight.data().asnumpy().sum())
assert own.asnumpy().tolist() == [7.0 + is_joining] * 2
""",
}

TRAINING = """
seed = hvd.broadcast_object({"seed": os.getpid()}, root_rank=0, name="seed")["seed"]
words = [hvd.broadcast_object(f"{word} {os.getpid()}") for word in "ab"]
ranks = hvd.allgather_object((hvd.rank(), seed))
hvd.barrier()
failed = os.path.join(os.path.dirname(__file__), "failed")
def fail(text):
    with open(failed + ".new", "w") as file:
        file.write(text)
    os.rename(failed + ".new", failed)
EXTRA
made = 0

@hvd.elastic.run
def train(state):
    global made
    if not is_joining and state.step == 0:
        os.write(1, b"training\\n")
    while state.full < 3:
        time.sleep(0.02)
        add(state.step % 3)
        made += 1
        state.step += 1
        state.full += any(hvd.allgather_object(READY))
        COMMIT

train(state)
words = [word.split()[0] if word.endswith(f" {seed}") else word for word in words]
print("end", words, ranks == [(0, seed), (1, seed)], total(), "of", state.step, flush=True)
print("undone", 0 if is_joining else made - state.step, flush=True)
"""

BEGIN = "import os, signal, sys, time\nis_joining = 'POLYHVD_RANK' not in os.environ\n"


def start(
    launcher: Launcher,
    *options: str,
    framework: str = "numpy",
    first: str = "",
    extra: str = "",
    ready: str = "hvd.size() == 3",
    commit: str = "state.commit()",
) -> None:
    """Start a job on two slots of this host, and give it a third when it trains.

    Args:
        launcher: of the test.
        options: further ones.
        framework: whose script it is.
        first: what the script does before ``init()``.
        extra: the end of what the script does before it trains.
        ready: when it makes its last three steps.
        commit: the end of each step.
    """
    hosts = launcher._folder / "hosts"
    hosts.write_text("localhost slots=2\n")
    training = TRAINING.replace("EXTRA", extra).replace("READY", ready).replace("COMMIT", commit)
    source = BEGIN + first + PROLOGUES[framework] + training
    command = [*launcher.python(framework), launcher.script(source)]
    variables = ("-x", "CUDA_VISIBLE_DEVICES=-1", "-x", "TF_CPP_MIN_LOG_LEVEL=3")
    sizes = ("-np", "2", "--min-np", "2", "--max-np", "3")
    launcher.start("--hostfile", str(hosts), *sizes, *variables, *options, argv=command)
    launcher.wait_for("training", 2)
    new = launcher._folder / "hosts.new"
    new.write_text("localhost slots=3\n")
    new.rename(hosts)


def ends(launcher: Launcher) -> tuple[list[str], list[int], str]:
    """The ranks' results, how many steps each has made in vain, and the launcher's output."""
    status, out, err = launcher.finish()
    assert status == 0, f"{out}\n{err}"
    return re.findall(r"end .*", out), [int(number) for number in re.findall(r"undone (\d+)", out)], err


@pytest.mark.parametrize(
    "framework",
    [
        "numpy",
        *(
            pytest.param(
                name,
                marks=[
                    pytest.mark.slow,
                    pytest.mark.skipif(not is_installed(name), reason=f"{name} is not installed"),
                ],
            )
            for name in ("torch", "tensorflow", "mxnet")
        ),
    ],
)
def test_new_process_passes_the_collectives_before_its_function_and_trains_with_the_others(
    launcher: Launcher, framework: str
) -> None:
    start(launcher, framework=framework)
    found, undone, _ = ends(launcher)
    assert undone == [0, 0, 0]
    assert found == 3 * found[:1]
    assert found[0].startswith("end ['a', 'b'] True ")


def test_results_are_those_of_the_first_world_where_rank_0_is_lost(launcher: Launcher) -> None:
    die = "if hvd.rank() == 0 and not is_joining:\n    os.environ['DIES'] = '1'\n"
    add = "original = add\ndef add(number):\n    if 'DIES' in os.environ and state.step == 5:\n"
    add += "        os.kill(os.getpid(), signal.SIGKILL)\n    original(number)\n"
    start(launcher, extra=die + add)
    found, _, err = ends(launcher)
    assert found == 3 * found[:1]
    assert found[0].startswith("end ['a', 'b'] True ")
    assert "process 0 on localhost was killed by SIGKILL; the job continues" in err


def test_results_are_those_of_the_processes_that_began_again_where_all_were_lost(launcher: Launcher) -> None:
    add = """
original = add
def total():
    return seed
def add(number):
    is_second = is_joining and hvd.rank() == 1 and not os.path.exists(failed)
    if state.step == 5 and is_second:
        fail("")  # another process joins those that have begun again
    if state.step == 5 and (is_second or not is_joining):
        os.kill(os.getpid(), signal.SIGKILL)
    original(number)
"""
    ready = "os.path.exists(failed) and hvd.size() == 3"
    start(launcher, "--on-state-lost", "restart", extra=add, ready=ready)
    found, _, err = ends(launcher)
    assert found == 3 * found[:1], err
    assert found[0].startswith("end ['a', 'b'] True ")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("hvd.allreduce(np.ones(2), name='before')", "allreduce 'before' at script1.py:"),
        ("hvd.allgather(np.ones(2))", "allgather 'allgather.noname' at script1.py:"),
        ("hvd.add_process_set([0])", "pass the process set to init(process_sets=[...])"),
        ("hvd.broadcast_object(1, name=f'name {is_joining}')", "they have made 0 such calls"),
        ("hvd.broadcast_object(bytes(2 << 20))", "it has more than 1048576 bytes"),
    ],
)
def test_call_whose_result_a_new_process_cannot_have_fails_there_and_costs_the_others_nothing(
    launcher: Launcher, call: str, error: str
) -> None:
    extra = f"""
try:
    {call}
except hvd.InvalidArgumentError as error:
    fail(str(error))
    raise
"""
    start(launcher, extra=extra, ready="os.path.exists(failed) and hvd.size() == 2")
    found, undone, err = ends(launcher)
    assert found == 2 * found[:1]
    assert undone == [0, 0]
    assert error in (launcher._folder / "failed").read_text()
    assert "process 2 on localhost exited with status 1 before its elastic function; the job continues" in err
    assert "process 3" not in err, "it would fail as well"


def test_new_process_that_fails_before_init_costs_the_others_nothing(launcher: Launcher) -> None:
    first = "if is_joining and not os.path.exists(__file__ + '.failed'):\n"
    first += "    open(__file__ + '.failed', 'w').close()\n    raise LookupError('no data')\n"
    start(launcher, first=first)
    found, undone, err = ends(launcher)
    assert found == 3 * found[:1]
    assert undone == [0, 0, 0]
    line = (
        "process 2 on localhost exited with status 1 before its elastic function; the job continues without"
    )
    assert err.count(line) == 1


@pytest.mark.parametrize(
    "commit", ["state.commit()", "state.commit() if state.step == 1 else state.check_host_updates()"]
)
def test_new_process_that_is_killed_before_its_function_undoes_no_step(
    launcher: Launcher, commit: str
) -> None:
    extra = "if is_joining and not os.path.exists(failed):\n"
    extra += "    fail('')\n    os.kill(os.getpid(), signal.SIGKILL)"
    start(launcher, extra=extra, commit=commit)
    found, undone, err = ends(launcher)
    assert found == 3 * found[:1]
    assert undone == [0, 0, 0]
    assert "process 2 on localhost was killed by SIGKILL; the job continues" in err


def test_loss_of_another_rank_meanwhile_is_seen_in_the_function_of_the_new_process(
    launcher: Launcher,
) -> None:
    extra = """
if is_joining and not os.path.exists(failed):
    fail("")
    other = int(open(os.path.join(os.path.dirname(failed), "other")).read())
    os.kill(other, signal.SIGKILL)
    hvd.broadcast_parameters({"weights": weights}, root_rank=0)
elif hvd.rank() == 1:
    with open(os.path.join(os.path.dirname(failed), "other"), "w") as file:
        file.write(str(os.getpid()))
"""
    start(launcher, extra=extra)
    found, undone, err = ends(launcher)
    assert found == 3 * found[:1]
    assert undone == [0, 0, 0]
    assert "process 1 on localhost was killed by SIGKILL; the job continues" in err


def test_new_process_that_skips_a_function_passes_what_follows_it_up_to_that_of_the_others(
    launcher: Launcher,
) -> None:
    between = """
hvd.broadcast_parameters({"weights": state.weights}, root_rank=0)
hvd.barrier()
if is_joining:
    try:
        hvd.broadcast_object("other")
    except hvd.InvalidArgumentError as error:
        assert "recorded only before the first elastic function" in str(error), error
else:
    hvd.broadcast_object("other")
"""
    first = "@hvd.elastic.run\ndef warm_up(state):\n    add(1)\n    state.commit()\n\nwarm_up(state)"
    start(launcher, extra=first + between)
    found, undone, _ = ends(launcher)
    assert found == 3 * found[:1]
    assert undone == [0, 0, 0]


@pytest.mark.slow
def test_new_process_that_never_comes_to_its_function_is_given_up(launcher: Launcher) -> None:
    extra = "if is_joining:\n    fail('')\n    time.sleep(600)"
    ready = "os.path.exists(failed) and hvd.size() == 2"
    start(launcher, "--elastic-timeout", "1", extra=extra, ready=ready)
    found, undone, err = ends(launcher)
    assert found == 2 * found[:1]
    assert undone == [0, 0]
    assert "process 2 on localhost has not reached its elastic function within 10 s" in err
