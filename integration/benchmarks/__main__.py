from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import integration.benchmarks as benchmarks
from integration.benchmarks._report import save_report


def names() -> list[str]:
    folder = str(Path(benchmarks.__file__).parent)
    found = [module.name for module in pkgutil.iter_modules([folder])]
    return sorted(name for name in found if not name.startswith("_"))


def main(arguments: list[str]) -> int:
    known = names()
    wanted = arguments or known
    unknown = [name for name in wanted if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    for name in wanted:
        importlib.import_module(f"integration.benchmarks.{name}").main()
        print(f"\nwritten to {save_report(name).relative_to(Path.cwd())}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
