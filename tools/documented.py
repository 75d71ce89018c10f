"""Hooks of MkDocs and Griffe: lay polyhvd out with its adapters, and translate what Markdown lacks."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
LAID_OUT = ROOT / "build" / "documented"
#: A link from a document to a file of the repository that is not part of the site.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)")
#: Of docstrings: ":func:`~module.name`", and the line above an example.
ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|data|exc):`~?([^`]+)`")
EXAMPLE = re.compile(r"^( *)(Examples?)::$", re.MULTILINE)
#: Of a function that gets its docstring from another one.
SEE = re.compile(r"See :func:`([\w.]+)`\.")
#: Of a page: the line of a module.
SECTION = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
#: Of tests/surface/*.txt: a module, and a public name that is not a member of a class.
RECORDED = re.compile(r"^(?:\[(?P<module>[\w.]+)\]|(?:class )?(?P<name>\w+)(?![\w.]).*)$", re.MULTILINE)
#: Modules whose names are all described as polyhvd's; docs/reference/polyhvd.md mentions them.
ONLY_SHARED = {"polyhvd.errors", "polyhvd.launch", "polyhvd.runner"}
#: Functions that make objects, and what documents these.
MADE = {
    "sync_batch_normalization": "polyhvd.training.keras.batch_norm.SynchronizedNormalization",
    "train_translating": "polyhvd.elastic.train.train",
}


def on_startup(**_: Any) -> None:
    """Make a folder of links, which must be there when mkdocstrings looks for its paths."""
    package = LAID_OUT / "polyhvd"
    shutil.rmtree(LAID_OUT, ignore_errors=True)
    package.mkdir(parents=True)
    adapters = (path.parent for path in (ROOT / "frameworks").glob("*/__init__.py"))
    for name, path in {path.name: path for path in [*(ROOT / "polyhvd").iterdir(), *adapters]}.items():
        (package / name).symlink_to(path)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Show files outside the site by their paths in the repository."""
    folder = ROOT / "docs" / Path(page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        return f"{match[1]} (`{path.relative_to(ROOT).as_posix()}`)"

    return OUTSIDE.sub(shown, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Load the substitute for workers of a site in a folder from the site, not from the network."""
    top = "../" * page.file.src_uri.count("/")
    output = output.replace("https://unpkg.com/iframe-worker/shim", f"{top}assets/worker.js")
    if '<script src="http' in output:
        raise ValueError(f"{page.file.src_uri} loads a script from the network")
    return output


def on_post_build(*, config: Any, **_: Any) -> None:
    """Fail if a recorded public name has neither an entry in the reference nor a link to polyhvd's entry."""
    folder = Path(config["site_dir"], "reference")
    pages = {path.stem: path.read_text() for path in folder.glob("*.html")}
    entries = {entry for text in pages.values() for entry in re.findall(r'id="(polyhvd[\w.]+)"', text)}
    lines, sections = recorded(), documented_modules()
    absent = []
    for (module, name), line in lines.items():
        page = pages.get(sections.get(module, ""), "")
        is_linked = f'href="polyhvd.html#polyhvd.{name}"' in page or module in ONLY_SHARED
        is_same = line == lines.get(("polyhvd", name)) and f"polyhvd.{name}" in entries
        if not {f"{module}.{name}"} & (entries | sections.keys()) and not (is_linked and is_same):
            absent.append(f"{module}.{name}")
    if absent:
        raise ValueError(f"public names without an entry in docs/reference/: {', '.join(sorted(absent))}")


def recorded() -> dict[tuple[str, str], str]:
    """The line of each public name in tests/surface/, by its module and name."""
    lines = {}
    for path in sorted((ROOT / "tests" / "surface").glob("*.txt")):
        module = ""
        for match in RECORDED.finditer(path.read_text()):
            module = match["module"] or module
            if match["name"]:
                lines[module, match["name"]] = match[0]
    return lines


class Roles(griffe.Extension):
    """Makes Markdown of Sphinx's roles and examples in docstrings, and completes what Griffe finds."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Find docstrings of objects that are made at run time, and link names that all frameworks share."""
        if pkg.name == "polyhvd":
            for module in _modules(pkg):
                for name in module.exports or ():
                    _complete(module, str(name))
            for module in _modules(pkg):
                if module is not pkg and module.path in documented_modules():
                    _link_shared(module, pkg)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that was read."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(r"\1**\2**", text)


def documented_modules() -> dict[str, str]:
    """Modules with a section in docs/reference/, and the names of their pages."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return {module: page.stem for page in pages for module in SECTION.findall(page.read_text())}


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in [*module.members.values()]:
        if isinstance(member, griffe.Module):
            yield from _modules(member)


def _complete(module: griffe.Module, name: str) -> None:
    """Document a name by the object it has at run time, which the source does not show."""
    found = module.members.get(name)
    if isinstance(found, griffe.Function) and found.docstring is not None:
        if match := SEE.fullmatch(found.docstring.value):  # its __doc__ is assigned
            found.docstring.value = _docstring(module, match[1])
    elif isinstance(found, griffe.Class) and "__doc__" in found.members:
        value = str(found["__doc__"].value).removesuffix(".__doc__")
        text = _docstring(module, value)
        found.docstring = griffe.Docstring(text, parent=found)
    elif isinstance(found, griffe.Attribute) and found.docstring is None:
        function = str(found.value).partition("(")[0]
        if function.endswith("model_loader"):
            module.set_member(name, _nested(module[function].final_target, name, module))
        elif function.rpartition(".")[2] in MADE:
            module.set_member(name, griffe.Alias(name, MADE[function.rpartition(".")[2]], parent=module))
        elif function.startswith("on."):
            module.set_member(name, griffe.Alias(name, _path(module, function), parent=module))
        elif name == "Compression":
            text = _docstring(module, "polyhvd.training.compression.Compression")
            found.docstring = griffe.Docstring(text, parent=found)


def _path(module: griffe.Module, expression: str) -> str:
    """The path of an object that a module names; ``on`` is the framework of Keras."""
    if expression.startswith("on."):
        return f"polyhvd.keras.on_tensorflow.{expression[3:]}"
    return expression if expression.startswith("polyhvd.") else f"{module.path}.{expression}"


def _docstring(module: griffe.Module, expression: str) -> str:
    """The text of a docstring, also of a class that has that of another class."""
    found = module.modules_collection[_path(module, expression)]
    if "__doc__" in found.members:
        return _docstring(found.module, str(found["__doc__"].value).removesuffix(".__doc__"))
    if found.docstring is None:
        raise ValueError(f"{module.path}: {expression} has no docstring")
    return found.docstring.value


def _nested(maker: griffe.Object, name: str, module: griffe.Module) -> griffe.Object | griffe.Alias:
    """The function that another function defines and returns."""
    (node,) = ast.parse(maker.source).body
    (found,) = (item for item in ast.walk(node) if isinstance(item, ast.FunctionDef) and item.name == name)
    read = griffe.visit(maker.module.name, maker.filepath, ast.unparse(found), parent=maker.module.parent)
    return read[name]


def _link_shared(module: griffe.Module, pkg: griffe.Module) -> None:
    """Replace the entries of names that are the same in every framework by links to those of polyhvd."""
    shared = [name for name in map(str, module.exports or ()) if _is_shared(module, pkg, name)]
    for name in shared:
        module.members.pop(name, None)
    if shared and module.docstring is not None:
        links = ", ".join(f"[`{name}`][polyhvd.{name}]" for name in sorted(shared, key=str.lower))
        module.docstring.value += f"\n\nThis module also exports these names from `polyhvd`: {links}.\n"


def _is_shared(module: griffe.Module, pkg: griffe.Module, name: str) -> bool:
    if name not in pkg.members:
        return False
    if name not in module.members:  # Griffe does not follow ``from polyhvd import *`` this far
        return True
    return module[name].canonical_path == pkg[name].canonical_path
