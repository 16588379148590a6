"""Replaying the vector files of a folder, and what is said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flowstate.testing.conformance.formats import Case, UnknownFormatError, read_cases
from flowstate.testing.conformance.trial import Backend, Mismatch, Trial, VectorError

__all__ = ["FileReport", "NoVectorsError", "Report", "run_folder"]


class NoVectorsError(Exception):
    """There is nothing to replay where vectors were said to be."""


@dataclass(slots=True)
class FileReport:
    """What came of the cases of one file."""

    name: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """What differed, by the case's id."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The reasons, by the case's id."""
    differences: dict[str, list[str]] = field(default_factory=dict)
    """What is deliberately different, by the id of the case that has asserted it."""
    refused: str | None = None
    """Why the file could not be replayed at all."""

    def lines(self) -> Iterator[str]:
        """Yield what is printed of the file."""
        if self.refused is not None:
            yield self.refused
            return
        yield f"{self.name}: {counted(len(self.passed), len(self.failed), len(self.skipped))}"
        for case_id, detail in self.failed.items():
            yield f"  FAILED {case_id}"
            yield f"    {detail}"
        for reason, count in Counter(self.skipped.values()).items():
            yield f"  skipped {count}: {reason}"


@dataclass(slots=True)
class Report:
    """What came of a folder."""

    files: list[FileReport]

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 if a case failed, 2 if a file could not be replayed."""
        if any(file.refused is not None for file in self.files):
            return 2
        return 1 if any(file.failed for file in self.files) else 0

    def lines(self) -> Iterator[str]:
        """Yield what is printed; the totals come last."""
        for file in self.files:
            yield from file.lines()
        yield from self._difference_lines()
        yield counted(
            sum(len(file.passed) for file in self.files),
            sum(len(file.failed) for file in self.files),
            sum(len(file.skipped) for file in self.files),
        )

    def _difference_lines(self) -> Iterator[str]:
        by_reason: dict[str, list[str]] = {}
        for file in self.files:
            for case_id, reasons in file.differences.items():
                for reason in reasons:
                    by_reason.setdefault(reason, []).append(f"{file.name} {case_id}")
        if by_reason:
            yield "deliberate differences, asserted as such:"
        for reason, cases in by_reason.items():
            yield f"  {reason}"
            yield from (f"    {case}" for case in cases)


def counted(passed: int, failed: int, skipped: int) -> str:
    """Return the numbers as they are printed."""
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def run_folder(
    folder: Path, *, backend: Backend = Backend.MEMORY, case_ids: Collection[str] = ()
) -> Report:
    """Replay every vector file of a folder; of their cases only some, if ids are given.

    Raises ``NoVectorsError`` where there is no file, or no case of such an id.
    """
    if not folder.is_dir():
        raise NoVectorsError(f"{folder} is not a folder with vector files")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".json")
    if not paths:
        raise NoVectorsError(f"there is no vector file (*.json) in {folder}")
    files = [_run_file(path, backend, case_ids) for path in paths]
    if case_ids:
        files = [one for one in files if one.passed or one.failed or one.skipped or one.refused]
        seen = {name for one in files for name in (*one.passed, *one.failed, *one.skipped)}
        if missing := sorted(set(case_ids) - seen):
            raise NoVectorsError(f"no file in {folder} has a case {', '.join(map(repr, missing))}")
    return Report(files)


def _run_file(path: Path, backend: Backend, case_ids: Collection[str]) -> FileReport:
    report = FileReport(path.name)
    try:
        cases = read_cases(path)
    except UnknownFormatError as error:
        report.refused = str(error)
        return report
    for case in cases:
        if not case_ids or case.id in case_ids:
            _run_case(case, backend, report)
    return report


def _run_case(case: Case, backend: Backend, report: FileReport) -> None:
    if case.skipped is not None:
        report.skipped[case.id] = case.skipped
        return
    with Trial(backend) as trial:
        detail = _failure(case, trial)
    if detail is not None:
        report.failed[case.id] = detail
        return
    report.passed.append(case.id)
    if trial.differences:
        report.differences[case.id] = trial.differences


def _failure(case: Case, trial: Trial) -> str | None:
    try:
        case.replay(trial)
    except Mismatch as mismatch:
        return str(mismatch)
    except VectorError as error:
        return f"cannot be replayed: {error}"
    except Exception as error:
        # One case must not keep the others from being replayed, whatever it runs into.
        return f"raised {type(error).__name__}: {error}"
    return None
