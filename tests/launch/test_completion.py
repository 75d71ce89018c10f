"""Completion of polyhvdrun's command lines, in shells on terminals of their own."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import DEADLINE_S

pytest.importorskip("shtab")

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "PS1='ready'$'> '; source ./script"),
    "zsh": (
        ["zsh", "-f", "-i"],
        "PROMPT='ready'$'> '; fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D",
    ),
}


def script_of(shell: str, program: str = "polyhvd.launch") -> str:
    command = [sys.executable, "-m", program, "--print-completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Terminal:
    """An interactive shell."""

    def __init__(self, shell: str, folder: Path) -> None:
        argv, first = SHELLS[shell]
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.chdir(folder)
            os.execvpe(argv[0], argv, {**os.environ, "TERM": "dumb", "HOME": str(folder)})
        self.said = ""
        self.type(first + "\n")
        self.expect("ready> ")

    def type(self, keys: str) -> None:
        self.said = ""
        os.write(self._terminal, keys.encode())

    def expect(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.said:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {text!r}: {self.said!r}"
            if select.select([self._terminal], [], [], left_s)[0]:
                self.said += os.read(self._terminal, 1 << 16).decode(errors="replace").replace("\r", "")

    def close(self) -> None:
        os.kill(self._process, 9)
        os.waitpid(self._process, 0)
        os.close(self._terminal)


@pytest.fixture(scope="module", params=SHELLS)
def terminal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param}")
    folder = tmp_path_factory.mktemp("folder")
    (folder / "_polyhvdrun").write_text(script_of(request.param))
    (folder / "_polyhvd").write_text(script_of(request.param, "polyhvd.cli"))
    (folder / "script").write_text("source ./_polyhvdrun; source ./_polyhvd\n")
    (folder / "train_it.py").touch()
    (folder / "hosts_of_mine").touch()
    (folder / "a_program_of_mine").touch(0o755)
    terminal = Terminal(request.param, folder)
    yield terminal
    terminal.close()


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("--max-rest", "--max-restarts "),
        ("--hostfile hos", "--hostfile hosts_of_mine "),
        ("-np 2 -x A=B --prefix", "-np 2 -x A=B --prefix-output-with-timestamp "),
        ("-H h1:4,h2:2 -x PATH=a:b --prefix", "--prefix-output-with-timestamp "),
        ("-np 2 python train", "-np 2 python train_it.py "),
        ("-np 2 --no-tag --start-timeout=4 python train", "4 python train_it.py "),
        ("-np 2 -- python train", "-- python train_it.py "),
        ("-np 2 shuf train", "shuf train_it.py "),
        ("-np 2 readlin", "-np 2 readlink"),
        ("-np 2 ./a_pro", "-np 2 ./a_program_of_mine "),
    ],
)
def test_options_files_and_the_program_s_words_are_completed(
    terminal: Terminal, typed: str, completed: str
) -> None:
    terminal.type(f"polyhvdrun {typed}\t")
    terminal.expect(completed)
    terminal.type("\x15\n")  # drop this line
    terminal.expect("ready> ")


def test_commands_of_polyhvd_and_their_options_are_completed(terminal: Terminal) -> None:
    for typed, completed in (
        ("stat", "status "),
        ("status --tim", "status --timeout-s "),
        ("doctor --hostf", "doctor --hostfile "),
        ("leave --no", "leave --no-wait "),
        ("parity --jun", "--junit "),
        ("bench --warm", "bench --warm-up "),
    ):
        terminal.type(f"polyhvd {typed}\t")
        terminal.expect(completed)
        terminal.type("\x15\n")  # drop this line
        terminal.expect("ready> ")


@pytest.mark.parametrize("shell", SHELLS)
def test_what_help_does_not_show_is_not_completed(shell: str) -> None:
    script = script_of(shell)
    assert "--max-restarts" in script
    assert "--hierarchical-allgather" not in script


def test_a_shell_that_there_is_no_script_for_is_named() -> None:
    for program, said in (("polyhvd.launch", "polyhvdrun: "), ("polyhvd.cli", "polyhvd: error: ")):
        command = [sys.executable, "-m", program, "--print-completion", "fish"]
        done = subprocess.run(command, capture_output=True, text=True)
        expected = f"{said}--print-completion fish: expected one of bash, zsh, found fish"
        assert (done.returncode, done.stderr.splitlines()[-1]) == (2, expected)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m polyhvd.launch --print-completion bash | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
