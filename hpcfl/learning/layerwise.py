"""A module's layers as their gradients become ready, in real time: the backward pass has a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import Any

from hpcfl.base.lazy import Tensor, torch
from hpcfl.base.types import State
from hpcfl.learning.batches import RoundClosed
from hpcfl.models.modules import module


def as_ready(
    whole: module.Whole, params: State, loss: Callable[[State], Tensor], closed: Event
) -> Iterator[tuple[int, State, Tensor]]:
    """Yield one client's layers, last first: number (from 0), gradients ``{name: [1, …]}``, losses ``[1]``.

    `loss` returns these, by parameters ``{name: […]}``.

    Each leaves when it is ready. When the round has `closed`, or nobody asks any more, the backward pass ends at the
    next gradient. A part that the module has left out of this step has gradient 0.
    """
    leaves = {name: params[name].detach().requires_grad_() for name in whole.tensors}
    losses = loss(leaves)
    news, left, missing = SimpleQueue[str](), Event(), set(leaves)

    def ready(name: str) -> None:
        if closed.is_set() or left.is_set():
            raise RoundClosed
        news.put(name)

    for name, leaf in leaves.items():
        hooked: Any = leaf
        hooked.register_post_accumulate_grad_hook(lambda _, name=name: ready(name))
    with ThreadPoolExecutor(1, "hpcfl backward") as thread:
        done = thread.submit(losses.sum().backward)
        done.add_done_callback(lambda _: news.put(""))
        try:
            for number, names in reversed(list(enumerate(whole.groups))):
                while not missing.isdisjoint(names):
                    if told := news.get():
                        missing.remove(told)
                    elif isinstance(done.exception(), RoundClosed):
                        return
                    else:
                        done.result()  # whatever its error is
                        missing.clear()  # what is missing still had no part in it
                found = {name: leaves[name].grad for name in names}
                gradients = {n: (torch.zeros_like(leaves[n]) if g is None else g)[None] for n, g in found.items()}
                yield number, gradients, losses.detach()
        finally:
            left.set()
