"""The parts of tools/wheels.py, release.py and matrix.py that compile nothing, and the source distribution.

`make wheels` builds and checks the wheels.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("wheels", monkeypatch)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("release", monkeypatch)


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("matrix", monkeypatch)


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


def test_no_source_asks_the_compilers_runtime_library_for_instruction_sets() -> None:
    """In Zig's it is a stub that finds none: see polyhvd/csrc/control/cpu_features.h."""
    sources = [
        path for folder in ("backends", "frameworks", "polyhvd") for path in (ROOT / folder).rglob("*.cc")
    ]
    assert len(sources) > 50
    assert [str(path) for path in sources if "__builtin_cpu_" in path.read_text()] == []


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


def test_no_object_of_a_framework_is_taken_for_one_of_our_cpp_library() -> None:
    """A wheel has libc++ inside, and frameworks are built with libstdc++."""
    sources = [path for ending in ("cc", "h") for path in (ROOT / "frameworks").rglob(f"*.{ending}")]
    assert len(sources) > 10
    for path in sources:
        assert not re.search(r"reinterpret_cast<[^;]*\bstd::(?!u?int)", path.read_text()), path


@pytest.mark.parametrize("names", [b"libc.so.6", b"libc.so.6 libgcc_s.so.1"])
def test_a_wheel_whose_unwinder_cannot_unwind_exceptions_of_mxnet_is_refused(
    wheels: ModuleType, tmp_path: Path, names: bytes
) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("polyhvd/mxnet/_native.so", names)
    with contextlib.nullcontext() if b"gcc" in names else pytest.raises(SystemExit, match="unwinder"):
        wheels.check_unwinder(tmp_path / "a.whl")


CHANGES = """# Changelog

Preface.

## [Unreleased]

This will be 0.1.0, the first version.

### Added

- One.

## [0.0.1] - 2026-01-01

- Zero.
"""


def test_a_release_dates_the_unreleased_changes_and_begins_an_empty_section(release: ModuleType) -> None:
    changed = release.cut(CHANGES, "0.1.0", "2026-02-03")
    assert changed == CHANGES.replace("This will be 0.1.0, the first version.\n", "## [0.1.0] - 2026-02-03\n")
    with pytest.raises(SystemExit, match="is empty"):
        release.cut(changed, "0.1.1", "2026-02-04")
    with pytest.raises(SystemExit, match="has no section"):
        release.cut("# Changelog\n", "0.1.1", "2026-02-04")


@pytest.fixture
def checkout(release: ModuleType, tmp_path: Path) -> Path:
    """A small checkout with one commit."""
    (tmp_path / "polyhvd").mkdir()
    (tmp_path / "polyhvd" / "__init__.py").write_text('"""Test."""\n__version__ = "0.1.0"\n')
    (tmp_path / "CITATION.cff").write_text("title: test\nversion: 0.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    git = ["git", "-C", tmp_path]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "config", "user.name", "test"], check=True)
    subprocess.run([*git, "config", "user.email", "test@example.invalid"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)
    return tmp_path


def test_a_release_commits_the_changelog_once(release: ModuleType, checkout: Path) -> None:
    made = release.Release(release.read_version(checkout), "2026-02-03", checkout)
    release.check(made)
    release.commit_changelog(made)
    release.commit_changelog(made)  # after an interruption
    release.check(made)
    assert made.git("log", "--format=%s") == "Release 0.1.0\nfirst"
    assert "\n## [0.1.0] - 2026-02-03\n" in (checkout / "CHANGELOG.md").read_text()


def test_a_checkout_that_cannot_be_released_is_refused(release: ModuleType, checkout: Path) -> None:
    made = release.Release("0.1.0", "2026-02-03", checkout)
    with pytest.raises(SystemExit, match=r"__version__ is \"1\.0\.dev\""):
        release.check(release.Release("1.0.dev", "2026-02-03", checkout))
    with pytest.raises(SystemExit, match=r"CITATION\.cff has another version than 0\.2\.0"):
        release.check(release.Release("0.2.0", "2026-02-03", checkout))
    (checkout / "new").touch()
    with pytest.raises(SystemExit, match=r"not committed.*\n.*new"):
        release.check(made)
    (checkout / "new").unlink()
    made.git("tag", "v0.1.0")
    with pytest.raises(SystemExit, match=r"v0\.1\.0 exists, at \w{12}\."):
        release.check(made)
    (checkout / ".git").rename(checkout / "git")
    with pytest.raises(SystemExit, match=r"git status failed in .*: fatal: not a git repository"):
        release.check(made)


def test_a_changelog_that_cannot_be_committed_is_as_before(release: ModuleType, checkout: Path) -> None:
    hook = checkout / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho refused >&2; exit 1\n")
    hook.chmod(0o755)
    made = release.Release("0.1.0", "2026-02-03", checkout)
    with pytest.raises(SystemExit, match=r"git commit failed in .*: refused"):
        release.commit_changelog(made)
    assert made.git("status", "--porcelain") == ""
    assert (checkout / "CHANGELOG.md").read_text() == CHANGES


def test_a_release_tags_the_commit_of_which_its_files_were_made(
    release: ModuleType, checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("release")
    made, into = folder / "made", folder / "dist"
    for path in (made, into):
        path.mkdir()
        (path / path.name).touch()
    at = release.Release("0.1.0", "2026-02-03", checkout)
    commit = at.git("rev-parse", "HEAD")
    for change in ("CITATION.cff", None):  # not committed, and committed
        if change:
            (checkout / change).write_text("title: other\n")
        else:
            at.git("commit", "--quiet", "--all", "-m", "second")
        with pytest.raises(SystemExit, match="the checkout has changed since"):
            release.publish(at, commit, made, into)
    assert (at.git("tag", "--list"), os.listdir(into)) == ("", ["dist"])
    second = at.git("rev-parse", "HEAD")
    release.publish(at, second, made, into)
    assert (at.git("rev-list", "-1", "v0.1.0"), os.listdir(into)) == (second, ["made"])


def test_checksums_are_those_that_sha256sum_checks(release: ModuleType, tmp_path: Path) -> None:
    files = [tmp_path / "b.whl", tmp_path / "a.tar.gz"]
    for path in files:
        path.write_text(path.name)
    release.write_sums(tmp_path, files)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "a.tar.gz: OK\nb.whl: OK\n"


def test_the_matrix_installs_the_wheel_that_it_is_given(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "polyhvd-0.1.0-cp311-cp311-manylinux_2_17_x86_64.whl"
    wheel.touch()
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(matrix, "WORK", tmp_path / "work")
    monkeypatch.setattr(matrix, "ENVIRONMENTS_FOLDER", tmp_path / "environments")
    monkeypatch.setattr(matrix, "copy_tests", lambda: None)
    monkeypatch.setattr(matrix, "prepare", lambda environment: tmp_path / environment.name / "python")
    monkeypatch.setattr(matrix, "run", lambda *command, **_: commands.append(tuple(map(str, command))))
    monkeypatch.setattr(sys, "argv", ["matrix.py", "numpy-2"])
    monkeypatch.setenv("POLYHVD_WHEEL", os.path.relpath(wheel))
    matrix.main()
    assert [command[-1] for command in commands if command[-1].endswith(".whl")] == [str(wheel)]
    assert not [command for command in commands if "wheel" in command], "nothing is built"
    assert "POLYHVD_WHEEL" not in os.environ
    assert any("pytest" in command for command in commands)


def test_the_matrix_refuses_a_wheel_that_does_not_exist(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "ENVIRONMENTS_FOLDER", tmp_path / "environments")
    monkeypatch.setattr(sys, "argv", ["matrix.py", "numpy-2"])
    monkeypatch.setenv("POLYHVD_WHEEL", str(tmp_path / "absent.whl"))
    with pytest.raises(SystemExit, match=r"POLYHVD_WHEEL=.*absent\.whl: there is no such file"):
        matrix.main()
    assert not (tmp_path / "environments").exists()


def names_in_the_repository() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution.

    Made of a copy: setuptools collects the files beside setup.py, where other tests would find them.
    """
    folder = tmp_path_factory.mktemp("sdist")
    copy = tmp_path_factory.mktemp("checkout")
    for name in names_in_the_repository():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, folder], cwd=copy, check=True, capture_output=True)
    (archive,) = folder.glob("polyhvd-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_source_distribution_has_the_files_of_the_repository(source: Path) -> None:
    of_the_repository = (".github/", ".gitignore", ".dockerignore", ".pre-commit", "__init__.py")
    names = [name for name in names_in_the_repository() if not name.startswith(of_the_repository)]
    assert [name for name in names if not (source / name).exists()] == []
    assert not list(source.rglob("*.so"))


def test_the_description_for_an_index_has_no_link_to_a_file_of_the_repository(source: Path) -> None:
    description = (source / "PKG-INFO").read_text().partition("\n\n")[2]
    assert description.startswith("# polyhvd")
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", description) == []
    assert "`polyhvd docs elastic`" in description


@pytest.mark.slow
def test_the_source_distribution_builds_and_its_tests_pass(source: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    folder = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    # As plain folders on the path: the editable install of the checkout does not come along.
    Path(folder, "test.pth").write_text(sysconfig.get_path("purelib") + "\n")
    cache = [shutil.which("ccache")] if shutil.which("ccache") else []
    compilers = {"CC": " ".join([*cache, "gcc"]), "CXX": " ".join([*cache, "g++"])}
    env = {**os.environ, **compilers, "CCACHE_BASEDIR": str(source), "CCACHE_NOHASHDIR": "1"}
    install = [python, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."]
    subprocess.run(install, cwd=source, env=env, check=True)
    parts = ("test_config", "test_documents", "launch/test_launcher", "parity/test_allreduce")
    tests = [f"tests/{part}.py" for part in parts]
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        *tests,
        "-k",
        "not (torch or tensorflow or keras or mxnet or jax)",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
