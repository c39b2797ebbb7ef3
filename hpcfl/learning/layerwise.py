"""A module's layers as their gradients become ready, in real time: the backward pass has a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, Thread
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
    total, news, left = losses.sum(), SimpleQueue[str | BaseException](), Event()

    def ready(name: str) -> None:
        if closed.is_set() or left.is_set():
            raise RoundClosed
        news.put(name)

    def run() -> None:
        try:
            total.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:  # whatever it is, who waits must know
            news.put(error)
        else:
            news.put("")  # what is still missing had no part in it

    for name, leaf in leaves.items():
        hooked: Any = leaf
        hooked.register_post_accumulate_grad_hook(lambda _, name=name: ready(name))
    wanted, missing = list(enumerate(whole.groups)), set(leaves)
    thread = Thread(target=run, name="hpcfl backward", daemon=True)
    thread.start()
    try:
        while wanted:
            if missing.isdisjoint(wanted[-1][1]):
                number, names = wanted.pop()
                found = {name: leaves[name].grad for name in names}
                gradients = {n: (torch.zeros_like(leaves[n]) if g is None else g)[None] for n, g in found.items()}
                yield number, gradients, losses.detach()
            elif isinstance(told := news.get(), RoundClosed):
                return
            elif isinstance(told, BaseException):
                raise told
            else:
                missing = missing - {told} if told else set()
    finally:
        left.set()
        thread.join()
