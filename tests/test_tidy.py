"""The layers of ARCHITECTURE.md, and what the style sheet can be held to by a program.

Reads the sources and runs none of them.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from polyhvd.installed import frameworks

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "polyhvd" / "csrc"
BACKENDS = ROOT / "backends"
FRAMEWORKS = ROOT / "frameworks"
LAUNCH = ROOT / "polyhvd" / "launch"
TESTING = ROOT / "polyhvd" / "testing"

#: Backends that are built on another one.
BUILT_ON = {"host": {"shm"}, "mpi": {"host", "shm"}, "nccl": {"gpu"}}
#: A unit of the core includes what stands before its folder here, and its own folder.
CORE_LAYERS = ("control", "observe", "engine", "api", "python")
CORE_LAYERS_OF_BACKENDS = CORE_LAYERS[:3]
#: What a unit that only decides has no use for.
IMPURE_HEADERS = {
    *("condition_variable", "fcntl.h", "future", "mutex", "poll.h", "sched.h", "shared_mutex", "signal.h"),
    *("sys/epoll.h", "sys/eventfd.h", "sys/mman.h", "sys/socket.h", "thread", "time.h", "unistd.h"),
}
#: Packages of each framework, with those of the ones that its adapter stands on.
OWN = {name: {*framework.packages, *framework.companions} for name, framework in frameworks().items()}
#: NumPy is everybody's: the oracle, and how frameworks exchange arrays.
FOREIGN = {"horovod", "mpi4py"}.union(*(packages for name, packages in OWN.items() if name != "numpy"))
#: Identifiers that come from elsewhere, and the folders that may speak of them.
NAMES = {
    r"\bMPI_[A-Z]\w+|\bompi_\w+": ("backends/mpi",),
    r"\bnccl[A-Z]\w+|\bcuda[A-Z]\w+|\bcu(?:Mem|Ctx|Stream|Event|Device)[A-Z]\w+": (
        "backends/gpu",
        "backends/nccl",
        "frameworks/cupy",
        "tests/gpu",
    ),
    r"\bTF_[A-Z]\w+|\btensorflow::": ("frameworks/tensorflow",),
    r"\bMX(?:NDArray|Engine|Get|Shallow)\w*|\bNDArrayHandle\b": ("frameworks/mxnet",),
    r"\bat::\w+|\bc10::\w+|\btorch::": ("frameworks/torch",),
}
FOREIGN_HEADER = re.compile(
    r"^(?:mpi|cuda|cuda_runtime|cuda_fp16|nccl)\w*\.h$|^(?:torch|ATen|c10|tensorflow|mxnet|dmlc|nnvm|dlpack|jax|xla|tsl)/"
)


@cache
def files() -> tuple[Path, ...]:
    """What is in the repository or could be: nothing that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = [ROOT / name for name in listed.split("\0") if name]
    return tuple(sorted(path for path in found if path.is_file()))


def sources(*suffixes: str, under: Path = ROOT) -> list[Path]:
    found = [path for path in files() if path.suffix in suffixes and path.is_relative_to(under)]
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def included(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, opening character and name of each header that a file includes."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.match(r'\s*#\s*include\s+([<"])([^>"]+)[>"]', line):
            yield number, match[1], match[2]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that a file imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def code(path: Path) -> str:
    """C++ without comments and string literals, the lines kept."""
    text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', path.read_text())
    text = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def folder_of_header(name: str, own: Path) -> Path | None:
    """Where a quoted header lies: in the own folder, in csrc, or in backends."""
    for folder in (own, CSRC, BACKENDS):
        if (folder / name).is_file():
            return (folder / name).parent
    return None


#: A module imports what stands before it here, and its own folder. Those of one line do not know each other.
LAYERS = (
    ("_core",),
    ("errors", "config", "installed"),
    ("log", "rendezvous"),
    ("runtime",),
    ("capabilities", "collectives", "data"),
    ("observe", "training"),
    ("elastic", "parity"),
    ("launch",),
    ("shared",),
    ("__init__",),
    ("bench", "exports", "ray", "runner", "sagemaker", "spark", "testing"),
    ("cli",),
    ("__main__",),
)
FLAT_FILES_MAX = 11

#: Files of an adapter's folder, which mean the same in each. All have the first six.
FILES_OF_ALL = ("adapter", "dialect", "framework", "functions", "state", "verbs")
FILES_OF_MANY = (
    *("base", "batch_norm", "cases", "compression", "data", "derivatives", "elastic", "errors", "names"),
    *("native", "optimizer", "parity", "parity_driver", "passes", "reducer", "samplers", "signatures"),
    *("spark", "sparse", "weights", "wrappers"),
)


def report(offences: list[str], rule: str) -> None:
    __tracebackhide__ = True
    if offences:
        pytest.fail(rule + ":\n  " + "\n  ".join(offences), pytrace=False)


def test_the_rules_have_something_to_look_at() -> None:
    assert len(sources(".cc", ".h", under=CSRC)) > 20
    assert len(sources(".cc", ".h", under=BACKENDS)) > 10
    assert len(sources(".py", under=ROOT / "polyhvd")) > 10
    assert len(sources(".py", under=FRAMEWORKS)) > 1


def test_a_unit_of_the_core_never_includes_a_higher_folder() -> None:
    """Nor a backend: only the bindings, which hand them to Python, see both."""
    height = {name: number for number, name in enumerate(CORE_LAYERS)}
    offences = []
    for path in sources(".cc", ".h", under=CSRC):
        own = path.relative_to(CSRC).parts[0]
        if own not in height:
            offences.append(f"{relative(path)}: stands in no layer")
            continue
        for line, quote, name in included(path):
            folder = folder_of_header(name, path.parent) if quote == '"' else None
            if quote == '"' and folder is None:
                offences.append(f"{relative(path)}:{line}: {name} is not found")
            if folder is None or (folder.is_relative_to(BACKENDS) and own == CORE_LAYERS[-1]):
                continue
            if not folder.is_relative_to(CSRC) or height[folder.name] > height[own]:
                offences.append(f"{relative(path)}:{line}: {name}")
    report(offences, "csrc/ includes its own headers, of the same folder or a lower one")


def test_what_decides_is_pure() -> None:
    """Every ordering bug can be replayed from a list of calls; time is an argument."""
    impure = re.compile(
        r"\b(?:std::(?:this_)?thread\b|std::\w*mutex|condition_variable|clock_gettime|\w*clock\w*::now|getenv)"
    )
    offences = []
    for path in sources(".cc", ".h", under=CSRC / CORE_LAYERS[0]):
        offences += [
            f"{relative(path)}:{line}: {name}"
            for line, quote, name in included(path)
            if quote == "<" and name in IMPURE_HEADERS
        ]
        for number, line in enumerate(code(path).splitlines(), 1):
            offences += [f"{relative(path)}:{number}: {found}" for found in impure.findall(line)]
    report(offences, f"csrc/{CORE_LAYERS[0]}/ has no socket, thread, lock or clock")


def test_every_lock_has_its_place_in_the_order() -> None:
    """Debug builds check the order; a mutex outside of it would not be seen."""
    header = CSRC / "observe" / "lock_order.h"
    wanted = set(re.findall(r"^  LOCK\((\w+)\)", header.read_text(), re.MULTILINE))
    found: dict[str, list[str]] = {name: [] for name in wanted}
    offences = []
    for path in [*sources(".cc", ".h", under=CSRC), *sources(".cc", ".h", under=BACKENDS)]:
        for number, line in enumerate(code(path).splitlines(), 1):
            if path.stem != header.stem and re.search(r"std::(?:\w+_)?mutex\b|std::condition_variable", line):
                offences.append(f"{relative(path)}:{number}: {line.strip()}")
            for name in re.findall(r"OrderedMutex<LockRank::(\w+)>", line):
                found.setdefault(name, []).append(f"{relative(path)}:{number}")
    offences += [f"{name}: {places or 'nowhere'}" for name, places in found.items() if len(places) != 1]
    report(offences, "each mutex is an OrderedMutex of a line of its own in observe/lock_order.h")


def test_a_backend_includes_the_interfaces_and_its_own_folder() -> None:
    """world.* puts the engine's parts together, and so sees all of them."""
    offences = []
    for path in sources(".cc", ".h", under=BACKENDS):
        own = path.relative_to(BACKENDS).parts[0]
        assert path.parent != BACKENDS or path.stem == "world", f"{relative(path)}: a backend is a folder"
        for line, quote, name in included(path):
            folder = folder_of_header(name, path.parent) if quote == '"' else None
            if quote == '"' and folder is None:
                offences.append(f"{relative(path)}:{line}: {name} is not found")
            if folder is None:
                continue
            if folder.is_relative_to(CSRC):
                allowed = folder.name in CORE_LAYERS_OF_BACKENDS
            else:
                other = folder.relative_to(BACKENDS).parts
                allowed = path.parent == BACKENDS or (
                    bool(other) and other[0] in {own, *BUILT_ON.get(own, ())}
                )
            if not allowed:
                offences.append(f"{relative(path)}:{line}: {name}")
    report(offences, "a backend includes the engine's headers and its own")


def test_a_native_adapter_includes_the_c_interface_and_its_own_folder() -> None:
    vocabulary = {
        *("api/c_api.h", "api/engine_slot.h", "control/error.h", "control/types.h"),
        "engine/adaptive_backoff.h",
    }
    offences = []
    for path in sources(".cc", ".h", under=FRAMEWORKS):
        for line, quote, name in included(path):
            if quote == "<" or name in vocabulary or (path.parent / name).is_file():
                continue
            offences.append(f"{relative(path)}:{line}: {name}")
    report(offences, "an adapter's library knows of the core what c_api.h says, and its vocabulary")


def test_no_header_of_a_framework_cuda_nccl_or_mpi_is_needed() -> None:
    offences = [
        f"{relative(path)}:{line}: {name}"
        for path in sources(".cc", ".h", ".cpp", ".hpp", ".cu")
        for line, _, name in included(path)
        if FOREIGN_HEADER.match(name)
    ]
    report(offences, "nothing but a compiler is needed to build")


@pytest.mark.parametrize(("pattern", "homes"), NAMES.items(), ids=[homes[0] for homes in NAMES.values()])
def test_foreign_names_stand_in_their_own_folder_only(pattern: str, homes: tuple[str, ...]) -> None:
    offences = []
    for path in sources(".cc", ".h"):
        if relative(path).startswith(tuple(f"{home}/" for home in homes)):
            continue
        for number, line in enumerate(code(path).splitlines(), 1):
            offences += [f"{relative(path)}:{number}: {name}" for name in re.findall(pattern, line)]
    report(offences, f"these names belong to {' and '.join(homes)}")


def floor_of(name: str) -> str:
    """The folder, or the module, of the shared Python that a full name lies in; empty: none."""
    parts = name.split(".")
    if parts[0] != "polyhvd":
        return ""
    names = {name for layer in LAYERS for name in layer}
    return parts[1] if len(parts) > 1 and parts[1] in names else "__init__"


def test_no_arrow_runs_up() -> None:
    """frameworks -> training -> collectives -> runtime -> rendezvous; launch stands on all but frameworks."""
    height = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    offences = []
    for path in sources(".py", under=ROOT / "polyhvd"):
        own = path.relative_to(ROOT / "polyhvd").parts[0].removesuffix(".py")
        if own not in height:
            offences.append(f"{relative(path)}: stands in no layer")
            continue
        for node in ast.walk(tree(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module == "polyhvd":
                names = [f"polyhvd.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for other in filter(None, map(floor_of, names)):
                if other != own and height[other] >= height[own]:
                    offences.append(f"{relative(path)}:{node.lineno}: {other}")
    report(offences, "a module imports what stands below it")


def test_the_flat_part_is_small() -> None:
    flat = [path.name for path in sources(".py", under=ROOT / "polyhvd") if path.parent == ROOT / "polyhvd"]
    report(flat if len(flat) > FLAT_FILES_MAX else [], f"polyhvd/ has {FLAT_FILES_MAX} files at most")


def test_adapters_name_their_files_alike() -> None:
    folders = sorted({path.parent for path in FRAMEWORKS.glob("*/adapter.py")})
    found = {folder: {path.stem for path in folder.glob("*.py")} - {"__init__"} for folder in folders}
    offences = [
        f"{relative(folder)}: no {name}.py"
        for folder in folders
        for name in FILES_OF_ALL
        if name not in found[folder]
    ]
    known = {*FILES_OF_ALL, *FILES_OF_MANY}
    owners = Counter(name for names in found.values() for name in names - known)
    offences += [f"{name}.py: in {count} folders" for name, count in owners.items() if count > 1]
    report(offences, "all have the same six files; what several have besides them is listed here")


def test_the_shared_python_imports_no_framework() -> None:
    offences = [
        f"{relative(path)}:{line}: {name}"
        for path in sources(".py", under=ROOT / "polyhvd")
        for line, name in imported(path)
        if name.split(".")[0] in FOREIGN
    ]
    report(offences, "polyhvd/*.py imports no framework")


def test_the_shared_python_imports_no_adapter() -> None:
    adapters = {path.name for path in FRAMEWORKS.iterdir() if path.is_dir()}
    offences = [
        f"{relative(path)}:{line}: {name}"
        for path in sources(".py", under=ROOT / "polyhvd")
        for line, name in imported(path)
        if name.split(".")[0] == "polyhvd" and name.split(".")[1:2] and name.split(".")[1] in adapters
    ]
    report(offences, "polyhvd/*.py knows adapters by their protocol")


def test_an_adapter_imports_its_own_framework_and_no_other_adapter() -> None:
    adapters = {path.name for path in FRAMEWORKS.iterdir() if path.is_dir()}
    offences = []
    for path in sources(".py", under=FRAMEWORKS):
        own = path.relative_to(FRAMEWORKS).parts[0]
        if own == "__init__.py":
            continue
        for line, name in imported(path):
            parts = name.split(".")
            others = adapters - {own, *frameworks()[own].stands_on}
            if parts[0] == "polyhvd" and len(parts) > 1 and parts[1] in others:
                offences.append(f"{relative(path)}:{line}: {name}")
            if parts[0] in FOREIGN - OWN[own].union(*(OWN[below] for below in frameworks()[own].stands_on)):
                offences.append(f"{relative(path)}:{line}: {name}")
    report(offences, "adapters never import each other, or another framework")


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Folders of tests are no packages, so that of two files of one name pytest can import one only."""
    files: dict[str, list[str]] = {}
    for path in sources(".py"):
        if path.is_relative_to(ROOT / "tests") and path.name.startswith("test_"):
            files.setdefault(path.stem, []).append(relative(path))
    report([" and ".join(same) for same in files.values() if len(same) > 1], "modules of tests share a name")


def test_the_environment_is_read_in_config_alone() -> None:
    """The launcher and pools of tests make environments, and may look at their own."""
    offences = []
    reading = re.compile(r"\b(?:os\.(?:environb?|getenvb?|putenv|unsetenv)|(?:secure_)?getenv)\b")
    product = [*sources(".py", under=ROOT / "polyhvd"), *sources(".py", under=FRAMEWORKS)]
    for path in product:
        if path.is_relative_to(LAUNCH) or path.is_relative_to(TESTING) or path.name == "config.py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and reading.fullmatch(ast.unparse(node)):
                offences.append(f"{relative(path)}:{node.lineno}: {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = {alias.name for alias in node.names} & {"environ", "environb", "getenv"}
                offences += [f"{relative(path)}:{node.lineno}: {name}" for name in names]
    native = [path for root in (CSRC, BACKENDS, FRAMEWORKS) for path in sources(".cc", ".h", under=root)]
    for path in native:
        for number, line in enumerate(code(path).splitlines(), 1):
            if reading.search(line):
                offences.append(f"{relative(path)}:{number}: {line.strip()}")
    report(offences, "config.py has the one table of variables")


def exports(path: Path) -> list[str] | None:
    """The names that a module lists in ``__all__`` itself; None when it has none."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def all_exports(path: Path) -> list[str]:
    """Those of ``polyhvd.exports`` and of generated modules included, where a module adds them."""
    names = list(exports(path) or [])
    added = {ast.unparse(node) for node in tree(path).body if isinstance(node, ast.AugAssign)}
    for name in ("exports", "verbs", "wrappers"):
        other = (ROOT / "polyhvd" if name == "exports" else path.parent) / f"{name}.py"
        names += all_exports(other) if f"__all__ += {name}.__all__" in added else []
    return names


def defined(path: Path) -> set[str]:
    """Names that a module binds at its top level, conditional ones included."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            if names == {"*"} and isinstance(node, ast.ImportFrom) and node.module:
                names = set(exports(module_file(node.module)) or [])
            found |= names
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def module_file(name: str) -> Path:
    """The file of a module of polyhvd, one of a framework included."""
    inside = name.split(".")[1:]
    for root in (ROOT / "polyhvd", FRAMEWORKS):
        for path in (root.joinpath(*inside).with_suffix(".py"), root.joinpath(*inside, "__init__.py")):
            if path.is_file():
                return path
    raise ValueError(f"{name} is no module of polyhvd")


def public_modules() -> list[Path]:
    return [
        path
        for root in (ROOT / "polyhvd", FRAMEWORKS)
        for path in sources(".py", under=root)
        if path.read_text().strip() and path.name != "__main__.py"
    ]


def test_every_module_says_what_it_exports() -> None:
    offences = [relative(path) for path in public_modules() if exports(path) is None and not is_script(path)]
    report(offences, "a module has __all__")


def is_script(path: Path) -> bool:
    """A package's docstring, or what runs by itself, exports nothing."""
    statements = [node for node in tree(path).body if not isinstance(node, ast.Expr)]
    return not statements or 'if __name__ == "__main__"' in path.read_text()


def order(name: str) -> tuple[int, str]:
    """Constants, classes, functions: the order that ruff keeps."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


def test_all_is_sorted_and_true() -> None:
    offences = []
    for path in [*public_modules(), *sources(".py", under=ROOT / "tests" / "harness")]:
        names = exports(path)
        if names is None:
            continue
        if names != sorted(set(names), key=order):
            offences.append(f"{relative(path)}: __all__ is not sorted")
        offences += [f"{relative(path)}: {name} is not defined" for name in set(names) - defined(path)]
    report(offences, "__all__ is sorted, and what it names exists")


def test_adapters_export_the_same_names() -> None:
    """A program moves from one framework to another by changing its import."""
    common = (
        "Average Max Min Product Sum ProcessSet HorovodInternalError allgather allgather_object allreduce "
        "barrier broadcast broadcast_object counters cross_rank cross_size global_process_set init "
        "is_homogeneous is_initialized local_rank local_size rank shutdown size start_timeline stop_timeline "
        "ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built mpi_enabled mpi_threads_supported "
        "nccl_built rocm_built"
    )
    wanted = set(common.split())
    offences = []
    for folder in sorted(path for path in FRAMEWORKS.iterdir() if (path / "__init__.py").is_file()):
        missing = wanted - set(all_exports(folder / "__init__.py"))
        if missing:
            offences.append(f"{relative(folder)}: {', '.join(sorted(missing))}")
    report(offences, "each framework's module offers these")


def test_no_path_of_a_developers_machine_is_written_down() -> None:
    somebody = re.compile(r"(?<![\w.])/(?:work|home|root|Users|mnt|data|scratch)/[\w.-]+|\b[A-Z]:\\\\?\w")
    offences = []
    for path in files():
        if path.suffix not in {
            ".py",
            ".pyi",
            ".cc",
            ".h",
            ".toml",
            ".md",
            ".txt",
            ".yml",
            ".yaml",
            ".sh",
            "",
        }:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            offences += [f"{relative(path)}:{number}: {found}" for found in somebody.findall(line)]
    report(offences, "paths are relative, or found at run time")


def test_files_end_in_one_newline_and_lines_in_no_space() -> None:
    offences = []
    for path in sources(".py", ".pyi", ".cc", ".h", ".toml", ".md"):
        text = path.read_text()
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            offences.append(f"{relative(path)}: ends in other than one newline")
        offences += [
            f"{relative(path)}:{number}: space at the end, or a tab"
            for number, line in enumerate(text.splitlines(), 1)
            if line != line.rstrip() or "\t" in line
        ]
    report(offences, "text is clean")
