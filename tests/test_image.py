"""The Dockerfile as tools/image.py reads it; `make image` builds the image, which takes minutes."""

from __future__ import annotations

import importlib.util
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
    assert {word for word, _ in steps} <= {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD"}


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
