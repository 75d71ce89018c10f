"""The Dockerfile as tools/image.py reads it; `make image` builds the image, which takes minutes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("image", ROOT / "tools" / "image.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "image", module)
    spec.loader.exec_module(module)
    return module


def test_a_user_who_is_not_root_comes_last_and_compilers_stay_behind(image: ModuleType) -> None:
    steps = image.read((ROOT / "Dockerfile").read_text())
    last = max(number for number, (word, _) in enumerate(steps) if word == "FROM")
    assert [rest for word, rest in steps if word == "USER"] == ["1000"]
    assert "g++" in " ".join(rest for _, rest in steps[:last])
    assert "g++" not in " ".join(rest for _, rest in steps[last:])
    assert {word for word, _ in steps} <= {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD", "ARG"}


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ((), "docker build -t polyhvd:latest  ."),
        (("FRAMEWORK=torch",), "docker build -t polyhvd:torch --build-arg FRAMEWORK=torch   ."),
        (
            ("FRAMEWORK=jax", "BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04"),
            "docker build -t polyhvd:jax-cuda --build-arg FRAMEWORK=jax --build-arg "
            "BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 .",
        ),
        (
            ("BASE=ubuntu:24.04", "SUFFIX=ubuntu"),
            "docker build -t polyhvd:ubuntu --build-arg BASE=ubuntu:24.04 .",
        ),
    ],
)
def test_make_image_has_a_tag_for_each_framework_and_base(variables: tuple[str, ...], command: str) -> None:
    words = ["make", "-n", "-s", "image", "IMAGE_BUILDER=docker", *variables]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == command.split()


@pytest.mark.parametrize(
    ("framework", "packages"), [("", ""), ("torch", ""), ("mxnet", "libgomp1 libquadmath0")]
)
def test_an_image_with_mxnet_has_the_libraries_that_it_needs(
    image: ModuleType, framework: str, packages: str
) -> None:
    runs = [rest for word, rest in image.read((ROOT / "Dockerfile").read_text()) if word == "RUN"]
    (found,) = (rest for rest in runs if "libgomp1" in rest)
    apt = found.partition("&& rm -rf")[0].replace("apt-get", "echo")
    done = subprocess.run(
        ["sh", "-c", apt], env={"FRAMEWORK": framework}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].partition("python3-numpy")[2].strip() == packages


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("setup.py", False),
        ("polyhvd/csrc/engine/engine.cc", False),
        ("frameworks/torch/adapter.py", False),
        ("docs/elastic.md", False),
        ("polyhvd/_core.cpython-311-x86_64-linux-gnu.so", True),
        ("polyhvd/launch/__pycache__/cli.cpython-311.pyc", True),
        ("tests/test_image.py", True),
        ("build/objects/a.o", True),
        (".git/config", True),
    ],
)
def test_a_builder_is_sent_what_the_image_is_made_of(image: ModuleType, path: str, ignored: bool) -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    assert image.is_ignored(Path(path), [rule for rule in rules if rule and rule[0] != "#"]) == ignored
