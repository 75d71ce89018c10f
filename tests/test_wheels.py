"""The parts of tools/wheels.py that compile nothing; `make wheels` builds and checks the wheels."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "tools" / "wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "wheels", module)
    spec.loader.exec_module(module)
    return module


def write_headers(folder: Path, version: str, config: str = "") -> Path:
    folder.mkdir(parents=True)
    major, minor = version.split(".")
    (folder / "Python.h").touch()
    (folder / "pyconfig.h").write_text(config)
    (folder / "patchlevel.h").write_text(
        f"#define PY_MAJOR_VERSION {major}\n#define PY_MINOR_VERSION\t{minor}\n"
    )
    return folder


def test_given_headers_are_found_by_their_version_before_installed_ones(
    wheels: ModuleType, tmp_path: Path
) -> None:
    write_headers(tmp_path / "a" / "include", "3.9")
    mine = write_headers(
        tmp_path / "b" / "include" / "python", f"{sys.version_info[0]}.{sys.version_info[1]}"
    )
    assert wheels.find_headers("3.9", [tmp_path]) == tmp_path / "a" / "include"
    assert wheels.find_headers(wheels.version_of(mine), [tmp_path]) == mine


def test_headers_of_a_debug_or_free_threaded_python_are_not_used(wheels: ModuleType, tmp_path: Path) -> None:
    write_headers(tmp_path / "a", "3.1", "#define Py_GIL_DISABLED 1\n")
    write_headers(tmp_path / "b", "3.1", "/* debug */\n#define Py_DEBUG 1\n")
    assert wheels.find_headers("3.1", [tmp_path]) is None
    usual = write_headers(tmp_path / "c", "3.1", "/* #undef Py_GIL_DISABLED */\n")
    assert wheels.find_headers("3.1", [tmp_path]) == usual


def test_the_suffix_for_this_python_is_the_one_it_imports(wheels: ModuleType, tmp_path: Path) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    platform = wheels.PLATFORMS[0]
    settings = wheels.Wheel(version, platform, tmp_path).settings("c++")
    if sysconfig.get_platform() != f"linux-{platform.machine}":
        pytest.skip(f"the wheel runs on {platform.machine} only")
    for name in ("EXT_SUFFIX", "SOABI", "VERSION"):
        assert settings[name] == sysconfig.get_config_var(name)


@pytest.mark.parametrize(
    ("tag", "libraries", "fits"),
    [
        ("manylinux_2_5_x86_64", {}, True),
        ("manylinux_2_17_x86_64", {}, True),
        ("manylinux_2_18_x86_64", {}, False),
        ("manylinux_2_17_aarch64", {}, False),
        ("linux_x86_64", {}, False),
        ("manylinux_2_17_x86_64", {"manylinux_2_17_x86_64": {"libstdc++.so.6": None}}, False),
    ],
)
def test_a_wheel_fits_a_platform_with_the_same_c_library_or_a_newer_one(
    wheels: ModuleType, tag: str, libraries: dict[str, object], fits: bool
) -> None:
    found = {"overall_tag": tag, "external_libs": libraries}
    assert wheels.fits(found, wheels.PLATFORMS[0]) is fits
