"""Watching a job: ``hvd.metrics()``, the page of ``--metrics-port``, and ``polyhvd top``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, Launcher, assert_gone, below, pids, wait_until
from prometheus_client.parser import text_string_to_metric_families

from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job import control, top
from polyhvd.launch.job.endpoint import Endpoint
from polyhvd.launch.job.metrics import JobMetrics
from polyhvd.runtime.metrics import JOB_METRICS, METRICS, PREFIX, table

#: Reports often, so that no test waits.
OFTEN = {"POLYHVD_METRICS_INTERVAL_S": "0.2"}
#: Steps of two collectives, and rank 1 takes longer.
STEPS = (
    "import json, os, time\n"
    "import numpy as np\n"
    "import polyhvd.numpy as hvd\n"
    "hvd.init()\n"
    "os.write(1, b'pid %d\\n' % os.getpid())\n"
    "def step():\n"
    "    time.sleep(0.01 + 0.03 * hvd.rank())\n"
    "    for name in ('weight', 'bias'):\n"
    "        hvd.allreduce(np.ones(1000, np.float32), name=name)\n"
)
FOR_EVER = STEPS + "while True: step()\n"
ELASTIC = (
    STEPS + "state = hvd.elastic.ArrayState(steps=0)\n"
    "@hvd.elastic.run\n"
    "def train(state):\n"
    "    while True:\n"
    "        step()\n"
    "        state.commit()\n"
    "train(state)\n"
)

Samples = dict[tuple[str, str], float]


def url_of(launcher: Launcher) -> str:
    wait_until(lambda: b"/metrics" in _more(launcher), "the address of the page")
    found = re.search(rb"http://\S+/metrics", launcher.err)
    assert found
    return found[0].decode()


def _more(launcher: Launcher) -> bytes:
    assert launcher.process is not None
    launcher._read(launcher.process, time.monotonic() + 0.1)
    return launcher.err


def scrape(url: str) -> tuple[Samples, dict[str, str]]:
    """Samples by name and labels, and the type of each family; fails if the page is not valid."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    samples, kinds = {}, {}
    for family in text_string_to_metric_families(text):
        kinds[family.name] = family.type
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(sample.labels.get(name, "") for name in ("rank", "host", "generation"))
            samples[sample.name, labels] = sample.value
    return samples, kinds


def until(url: str, holds: Callable[[Samples], bool], what: str) -> Samples:
    found: Samples = {}

    def look() -> bool:
        found.clear()
        found.update(scrape(url)[0])
        return holds(found)

    wait_until(look, what)
    return found


def run_top(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyhvd.cli", "top", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_metrics_of_a_rank_have_the_names_and_units_of_the_table(launcher: Launcher) -> None:
    source = STEPS + (
        "began = time.monotonic()\n"
        "for _ in range(40): step()\n"
        "found = {**hvd.metrics(), 'elapsed': time.monotonic() - began}\n"
        "os.write(1, (json.dumps(found) + '\\n').encode())\n"
    )
    status, out, err = launcher.run("-np", "2", "--no-tag", source=source)
    assert status == 0, err
    fast, slow = sorted(
        (json.loads(line) for line in out.splitlines() if line.startswith("{")),
        key=lambda found: -found["wait_ratio"],
    )
    for found in (fast, slow):
        elapsed_s = found.pop("elapsed")
        assert [*found] == [metric.name for metric in METRICS if metric.name != "slow"]
        assert (
            found["steps_total"] == 38
        )  # the first one may have begun before, and the last one has not ended
        assert found["operations_total"] == 80
        assert found["cache_hits_total"] == 78
        assert 0.04 <= found["step_seconds"] < elapsed_s / 30
        assert 0 < found["bytes_per_second"] <= found["moved_bytes_total"] / elapsed_s * 1.5
        assert (found["ranks"], found["generation"], found["world_changes_total"]) == (2, 1, 0)
    assert fast["wait_ratio"] > slow["wait_ratio"]
    assert fast["wait_seconds_total"] > max(0.6, slow["wait_seconds_total"])
    assert fast["own_step_seconds"] < slow["own_step_seconds"]


def test_page_of_a_job_survives_a_frozen_rank_and_ends_with_polyhvdrun(launcher: Launcher) -> None:
    launcher.start("-np", "2", "--metrics-port", "0", source=FOR_EVER, env=OFTEN)
    url = url_of(launcher)
    ranks = pids(launcher.wait_for("pid ", 2))
    places = ("0,localhost,1", "1,localhost,1")
    until(
        url, lambda found: all(found.get(("polyhvd_steps_total", place), 0) > 0 for place in places), "steps"
    )
    samples, kinds = scrape(url)
    assert kinds == {
        **{f"{PREFIX}{metric.name}".removesuffix("_total"): metric.kind for metric in METRICS},
        **{PREFIX + name: "gauge" for name in JOB_METRICS},
    }
    assert samples["polyhvd_job_reporting_ranks", ",,"] == 2
    assert abs(samples["polyhvd_job_start_time_seconds", ",,"] - time.time()) < 60

    assert launcher.process is not None
    job = str(launcher.process.pid)
    done = run_top("--once", "--job", job)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^job {job}, for .*\nnow: runs 2 ranks", done.stdout)
    assert re.search(r"^ +1  localhost +1 +\d+ +[\d.]+ ms", done.stdout, re.MULTILINE)
    reports = json.loads(run_top("--json", "--job", job).stdout)["reports"]
    assert [(report["rank"], report["host"]) for report in reports] == [(0, "localhost"), (1, "localhost")]
    assert {PREFIX + name for name in reports[0]["values"]} <= {name for name, _ in samples}

    os.kill(ranks[1], signal.SIGSTOP)
    frozen = "polyhvd_report_age_seconds"
    until(url, lambda found: max(found[frozen, place] for place in places) > 1.0, "an old report")
    began = time.monotonic()
    assert scrape(url)[0]["polyhvd_steps_total", places[1]] > 0  # its last numbers
    assert time.monotonic() - began < 1.0
    os.kill(ranks[1], signal.SIGCONT)
    until(url, lambda found: max(found[frozen, place] for place in places) < 1.0, "a new report")

    left = below(launcher.process.pid)
    launcher.signal(signal.SIGKILL)
    launcher.process.wait()
    assert_gone(left)
    with pytest.raises(OSError, match="refused"):
        scrape(url)


def test_rank_that_is_frozen_before_its_first_report_is_missing_and_counted(launcher: Launcher) -> None:
    frozen = "if hvd.rank() == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
    source = "import signal\n" + STEPS.replace("def step", frozen + "def step") + "while True: step()\n"
    launcher.start("-np", "2", "--metrics-port", "0", source=source, env=OFTEN)
    url = url_of(launcher)

    def has_reports(number: int) -> Callable[[Samples], bool]:
        return lambda found: found["polyhvd_job_reporting_ranks", ",,"] == number

    samples = until(url, has_reports(1), "the report of rank 0")
    ranks = pids(launcher.wait_for("pid ", 2))
    assert samples["polyhvd_job_running_processes", ",,"] == 2
    assert ("polyhvd_ranks", "1,localhost,1") not in samples
    assert launcher.process is not None
    shown = run_top("--once", "--job", str(launcher.process.pid)).stdout
    assert shown.splitlines()[2] == "no report yet: rank 1"
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    until(url, has_reports(2), "both reports")
    os.kill(ranks[1], signal.SIGKILL)
    launcher.finish()


def test_page_of_an_elastic_job_follows_the_world(launcher: Launcher) -> None:
    launcher.start(
        "-np", "2", "--min-np", "1", "--spares", "1", "--metrics-port", "0", source=ELASTIC, env=OFTEN
    )
    url = url_of(launcher)
    ranks = pids(launcher.wait_for("pid ", 2))

    def are_there(generation: int) -> Callable[[Samples], bool]:
        places = [f"{rank},localhost,{generation}" for rank in range(2)]
        return lambda found: all(found.get(("polyhvd_steps_total", place), 0) > 0 for place in places)

    until(url, are_there(1), "both ranks")
    os.kill(ranks[0], signal.SIGKILL)
    samples = until(url, are_there(2), "both ranks of the next world")
    assert {place for name, place in samples if name == "polyhvd_slow"} == {"0,localhost,2", "1,localhost,2"}
    assert max(samples["polyhvd_world_changes_total", f"{rank},localhost,2"] for rank in range(2)) == 1
    launcher.signal(signal.SIGINT)
    launcher.finish()


def test_port_in_use_is_one_clear_line(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, out, err = launcher.run("-np", "2", "--metrics-port", str(port), source="print('no')")
    assert (status, out) == (1, "")
    assert err == (
        f"polyhvdrun: --metrics-port {port}: another process listens on port {port} of 127.0.0.1; choose "
        "another port, or 0 for any free one\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--metrics-port", "65536"), "expected a port from 0 to 65535, found 65536"),
        (("--metrics-port", "0", "--metrics-address", "192.0.2.1"), "Cannot assign requested address"),
        (("--metrics-port", "0", "--mpi"), "--metrics-port is not for --mpi"),
    ],
)
def test_address_that_cannot_be_had_is_refused(
    launcher: Launcher, options: tuple[str, ...], words: str
) -> None:
    status, _, err = launcher.run("-np", "2", *options, source="print('no')")
    assert status != 0
    assert words in err.splitlines()[-1]


def report(number: int, **words: Any) -> bytes:
    content = {
        "rank": number,
        "host": "0",
        "generation": 1,
        "values": {"steps_total": 3, "step_seconds": 0.5},
    }
    return json.dumps({**content, **words}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        report(0, values=[]),
        report(0, values={"steps_total": []}),
        report(0, host="7"),
        report(0, host="../x"),
        report(0, rank="a"),
        b"[" * 9999,
    ],
)
def test_invalid_report_is_ignored(data: bytes) -> None:
    metrics = JobMetrics({0, 1}, [Host("a", 2)])
    metrics.observe(1, report(1))
    metrics.observe(0, data)
    assert [found.rank for found in metrics.reports()] == [1]


def test_page_leaves_out_what_is_no_number_and_ranks_that_have_ended() -> None:
    running = {0, 1}
    metrics = JobMetrics(running, [Host('a"\\b', 2)])
    metrics.observe(
        0, b'{"rank": 0, "host": "0", "generation": 1, "values": {"steps_total": NaN, "evil": 1}}'
    )
    metrics.observe(1, report(1))
    metrics.observe(2, report(2))  # another's number
    families = {family.name: family for family in text_string_to_metric_families(metrics.page())}
    (sample,) = families["polyhvd_steps"].samples
    assert (sample.labels["rank"], sample.labels["host"], sample.value) == ("1", 'a"\\b', 3.0)
    assert len(families["polyhvd_report_age_seconds"].samples) == 2
    running.clear()
    assert [
        family for family in text_string_to_metric_families(metrics.page()) if family.name.endswith("ranks")
    ][-1].samples[0].value == 0


def test_hostile_clients_do_not_keep_others_from_the_page() -> None:
    endpoint = Endpoint("127.0.0.1", 0, lambda: "a 1\n")
    address = re.fullmatch(r"http://(.*):(\d+)/metrics", endpoint.url)
    assert address
    clients = [socket.create_connection((address[1], int(address[2]))) for _ in range(40)]
    try:
        for number, client in enumerate(clients):
            with contextlib.suppress(OSError):  # the oldest have been ended
                client.sendall((b"", b"GET /metrics HTTP/1.1\r\nSlow: 1")[number % 2])
        with socket.create_connection((address[1], int(address[2]))) as garbage, contextlib.suppress(OSError):
            garbage.sendall(bytes(70_000))
        for _ in range(5):
            with urllib.request.urlopen(endpoint.url, timeout=5) as answer:
                assert answer.read() == b"a 1\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(endpoint.url.removesuffix("metrics"), timeout=5)
    finally:
        for client in clients:
            client.close()
        endpoint.close()


def test_top_refuses_invalid_answers_and_shows_no_control_characters() -> None:
    head = {
        "job": 7,
        "elastic": False,
        "command": "a\x1b[2J",
        "started": 0.0,
        "sentence": "runs",
        "since": None,
    }
    found: dict[str, Any] = {**head, "reason": "", "until": None, "slots": [], "reports": []}
    assert top.page(7, found, 1.0)[0] == "job 7, for 1 s: a\\x1b[2J"
    row = {
        "rank": 0,
        "host": "\x1b]0;x",
        "generation": 1,
        "age_s": 99.0,
        "interval_s": 2.0,
        "values": {"slow": 1, "steps_total": 4},
    }
    *_, last = top.page(7, {**found, "reports": [row]}, 1.0)
    assert "\x1b" not in last
    assert last.endswith("slow, no report for 99 s")
    *_, rare = top.page(7, {**found, "reports": [{**row, "interval_s": 60.0}]}, 1.0)  # of 12,000 ranks
    assert rare.endswith("slow")
    for bad in ({**row, "values": 1}, {**row, "rank": "x"}, {**row, "values": {"slow": []}}, 5):
        with pytest.raises(OSError, match="job 7 has sent an invalid answer"):
            top.page(7, {**found, "reports": [bad]}, 1.0)


def test_top_shows_both_jobs_of_a_host(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Launcher(tmp_path)
    try:
        for each in (launcher, other):
            each.start("-np", "1", source="import time; print('up', flush=True); time.sleep(600)")
        for each in (launcher, other):
            each.wait_for("up", 1)
        own = [each.process.pid for each in (launcher, other) if each.process is not None]
        monkeypatch.setattr(control, "jobs", lambda **_: own)  # and not those of other tests
        assert top.main(["--once"]) == 0
        shown = capsys.readouterr().out
        assert [f"job {pid}, for " in shown for pid in own] == [True, True]
    finally:
        if other.process is not None:
            other.process.kill()
            other.process.communicate()


def test_live_page_is_drawn_on_a_terminal(launcher: Launcher) -> None:
    import pty

    launcher.start("-np", "2", source=FOR_EVER, env=OFTEN)
    launcher.wait_for("pid ", 2)
    assert launcher.process is not None
    terminal, its_end = pty.openpty()
    words = [
        sys.executable,
        "-m",
        "polyhvd.cli",
        "top",
        "--job",
        str(launcher.process.pid),
        "--interval-s",
        "0.2",
    ]
    shown = subprocess.Popen(
        words, stdout=its_end, stderr=its_end, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(its_end)
    text = ""

    def has_row() -> bool:
        nonlocal text
        text += os.read(terminal, 65536).decode(errors="replace")
        return re.search(r"localhost.*%", text) is not None

    wait_until(has_row, "a row")
    shown.send_signal(signal.SIGINT)
    wait_until(lambda: _drained(terminal) or shown.poll() is not None, "its end")
    assert shown.wait(20) == 0
    os.close(terminal)


def _drained(terminal: int) -> bool:
    import select

    if select.select([terminal], [], [], 0)[0]:
        try:
            os.read(terminal, 65536)
        except OSError:
            return True
    return False


def test_document_has_the_table_of_metrics() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    assert "\n".join(table()) in page, "python -m polyhvd.runtime.metrics makes it"


def test_dashboard_queries_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text())
    known = {PREFIX + metric.name for metric in METRICS} | {PREFIX + name for name in JOB_METRICS}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [item["query"]["query"] for item in dashboard["templating"]["list"] if item["type"] == "query"]
    assert len(queries) > 8
    for query in queries:
        names = set(re.findall(r"\bpolyhvd_\w+", query))
        assert names, query
        assert names <= known, query
    (source,) = (item["name"] for item in dashboard["templating"]["list"] if item["type"] == "datasource")
    of_prometheus = {"type": "prometheus", "uid": f"${{{source}}}"}
    readers = [item for item in dashboard["templating"]["list"] if item["type"] == "query"]
    assert all(each["datasource"] == of_prometheus for each in [*dashboard["panels"], *readers])
    variables = {item["name"] for item in dashboard["templating"]["list"]}
    assert {*re.findall(r"\$\{?(\w+)", json.dumps(dashboard))} - {"__all"} <= variables
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len({*places}) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_counters_of_the_table_end_in_total_and_names_are_in_base_units() -> None:
    names = [metric.name for metric in METRICS]
    assert len({*names}) == len(names)
    for name in [*names, *JOB_METRICS]:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name)
        assert not re.search(r"_(ms|us|milli|micro|kilo|mega|bytes_total_|count)", name)
