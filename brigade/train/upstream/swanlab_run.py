"""SwanLab 0.10 raises where its get_run() returned None, and Transformers' callback asks it for None before it begins a run
(transformers/integrations/integration_utils.py: SwanLabCallback.setup): each run with `--report_to swanlab` would end there."""


def answer_none_before_a_run() -> None:
    """Let swanlab.get_run() return None while there is no run."""
    import swanlab

    ask = swanlab.get_run

    def get_run() -> object:
        try:
            return ask()
        except RuntimeError:
            return None

    swanlab.get_run = get_run
