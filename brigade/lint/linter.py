"""One run of lint: which files it reads, all findings in order, and which of them are worth showing."""

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..errors.findings import SEVERITIES, Finding, Severity, rules
from ..train.recipe.files import REPOSITORY
from . import together
from .files import Files

# Where a project's files lie: `lint` without a file looks at these.
FOLDERS = {"recipes": "**/*.yaml", "ds_configs": "*.json", "accelerate_configs": "*.yaml", "hostfiles": "*"}


@dataclass(frozen=True)
class Report:
    """What lint found. findings: only the most severe of each place, file by file; named: the files that the user named"""

    files: Files
    findings: list[Finding]
    named: frozenset[str]

    def counts(self) -> Counter[str]:
        return Counter(finding.severity for finding in self.findings)

    def shown(self, notes: bool) -> list[Finding]:
        """The findings to show: errors and warnings always, notes where `notes` asks for them or the user named the file."""
        return [f for f in self.findings if f.severity != "note" or notes or f.file in self.named]

    def where(self, finding: Finding) -> str:
        line = self.files.line(finding)
        key = f": {finding.at}" if isinstance(finding.at, str) and finding.at else ""
        return f"{finding.file}{f':{line}' if line else ''}{key}"


def lint(names: list[str]) -> Report:
    """Check these files, each by itself and all together; without names, all of the project's and those they refer to."""
    files = Files()
    findings: list[Finding] = []
    for group in [dict.fromkeys(names)] if names else [[name] for name in project_files()]:
        findings += together.findings(files, [files.open(name) for name in group])
    findings += [finding for file in files.read.values() for finding in file.findings]
    order = {file.name: position for position, file in enumerate(files.read.values())}
    findings = sorted(_most_severe(findings), key=lambda f: (order.get(f.file, len(order)), files.line(f) or 0))
    return Report(files, findings, frozenset(names))


def project_files() -> list[str]:
    """The recipes, ds_configs, accelerate configs and hostfiles in this directory, or else in Brigade's own clone."""
    names = []
    for folder, pattern in FOLDERS.items():
        root = next((root for root in (Path(), REPOSITORY) if (root / folder).is_dir()), None)
        if root is not None:
            paths = sorted((root / folder).glob(pattern))
            names += [str(path.relative_to(root)) for path in paths if path.is_file() and not path.name.startswith(".")]
    return [name for name in names if not name.endswith(".md")]


def _most_severe(findings: list[Finding]) -> list[Finding]:
    """Each finding once, and only the most severe of each place: whoever fixes an error sees afterwards what else is there."""
    worst: dict[tuple[str, str | int], Severity] = {}
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        worst.setdefault((finding.file, finding.at), finding.severity)
    return [f for f in dict.fromkeys(findings) if f.severity == worst[f.file, f.at]]


def markdown() -> str:
    """The tables of docs/lint.md, in Markdown."""
    lines = []
    for about, group in itertools.groupby(rules().values(), key=lambda rule: rule.about):
        lines += [f"## {about[0].upper()}{about[1:]}", "", "| rule | severity | why | source |", "|---|---|---|---|"]
        for rule in group:
            lines.append(f"| `{rule.name}` | {rule.severity} | {rule.says} | {', '.join(rule.issues)} |")
        lines.append("")
    return "\n".join(lines)
