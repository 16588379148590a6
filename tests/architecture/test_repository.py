"""What holds for the files of the repository, whoever writes them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("state", "connectors")
MODULE_LINES_MAX = 600

# The names stand apart from their slashes, or this file would be found itself.
MACHINE_FOLDERS = ("root", "home", "work")
# An absolute path begins a word or follows a URL's two slashes. Where a folder of that name lies
# below another one, or is the bucket of a URL, it is nobody's machine.
MACHINE_PATH = re.compile(
    r"(?:(?<![\w.$}>)\]*/~-])|(?<=://))/(?:" + "|".join(MACHINE_FOLDERS) + r")/"
)
REGISTRY_WORDS = ("(?<!schema-)registry", "artifactory", "nexus", "devpi", "pythonhosted", "mirror")
REGISTRY_HOST = re.compile(
    r"\w://[^\s/\"'<>]*(?:" + "|".join(REGISTRY_WORDS) + r")"
    r"|index[-_]url\W{1,4}\w+://",
    re.IGNORECASE,
)


def repository_files() -> list[Path]:
    """Return the files that are tracked, or would be if everything were added."""
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked source distribution has no list of its files")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    # A file that was removed is listed until the removal is recorded.
    return sorted(path for path in set(paths) if path.is_file())


def text_of(path: Path) -> str | None:
    """Return a file's text, or None where it is not text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def matches_in_repository(pattern: re.Pattern[str]) -> Iterator[str]:
    for path in repository_files():
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
            if (match := pattern.search(line)) is not None:
                yield f"{path.relative_to(ROOT).as_posix()}:{number}: {match.group()}"


# Paths and hosts of the machine it was written on.


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    assert list(matches_in_repository(MACHINE_PATH)) == []


def test_no_file_names_the_host_of_a_package_registry() -> None:
    assert list(matches_in_repository(REGISTRY_HOST)) == []


def test_the_list_of_files_has_this_one() -> None:
    assert Path(__file__).resolve() in {path.resolve() for path in repository_files()}


@pytest.mark.parametrize("folder", MACHINE_FOLDERS)
def test_a_machine_path_is_told_from_a_folder_of_that_name(folder: str) -> None:
    path = f"/{folder}/"

    for line in (path, f"cd {path}x", f"'{path}x'", f"={path}x", f"file://{path}x", f"({path}x)"):
        assert MACHINE_PATH.search(line), line
    for line in (f"docs{path}x", f"./a-b{path}", f"s3:/{path}x", f"{{tmp}}{path}", f"$X{path}"):
        assert not MACHINE_PATH.search(line), line


def test_a_registry_is_told_from_another_host() -> None:
    scheme = "https:" + "//"

    for host in ("registry.example.org", "me@npm-registry:4873", "nexus.corp", "ARTIFACTORY.x.io"):
        assert REGISTRY_HOST.search(f"x = '{scheme}{host}/simple'"), host
    assert REGISTRY_HOST.search("--index" + f"-url {scheme}10.0.0.1/simple")
    assert REGISTRY_HOST.search("index" + f'_url = "{scheme}10.0.0.1/simple"')
    for text in (f"{scheme}schema-registry:8081", f"{scheme}x.org/registry", "self.registry.get"):
        assert not REGISTRY_HOST.search(text), text


# Packages and modules.


def listed_packages() -> set[str]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return set(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def packages_on_disk() -> set[str]:
    """Return the folders right below the source roots that have a module anywhere in them."""
    folders = (path for name in SOURCE_ROOTS for path in (ROOT / name).iterdir())
    return {
        folder.relative_to(ROOT).as_posix()
        for folder in folders
        if folder.is_dir() and any(folder.rglob("*.py"))
    }


def test_every_package_is_in_the_wheel() -> None:
    assert listed_packages() == packages_on_disk()


def test_source_roots_are_no_packages_and_all_folders_in_them_are() -> None:
    folders = {path.parent for name in SOURCE_ROOTS for path in (ROOT / name).rglob("*.py")}

    assert not folders & {ROOT / name for name in SOURCE_ROOTS}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_module_is_too_long_to_read() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in repository_files()
        if path.suffix == ".py"
    }

    assert {name: n for name, n in lengths.items() if n > MODULE_LINES_MAX} == {}
