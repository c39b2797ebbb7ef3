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
    wanted, missing, left = list(enumerate(whole.groups)), set(leaves), Event()
    with _Backward(losses.sum(), leaves, lambda: closed.is_set() or left.is_set()) as news:
        try:
            while wanted:
                if missing.isdisjoint(wanted[-1][1]):
                    number, names = wanted.pop()
                    yield number, {name: _gradient(leaves[name]) for name in names}, losses.detach()
                elif isinstance(found := news.get(), RoundClosed):
                    return
                elif isinstance(found, BaseException):
                    raise found
                else:  # once the pass has ended, what is still missing had no part in it
                    missing = missing - {found} if found else set()
        finally:
            left.set()


class _Backward:
    """A backward pass in a thread, within the block, which is told the names whose gradients are ready, then "".

    In place of this it may be told what ended the pass.
    """

    def __init__(self, loss: Tensor, leaves: State, over: Callable[[], bool]) -> None:
        self.news: SimpleQueue[str | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._run, args=(loss,), name="hpcfl backward", daemon=True)
        for name, leaf in leaves.items():
            hooked: Any = leaf
            hooked.register_post_accumulate_grad_hook(lambda _, name=name: self._ready(name, over))

    def _ready(self, name: str, over: Callable[[], bool]) -> None:
        if over():
            raise RoundClosed
        self.news.put(name)

    def _run(self, loss: Tensor) -> None:
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:  # whatever it is, who waits must know
            self.news.put(error)
        else:
            self.news.put("")

    def __enter__(self) -> SimpleQueue[str | BaseException]:
        self._thread.start()
        return self.news

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def _gradient(leaf: Tensor) -> Tensor:
    return (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)[None]
