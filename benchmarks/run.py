"""Run the benchmarks one after another and print one table: python benchmarks/run.py [NAME ...].

A benchmark is a module beside this one with ``run() -> list[dict]``, one dict per row of the table:

========= ============================================================================================
name      what is measured, on which work, against which peer
ours      our figure, in ``unit``
peer      the peer's figure in the same run on the same work; None where there is none
unit      unit of both
ratio     how many times better ours is: peer ÷ ours where less is better; None where there is no peer
bar       what must hold, such as ``"ratio >= 4.3"`` or ``"ours < 5"``; None for a row that only informs
========= ============================================================================================

Each runs in a process of its own, so that neither memory nor threads of one reach the next. ``results/NAME.json`` and
``results/NAME.md`` keep the last run with the versions and the processor it was made on.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import operator
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
VERSIONS = ("torch", "torchrl", "tensordict", "transformers", "trl")
COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
BAR = re.compile(r"(ours|ratio) *(>=|<=|>|<) *([0-9.e-]+)")


def benchmarks() -> list[str]:
    """Names of the benchmark modules, the longest one last."""
    names = {path.stem for path in HERE.glob("*.py")} - {Path(__file__).stem, "__init__"}
    return sorted(names, key=lambda name: (name == "end_to_end", name))


def is_met(row: dict[str, Any]) -> bool | None:
    """Whether a row reaches its bar; None where it has none, or where its peer is not installed."""
    if row["bar"] is None:
        return None
    parsed = BAR.fullmatch(row["bar"])
    if parsed is None:
        raise ValueError(f"bar {row['bar']!r} of {row['name']!r}; write it like 'ratio >= 4.3' or 'ours < 5'.")
    figure, compare, limit = parsed.groups()
    return None if row[figure] is None else COMPARE[compare](row[figure], float(limit))


def processor() -> str:
    """Name of the processor and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return f"{found.group(1) if found else platform.processor() or platform.machine()}, {cores} cores"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of rows."""

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    header = ("what", "ours", "peer", "unit", "ratio", "bar", "met")
    lines = [header, ("---",) * len(header)]
    for row in rows:
        met = {True: "yes", False: "NO", None: ""}[is_met(row)]
        figures = (row["name"], row["ours"], row["peer"], row["unit"], row["ratio"], row["bar"])
        lines.append((*map(cell, figures), met))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_alone(name: str) -> list[dict[str, Any]]:
    """Rows of one benchmark, run in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "rows.json"
        subprocess.run([sys.executable, __file__, name, "--write", str(output)], check=True)
        return json.loads(output.read_text())


def keep(name: str, rows: list[dict[str, Any]]) -> None:
    """Write the result files of one benchmark."""
    where = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        **{package: version(package) for package in VERSIONS},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"where": where, "rows": rows}, indent=1, ensure_ascii=False) + "\n"
    )
    about = ", ".join(f"{key} {value}" for key, value in where.items())
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{about}\n\n{table(rows)}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"which to run, by default all: {', '.join(benchmarks())}")
    parser.add_argument(
        "--write", type=Path, help="run the one benchmark named in this process and write its rows there"
    )
    options = parser.parse_args()
    unknown = set(options.names) - set(benchmarks())
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(benchmarks())}")
    if options.write:
        sys.path.insert(0, str(HERE))
        (name,) = options.names
        options.write.write_text(json.dumps(importlib.import_module(name).run()))
        return 0
    rows, failed = [], []
    for name in options.names or benchmarks():
        print(f"== {name}", flush=True)
        try:
            of_this = run_alone(name)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} stopped with exit status {error.returncode}")
            continue
        keep(name, of_this)
        print(table(of_this), flush=True)
        rows += of_this
    if len(options.names or benchmarks()) > 1:
        print(f"\n== all, on {processor()}\n{table(rows)}")
    failed += [f"{row['name']}: bar {row['bar']} missed" for row in rows if is_met(row) is False]
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
