"""What the tests of ranks share: groups that run the cases which the selected tests ask for, and no others."""

import gc

import pytest


@pytest.fixture(scope="module")
def asked_for(request):
    """asked_for("name"): all values of this parameter among the selected tests of this file, and in their `cases` marks.

    So `make test`, `make test-all` and `-k` each start one group of ranks per file, and nothing runs that nobody looks at.
    """
    items = [item for item in request.session.items if item.path == request.node.path]

    def call(argument: str) -> set[str]:
        found = {
            item.callspec.params[argument] for item in items if argument in getattr(item, "callspec", NO_CASE).params
        }
        return found | {
            m.kwargs[argument] for item in items for m in item.iter_markers("cases") if argument in m.kwargs
        }

    return call


class NO_CASE:
    params = ()


@pytest.fixture(scope="session", autouse=True)
def imports_are_collected_once():
    """Engines collect garbage at each start and end; what torch and Transformers have imported is none."""
    import train  # noqa: F401

    gc.collect()
    gc.freeze()
