"""What theories of descent ask of a problem: smoothness, features on the unit cube, samples of all classes."""

from __future__ import annotations

from hpcfl.algorithms.base import Batch, Task
from hpcfl.base.errors import UsageError, refusal


def server_samples(task: Task, who: str) -> Batch:
    """Return the server's training samples, ``[1, n, …]``; UsageError where it has none."""
    samples = task.server_batch()
    if samples is None:
        raise UsageError(f"{who} needs samples at the server: expected data.server above 0")
    return samples


def kinks(task: Task) -> list[str]:
    """Return the kinds of modules that are continuous but not smooth."""
    return sorted({kind for layer in task.layers for kind in layer.nonsmooth})


def check_still(task: Task, who: str) -> None:
    """Raise UsageError where the loss draws something (dropout, images cropped at random), or is not one of ours."""
    if not task.loss.ours:
        expected = f"a loss of hpcfl's own, since {who} takes each sample by itself"
        raise refusal("task.loss", expected, task.loss.name, "'auto'")
    drawing = [layer.name for layer in task.layers if layer.random]
    if drawing or task.federation.augment is not None:
        what = f"dropout in {', '.join(drawing)}" if drawing else "data.augment = true"
        raise UsageError(f"{who} needs a loss that draws nothing, but there is {what}")


def check_unit_cube(task: Task, samples: Batch, who: str) -> None:
    """Raise UsageError where features of a client's training samples, or of the server's, are outside [0, 1]^d."""
    clients = range(task.federation.clients)
    parts = {f"client {client}": task.federation.client(client).train_features for client in clients}
    parts["the server"] = samples.x.numpy(force=True)
    for whose, x in parts.items():
        least, most = float(x.min()), float(x.max())
        if least < 0 or most > 1:
            got = f"those of {whose} reach from {least:.3g} to {most:.3g}"
            hint = "data.scale = 'unit', or data.name = 'reduced' or 'unit_cube'"
            raise UsageError(f"{who} needs features in [0, 1]^d, but {got}; did you mean {hint}?")
