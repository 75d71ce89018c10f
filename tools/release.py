"""Makes a release of the checkout, all but its upload; see CONTRIBUTING.md.

``python tools/release.py`` closes the changelog's section, commits that, builds and checks all wheels and the
source distribution in build/release, writes SHA256SUMS and a bill of materials (CycloneDX) beside them, moves
all files to dist/, and then tags the commit. A run that was interrupted can be repeated. ``--dry-run``
changes nothing and builds no wheels: it makes the rest in build/release, with the wheels that are in dist/.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import uuid
from dataclasses import dataclass
from email.parser import BytesParser
from importlib.metadata import version as installed_version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "## [Unreleased]\n"
#: What the libraries in a wheel contain of other projects: version's package, name, license, what it is for.
COMPILED_IN = (
    ("pybind11", "pybind11", "BSD-3-Clause", "headers of the bindings to Python"),
    (
        "ziglang",
        "libc++",
        "Apache-2.0 WITH LLVM-exception",
        "C++ standard library, in the version of this Zig",
    ),
)


@dataclass(frozen=True)
class Release:
    """A version, and the checkout that it is made of.

    Args:
        version: such as "0.1.0".
        date: in the changelog, such as "2026-11-28".
        root: top folder of the checkout.
    """

    version: str
    date: str
    root: Path = ROOT

    @property
    def tag(self) -> str:
        """Git's tag of it."""
        return f"v{self.version}"

    @property
    def heading(self) -> str:
        """The heading of its section in the changelog, without the date."""
        return f"## [{self.version}]"

    def git(self, *words: str) -> str:
        """Return what git prints; raises SystemExit with git's own words if it fails."""
        done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise SystemExit(f"release: git {words[0]} failed in {self.root}: {said}")
        return done.stdout.strip()


def read_version(root: Path) -> str:
    """Return the version in polyhvd/__init__.py, which is the only place that sets it."""
    (found,) = re.findall(
        r'^__version__ = "([^"]+)"$', (root / "polyhvd" / "__init__.py").read_text(), re.MULTILINE
    )
    return str(found)


def cut(changelog: str, version: str, date: str) -> str:
    """Return the changelog with its unreleased lines below the version, and an empty section for the next.

    Raises:
        SystemExit: the section is missing or empty.
    """
    before, heading, after = changelog.partition(UNRELEASED)
    if not heading:
        raise SystemExit(f'release: CHANGELOG.md has no section "{UNRELEASED.strip()}"')
    section = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]
    if not re.search(r"^- ", section, re.MULTILINE):
        raise SystemExit(f'release: "{UNRELEASED.strip()}" in CHANGELOG.md is empty: nothing has changed')
    after = re.sub(r"\A\n*This will be [^\n]*\n", "", after)
    return f"{before}{UNRELEASED}\n## [{version}] - {date}\n\n{after.lstrip()}"


def check(release: Release) -> None:
    """Raise SystemExit unless the checkout can be released."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", release.version):
        raise SystemExit(f'release: __version__ is "{release.version}"; expected digits, such as "1.2.3"')
    cited = (release.root / "CITATION.cff").read_text()
    if f"\nversion: {release.version}\n" not in cited:
        raise SystemExit(f"release: CITATION.cff has another version than {release.version}; write it there")
    if changed := release.git("status", "--porcelain"):
        raise SystemExit(f"release: these files are not committed; commit or remove them:\n{changed}")
    release.git("var", "GIT_COMMITTER_IDENT")  # fails without a name for commits and tags
    if release.git("tag", "--list", release.tag):
        at = release.git("rev-list", "-1", release.tag)
        raise SystemExit(
            f"release: {release.tag} exists, at {at[:12]}. Set a new __version__ in polyhvd/__init__.py and "
            "in CITATION.cff"
        )


def commit_changelog(release: Release) -> str:
    """Cut it and commit that, unless an earlier run has; return the commit.

    If it cannot be committed, the file is as before.
    """
    path = release.root / "CHANGELOG.md"
    text = path.read_text()
    if f"\n{release.heading} - " not in text:
        try:
            path.write_text(cut(text, release.version, release.date))
            release.git("commit", "--quiet", "-m", f"Release {release.version}", "--", "CHANGELOG.md")
        except BaseException:
            if release.git("status", "--porcelain", "--", "CHANGELOG.md"):
                path.write_text(text)
            raise
    return release.git("rev-parse", "HEAD")


def build_source(release: Release, into: Path) -> Path:
    """Build the source distribution; return its path."""
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    into.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", program, str(into)]
    done = subprocess.run(command, cwd=release.root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"release: the source distribution was not built:\n{done.stderr[-3000:]}")
    return into / done.stdout.split()[-1]


def requirements(source: Path) -> list[str]:
    """Return what a source distribution needs without extras, such as "numpy>=1.21"."""
    with tarfile.open(source) as archive:
        file = archive.extractfile(f"{source.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        metadata = BytesParser().parse(file)
    return [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]


def write_sums(folder: Path, files: list[Path]) -> Path:
    """Write SHA256SUMS, which ``sha256sum -c`` reads; return its path."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files)]
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(lines))
    return sums


def write_bill(release: Release, folder: Path, files: list[Path]) -> Path:
    """Write the bill of materials: the files, what they need, and what is compiled into them.

    Raises:
        SystemExit: it does not have the form of CycloneDX 1.6.
    """
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.license import LicenseExpression
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL

    def component(name: str, version: str | None, **more: object) -> Component:
        return Component(name=name, version=version, bom_ref=name, **more)  # type: ignore[arg-type]

    product = component(
        "polyhvd",
        release.version,
        type=ComponentType.LIBRARY,
        purl=PackageURL("pypi", None, "polyhvd", release.version),
        licenses=[LicenseExpression("Apache-2.0")],
    )
    (source,) = (path for path in files if path.name.endswith(".tar.gz"))
    needed = []
    for requirement in requirements(source):
        name = re.split(r"[^\w.-]", requirement)[0]
        purl = PackageURL("pypi", None, name)
        needed.append(component(name, None, type=ComponentType.LIBRARY, purl=purl, description=requirement))
    for package, name, license_, use in COMPILED_IN:
        found = installed_version(package)
        needed.append(
            component(
                name,
                found,
                type=ComponentType.LIBRARY,
                licenses=[LicenseExpression(license_)],
                description=f"compiled into the wheels: {use}",
            )
        )
    bom = Bom(components=needed)
    for path in sorted(files):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]
        bom.components.add(component(path.name, release.version, type=ComponentType.FILE, hashes=hashes))
    bom.metadata.component = product
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(
        int(release.git("log", "-1", "--format=%ct")), datetime.timezone.utc
    )
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, f"polyhvd {release.git('rev-parse', 'HEAD')}")
    bom.register_dependency(product, needed)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"release: the bill of materials is not valid: {error}")
    bill = folder / f"polyhvd-{release.version}.cdx.json"
    bill.write_text(text + "\n")
    return bill


def finish(release: Release, folder: Path, wheels: list[Path]) -> list[Path]:
    """Add the source distribution, checksums and bill to the wheels in a folder; return all files."""
    files = [*wheels, build_source(release, folder)]
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"release: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    files.append(write_bill(release, folder, files))
    return [*files, write_sums(folder, files)]


def publish(release: Release, commit: str, made: Path, into: Path) -> None:
    """Move the files of a release to their folder, and tag the commit of which they were made.

    Raises:
        SystemExit: the checkout has changed meanwhile; nothing is moved or tagged.
    """
    changed = release.git("status", "--porcelain")
    if changed or release.git("rev-parse", "HEAD") != commit:
        raise SystemExit(
            f"release: the checkout has changed since {commit[:12]}, of which the files in {made} were to be "
            f"made. Commit or remove changes, and run it again:\n{changed}"
        )
    shutil.rmtree(into, ignore_errors=True)
    shutil.move(made, into)
    release.git("tag", "--annotate", "--message", f"polyhvd {release.version}", release.tag, commit)


def main() -> int:
    """Make a release, or try what can be tried of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="change nothing; build no wheels")
    options = parser.parse_args()
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    release = Release(read_version(ROOT), today)
    check(release)
    folder = ROOT / "build" / "release"
    built = ROOT / "dist"
    if options.dry_run:
        changelog = (ROOT / "CHANGELOG.md").read_text()
        if f"\n{release.heading} - " not in changelog:
            cut(changelog, release.version, release.date)
    else:
        commit = commit_changelog(release)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if options.dry_run:
        wheels = [Path(shutil.copy(path, folder)) for path in built.glob(f"polyhvd-{release.version}-*.whl")]
        for path in finish(release, folder, wheels):
            print(path)
        print(f"release: {release.tag} can be made; nothing was committed, tagged or built as a wheel")
        return 0
    command = [sys.executable, ROOT / "tools" / "wheels.py", "--into", folder]
    if status := subprocess.run(command).returncode:
        raise SystemExit(f"release: the wheels were not built (exit status {status}); nothing was tagged")
    files = finish(release, folder, list(folder.glob("*.whl")))
    publish(release, commit, folder, built)
    for path in files:
        print(built / path.name)
    print(f"release: tagged {release.tag}; CONTRIBUTING.md describes the upload")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("release: interrupted; nothing was tagged, dist/ is as before. Run it again", file=sys.stderr)
        raise SystemExit(130) from None
