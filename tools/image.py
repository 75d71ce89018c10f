"""The steps of the Dockerfile on a machine without Docker, and what its image weighs and can do.

Debian's base is made by debootstrap, without what Debian leaves out of its slim image; each stage is a folder
below build/image, and each RUN a shell in it. Needs root and debootstrap, and takes some minutes.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "image"
BYTES_MAX = 150_000_000
_BASE = "debian:bookworm-slim"  # the default of the Dockerfile's BASE
#: https://github.com/debuerreotype/debuerreotype/blob/master/scripts/.slimify-excludes
_SLIM = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
#: Of this machine's, for its way to the registries; no part of the image.
_PASSED_ON = re.compile(r"(https?|no)_proxy|PIP_INDEX_URL", re.IGNORECASE)
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_ENTER = """
mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; mount -t tmpfs shm "$1/dev/shm"
mount -t tmpfs run "$1/run"
[ -e "$1/etc/resolv.conf" ] || touch "$1/etc/resolv.conf"
mount --bind /etc/resolv.conf "$1/etc/resolv.conf"
[ ! -e "$2" ] || cp "$2" "$1/run/certificates"
root=$1; shift 2; exec chroot "$@"
"""
#: What is claimed of the image, and the commands that fail if it is not so.
_CHECKS = {
    "is not root": "test $(id -u) = 1000",
    "has no compiler": "! command -v gcc g++ cc pip",
    "runs a job": "polyhvdrun -np 2 python -c 'import numpy as np, polyhvd.numpy as hvd; hvd.init(); "
    'assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == 3 * [hvd.size()]; print(hvd.size(), "ranks")\'',
}


@dataclass
class Stage:
    """A file system that is being made, and how commands run in it."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    folder: str = "/"
    command: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)  # of ARG: for RUN, and not in the image

    def run(self, command: str) -> None:
        """Run a shell command in it; raises CalledProcessError."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        passed_on = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
        if _CERTIFICATES.exists():
            passed_on["PIP_CERT"] = "/run/certificates"
        env = {
            "PATH": path,
            "HOME": self._home(),
            "DEBIAN_FRONTEND": "noninteractive",
            **passed_on,
            **self.arguments,
            **self.env,
        }
        inside = ["env", "-i", *(f"{name}={value}" for name, value in env.items())]
        inside += ["sh", "-c", f'cd {shlex.quote(self.folder)} && exec sh -c "$1"', "sh", command]
        chroot = [f"--userspec={self.user}:{self.user}", "--groups=", str(self.root), *inside]
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        enter = ["sh", "-ec", _ENTER, "enter", str(self.root), str(_CERTIFICATES), *chroot]
        subprocess.run([*unshare, *enter], stdin=subprocess.DEVNULL, check=True)

    def _home(self) -> str:
        rows = [line.split(":") for line in (self.root / "etc/passwd").read_text().splitlines()]
        return next((row[5] for row in rows if row[2] == self.user), "/")

    def copy(self, source: Path, target: str) -> None:
        """Copy a file, or what is in a folder."""
        into = self.root / (target if target.startswith("/") else f"{self.folder}/{target}").lstrip("/")
        if source.is_dir():
            into.mkdir(parents=True, exist_ok=True)
            words = [f"{source}/.", f"{into}/"]
        else:
            words = [str(source), f"{into}/" if target.endswith(("/", ".")) else str(into)]
        subprocess.run(["cp", "-a", *words], check=True)


def read(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with what stands behind each."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0].upper(), line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def build(instructions: list[tuple[str, str]], base: Path, context: Path) -> Stage:
    """Carry them out; the last stage."""
    stages: dict[str, Stage] = {}
    stage = Stage(base)
    for word, rest in instructions:
        print(f"== {word} {rest[:100]}", flush=True)
        if word == "ARG":
            name, _, default = rest.partition("=")
            stage.arguments[name] = default
        elif word == "FROM":
            name, _, alias = rest.replace("${BASE}", _BASE).partition(" AS ")
            origin = stages[name] if name in stages else Stage(base)
            if name not in (_BASE, *stages):
                raise SystemExit(f"FROM {name}: only {_BASE} and stages before can be made here")
            stage = Stage(FOLDER / f"stage{len(stages)}", dict(origin.env), origin.user, origin.folder)
            shutil.rmtree(stage.root, ignore_errors=True)
            subprocess.run(["cp", "-a", "--reflink=auto", str(origin.root), str(stage.root)], check=True)
            stages[alias or str(len(stages))] = stage
        elif word == "RUN":
            stage.run(rest)
        elif word == "COPY":
            *options, source, target = rest.split()
            if not options:
                stage.copy(context / source, target)
            else:
                stage.copy(stages[options[0].removeprefix("--from=")].root / source.lstrip("/"), target)
        elif word == "ENV":
            stage.env |= dict(item.split("=", 1) for item in shlex.split(rest))
        elif word == "USER":
            stage.user = rest
        elif word == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "CMD":
            stage.command = json.loads(rest)
        else:
            raise SystemExit(f"{word}: this instruction is not known here")
    return stage


def make_base() -> Path:
    """Debian's slim image, or what is as good: kept for the next time."""
    base, unfinished = FOLDER / "base", FOLDER / "base.unfinished"
    if base.exists():
        return base
    shutil.rmtree(unfinished, ignore_errors=True)
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(unfinished)], check=True)
    rules = "".join(f"path-exclude /usr/share/{name}/*\n" for name in _SLIM)
    rules += "path-include /usr/share/doc/*/copyright\n"
    (unfinished / "etc/dpkg/dpkg.cfg.d/docker").write_text(rules)
    for name in _SLIM:
        for path in (unfinished / "usr/share" / name).rglob("*"):
            if path.name != "copyright" and not path.is_dir():
                path.unlink()
    for name in ("var/cache/apt", "var/lib/apt/lists", "var/log", "var/cache/debconf"):
        for path in (unfinished / name).rglob("*"):
            if not path.is_dir():
                path.unlink()
    unfinished.rename(base)
    return base


def make_context(ignored: str) -> Path:
    """A copy of what a builder would be sent: this folder less what .dockerignore says."""
    context = FOLDER / "context"
    shutil.rmtree(context, ignore_errors=True)
    rules = [line for line in ignored.splitlines() if line and line[0] != "#"]
    skipped = {".git", ".venv", "build"}
    for top, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            path = Path(top, name).relative_to(ROOT)
            if not is_ignored(path, rules):
                (context / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, context / path)
    return context


def is_ignored(path: Path, rules: list[str]) -> bool:
    """The last rule that matches the path, or a folder above it, decides."""
    ignored = False
    places = [str(path), *map(str, path.parents)]
    for rule in rules:
        pattern = rule.removeprefix("!").removeprefix("**/")
        # In these rules a star does not reach into folders, but a folder takes along what is in it.
        found = any(
            fnmatch.fnmatch(place.rpartition("/")[2] if "**/" in rule else place, pattern) for place in places
        )
        if found:
            ignored = not rule.startswith("!")
    return ignored


def weigh(root: Path) -> int:
    """Bytes of all files, a file with two names counted twice, as builders do."""
    return sum(os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(root) for name in names)


def main() -> int:
    """Build, check and weigh."""
    began = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    context = make_context((ROOT / ".dockerignore").read_text())
    stage = build(read((ROOT / "Dockerfile").read_text()), make_base(), context)
    for claim, command in _CHECKS.items():
        try:
            stage.run(command)
        except subprocess.CalledProcessError as error:
            said = f"{command!r} ended with {error.returncode}"
            print(f"image: that it {claim} is not so: {said}", file=sys.stderr)
            return 1
    stage.run(shlex.join(stage.command))
    size = weigh(stage.root)
    print(f"image: {size / 1e6:.0f} MB at {stage.root}, after {time.monotonic() - began:.0f} s")
    if size > BYTES_MAX:
        print(f"image: it is to be under {BYTES_MAX / 1e6:.0f} MB", file=sys.stderr)
    return int(size > BYTES_MAX)


if __name__ == "__main__":
    raise SystemExit(main())
