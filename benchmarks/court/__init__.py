"""The court: who trains what, how far from a plain PyTorch loop (docs/evidence/court.md)."""


def tables() -> dict[str, str]:
    """Return the tables of docs/evidence/court.md from committed results."""
    from .page import tables as of_page

    return of_page()


def main() -> None:
    """Run the command, as python -m benchmarks.court does."""
    from .__main__ import main as command

    command()
