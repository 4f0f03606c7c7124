"""``trtllm-av-doctor``: what this machine can do, whether it does it, and the plugin library.

Exit codes: 0 success, 1 a failed self-test or build, 2 wrong usage. A user's mistake is one line on standard
error; with ``--json`` standard output holds one object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trtllm_av.runtime.console import run_console
from trtllm_av.runtime.errors import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Run a tiny engine on every path; takes minutes.")
    ] = False,
    report: Annotated[
        Path, typer.Option("--report", help="Where --selftest writes its JSON report.")
    ] = Path("trtllm-av-report.json"),
    build_plugin: Annotated[
        Path | None,
        typer.Option("--build-plugin", help="TensorRT's include folder; builds the C++ plugin."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List what is installed, which paths are usable, and why the others are not."""
    if build_plugin is not None:
        if selftest:
            raise UsageError("--build-plugin and --selftest are two steps; give one of them")
        _build_plugin(build_plugin, as_json=as_json)
        return
    from trtllm_av.builder.doctor import SECTIONS

    sections = [look() for look in SECTIONS]
    content: dict[str, Any] = {"sections": [dataclasses.asdict(section) for section in sections]}
    if not as_json:
        for section in sections:
            _print_rows(section.title, [(c.is_usable, c.name, c.detail) for c in section.checks])
    is_healthy = True
    if selftest:
        results = _selftest(report, content)
        is_healthy = all(result["status"] != "failed" for result in results)
        if not as_json:
            rows = [
                (r["status"] != "failed", r["path"], f"{r['status']}: {r['detail']}")
                for r in results
            ]
            _print_rows("self-test", rows)
            print(f"report written to {report}; attach it to an issue")
    if as_json:
        print(json.dumps(content))
    if not is_healthy:
        raise typer.Exit(1)


def _selftest(report: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Run every path, add the results to ``content`` and write it to ``report``."""
    from trtllm_av.builder.selftest import PATHS, run_isolated

    try:
        is_new = not report.exists()
        report.open("a").close()  # before minutes of work; a folder fails here
        if is_new:
            report.unlink()  # who interrupts them finds no empty report
        results = []
        for name in PATHS:
            print(f"self-test {name} …", file=sys.stderr, flush=True)
            results.append(dataclasses.asdict(run_isolated(name)))
        content["selftest"] = results
        report.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--report {str(report)!r} cannot be written ({error.strerror}); name another file"
        ) from None
    return results


def _build_plugin(include_dir: Path, *, as_json: bool) -> None:
    from trtllm_av.plugins.plugin_build import build_plugin, default_library

    library = build_plugin(include_dir, default_library())
    print(json.dumps({"library": str(library)}) if as_json else f"plugin library {library}")


def _print_rows(title: str, rows: list[tuple[bool, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a remedy is copied: nothing of it is cut off
    for is_fine, name, detail in rows:
        table.add_row("yes" if is_fine else "no", name, Text(detail))
    Console().print(table)


def main() -> None:
    """The console script."""
    run_console(app)


if __name__ == "__main__":
    main()
