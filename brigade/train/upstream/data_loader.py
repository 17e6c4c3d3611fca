"""The processes of torch's DataLoader that read ahead."""

from torch.utils.data import DataLoader


def end_workers(loader: DataLoader) -> None:
    """End them, where a loader has kept some for its next epoch.

    It has no public way for that. The garbage collector closes the pipes to them before it tells them to end, so that they are
    waited for, for five seconds (torch/utils/data/dataloader.py, _shutdown_workers).
    """
    if end := getattr(loader._iterator, "_shutdown_workers", None):
        end()
    loader._iterator = None
