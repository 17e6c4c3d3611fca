"""`python -m brigade lint [FILE ...]`: what is wrong with hostfiles, ds_configs, accelerate configs and recipes."""

import argparse
import time
from pathlib import Path

from ..errors import UserError
from ..errors.console import console, counted
from ..errors.findings import SEVERITIES, rules
from ..errors.flags import add_flags
from ..errors.tables import table
from . import translate
from .linter import Report, lint, markdown

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))


def run(options: argparse.Namespace) -> int:
    """Lint, or print the rules. Returns the exit code: 1 with errors, else 0, warnings and notes included."""
    if options.markdown and not options.rules:
        raise UserError("flag --markdown", "it says how --rules prints", "add --rules")
    if options.rules:
        print(markdown(), end="") if options.markdown else _table()
        return 0
    if options.write:
        if len(options.files) != 1:
            raise UserError(
                "flag --write", f"{counted(len(options.files), 'file')} named", "name one of another tool's"
            )
        print(*translate.write(Path(options.files[0]), Path(options.write)), sep="\n")
        return 0
    began = time.monotonic()
    report = lint(options.files)
    _print(report, options.notes, time.monotonic() - began)
    return 1 if report.counts()["error"] else 0


def _print(report: Report, notes: bool, seconds: float) -> None:
    from rich.text import Text

    out, shown = console(soft_wrap=True, highlight=False), report.shown(notes)
    for finding in shown:
        problem, cure = (" ".join(text.split()) for text in (finding.problem, finding.cure))
        severity = (finding.severity, STYLES[finding.severity])
        where, rest = report.where(finding), f" {finding.rule}: {problem}\n  cure: {cure}"
        issues = rules()[finding.rule].issues
        see = f"\n  see: {', '.join(issues)}" if issues else ""
        out.print(Text.assemble(where, "\n  ", severity, rest, (see, "dim")))
    counts, hidden = report.counts(), len(report.findings) - len(shown)
    numbers = ", ".join(counted(counts[severity], severity) for severity in SEVERITIES)
    more = f" ({hidden} not shown: --notes)" if hidden else ""
    out.print(f"{counted(len(report.files.read), 'file')}: {numbers}{more}, in {seconds:.2f} s")


def _table() -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("rule", "severity", "file", "why", "source", title="Lint's rules")
    for rule in rules().values():
        severity = Text(rule.severity, STYLES[rule.severity])
        table.add_row(rule.name, severity, rule.about, rule.says, "\n".join(rule.issues))
    console().print(table)
