"""Who trains what, how far from a plain loop: each trainer answers each question in an environment of its own.

    python -m benchmarks.court                                     # Brigade alone, in this environment
    python -m benchmarks.court --environments DIR --install --write      # every peer -> docs/evidence/court.md
    python -m benchmarks.court --environments DIR --peer trl --question packing-dense packing-state

DIR has a virtual environment for each file of benchmarks/court/requirements/; --install makes those that are missing. --folder
keeps what the runs wrote: logs, batches and saved models.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers

from . import jobs, page, verdicts
from .questions import Question, read


def hear(
    peer: jobs.Peer, questions: list[Question], folder: Path, environments: Path | None, again: bool
) -> list[dict[str, Any]]:
    """Let a peer answer, and return a row of results for each question. again: it has answered, in `folder`"""
    python = jobs.python_of(peer, environments)
    if python is None:
        print(f"{peer.name}: no environment {peer.requirements} in {environments}")
        return []
    refused = page.refusals(peer.name)
    if not again:
        jobs.run(peer, [question for question in questions if question.name not in refused], folder, python)
    rows = []
    for question in questions:
        versions, verdict = {}, verdicts.Verdict(verdicts.REFUSED, refused.get(question.name, ""))
        if question.name not in refused:
            job = jobs.job_of(question, peer, folder)
            if not jobs.has_answered(job):
                continue
            results = jobs.results_of(job)
            versions, verdict = results[0].get("versions", {}), verdicts.judge(question, job, results)
        rows.append(
            {
                "peer": peer.name,
                "question": question.name,
                "verdict": verdict.kind,
                "said": page.without_paths(verdict.said, folder),
                "differences": {key: float(f"{value:.1e}") for key, value in verdict.differences.items()},
                "versions": versions,
                "date": time.strftime("%Y-%m-%d"),
            }
        )
        words = verdicts.in_words(verdict.differences)
        print(f"{peer.name:14} {question.name:18} {verdict.kind:8} {words} {verdict.said}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", nargs="+", choices=jobs.PEERS, default=list(jobs.PEERS))
    parser.add_argument("--question", nargs="+", choices=read(), default=list(read()))
    parser.add_argument("--environments", type=Path, help="a directory of virtual environments")
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--folder", type=Path, help="where runs are kept; default: a temporary directory")
    parser.add_argument("--again", action="store_true", help="run nothing: judge what lies in --folder")
    parser.add_argument("--write", action="store_true", help="write the results and the page")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what runs
    transformers.utils.logging.disable_progress_bar()
    questions = [question for name, question in read().items() if name in options.question]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        for name in options.peer:
            peer = jobs.PEERS[name]
            if options.install and jobs.python_of(peer, options.environments) is None:
                try:
                    jobs.install(peer, options.environments)
                except subprocess.CalledProcessError as error:
                    print(f"{name}: {error}")
            asked = [question for question in questions if question.name in (peer.only or options.question)]
            rows = hear(peer, asked, folder, options.environments, options.again)
            if options.write:
                page.write(rows)


if __name__ == "__main__":
    main()
